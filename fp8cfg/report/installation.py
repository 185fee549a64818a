"""Installation report: packages, hardware and environment variables that matter to low-precision training, without TE or MS-AMP."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8cfg import __version__
from fp8cfg.backends import backend_registry
from fp8cfg.backends.backend_choice import Hardware
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.resolve import node
from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.installed_version import installed_version
from fp8cfg.config.precision import Precision
from fp8cfg.report.machine import find_hardware, free_memory

BACKENDS = backend_registry.names()
PACKAGES = [
    "torch",
    "numpy",
    "hydra-core",
    "omegaconf",
    "fiddle",
    "pydantic",
    "safetensors",
    "torchao",
    "msamp",
]
PACKAGES += [
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
]
PACKAGES += [
    package
    for name in BACKENDS
    for package in capabilities(name).distributions
    if package not in PACKAGES
]
"""Packages whose versions may change results."""
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL")
"""In the name of an environment variable: its value is neither printed nor kept."""
VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "current scaling has scales that are powers of two",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "block scaling has scales that are no powers of two",
    "NVTE_UNFUSED_FP8_UPDATE": "delayed scaling rolls histories by another rule",
    "NVTE_BACKWARD_OVERRIDE": "dgrad and wgrad run in another precision",
    "NVTE_DPA_FP8_RECIPE": "attention has another FP8 recipe than the layers",
    "NVTE_DPA_FP8_FORMAT": "attention has other formats than the layers",
    "NVTE_FP8_DPA_BWD": "the backward pass of attention is in FP8 or is not",
    "NVTE_NVFP4_DISABLE_RHT": "nvfp4 without its Hadamard transform",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "nvfp4 rounds gradients to nearest",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "nvfp4 scales weights along rows",
    "NVTE_FLASH_ATTN": "attention's kernel",
    "NVTE_FUSED_ATTN": "attention's kernel",
    "NVTE_UNFUSED_ATTN": "attention's kernel",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "attention may differ from run to run",
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "TE unpickles state, which can run code",
    "NVTE_TORCH_COMPILE": "TE compiles its fusions or does not",
    "NVTE_DEBUG": "TE's debug features change what runs",
    "OMP_NUM_THREADS": "the order of sums on a CPU",
    "MKL_NUM_THREADS": "the order of sums on a CPU",
    "CUBLAS_WORKSPACE_CONFIG": "whether cuBLAS is deterministic",
    "NVIDIA_TF32_OVERRIDE": "float32 products in TF32",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "float32 products in TF32",
    "CUDA_VISIBLE_DEVICES": "which GPUs there are",
    "TORCHDYNAMO_DISABLE": "no run is compiled",
    "TORCH_COMPILE_DISABLE": "no run is compiled",
}
"""Environment variables that change results, and how (Transformer Engine's, cuBLAS's and torch's documentation)."""


def inventory(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Everything as plain data."""
    hardware, devices = _torch()
    return {
        "fp8cfg": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cores": (
            len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        ),
        "free_memory": free_memory("cpu"),
        **devices,
        "driver": _driver(),
        "compiler": _compiler(),
        "packages": {
            name: installed_version(name) for name in (*PACKAGES, "transformers", "triton")
        },
        "variables": {
            k: {"value": v, "effect": VARIABLES.get(k, "")}
            for k, v in sorted(environ.items())
            if (k in VARIABLES or k.startswith("NVTE_")) and not SECRET.search(k)
        },
        "precision": {
            preset: {backend: can(precision, backend, hardware) for backend in BACKENDS}
            for preset, precision in _presets().items()
        },
    }


def can(precision: Precision, backend: str, hardware: Hardware | None) -> str:
    """ "runs", "emulated", or why `backend` does not run `precision` on `hardware`; None is a machine without torch."""
    if hardware is None:
        return "torch is not installed"
    if not precision.fp8.enabled:
        other = "there is no FP8 in it, and torch multiplies whatever the backend is"
        return "runs" if backend == backend_registry.REFERENCE else other
    if problem := backend_registry.problem(backend):
        return f"backend={backend}: {problem}"
    rules = backend_registry.rules(backend)
    if why := rules.unavailable() or "; ".join(rules.refusals(precision, hardware)):
        return why
    return "emulated" if rules.product(precision, hardware)[0] == "emulate" else "runs"


def _presets() -> dict[str, Precision]:
    library = Library()
    return {
        name: Precision(**node("precision", name, library)) for name in library.choices("precision")
    }


def _torch() -> tuple[Hardware | None, dict[str, Any]]:
    """The hardware that a run would have, None without torch; and torch's CUDA and GPUs."""
    try:
        import torch
    except (ImportError, OSError) as e:  # a library of its own that cannot be loaded is an OSError
        return None, {"cuda": None, "gpus": [], "torch_problem": str(e).splitlines()[0]}
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append(
            {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory": p.total_memory}
        )
    return find_hardware("auto"), {"cuda": torch.version.cuda, "gpus": gpus, "torch_problem": None}


def _driver() -> str | None:
    """The version of NVIDIA's kernel module."""
    try:
        found = re.search(
            r"Module\s.*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text()
        )
    except OSError:
        return None
    return found[1] if found else None


def _compiler() -> str | None:
    """The first line of `g++ --version`."""
    if shutil.which("g++") is None:
        return None
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] or None
