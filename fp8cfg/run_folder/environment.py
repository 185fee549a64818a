"""Environment record: versions, machine, code and variables that can change a run's results.

`inventory` describes a machine for `fp8cfg doctor`. `environment` describes a run and is saved in
its run folder.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Hardware
from fp8cfg.composition.config_groups import Library
from fp8cfg.composition.hydra_application import node
from fp8cfg.planning.hardware import find_hardware, free_memory
from fp8cfg.schema import __version__
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.packages import installed_version
from fp8cfg.schema.precision import Precision

BACKENDS = registry.names()
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
"""Variables with such a name are neither printed nor saved."""
INSTALL_VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "current scaling uses powers of two as scales",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "block scaling uses scales other than powers of two",
    "NVTE_UNFUSED_FP8_UPDATE": "delayed scaling rolls amax histories by another rule",
    "NVTE_BACKWARD_OVERRIDE": "dgrad and wgrad run in another precision",
    "NVTE_DPA_FP8_RECIPE": "attention uses another FP8 recipe than the layers",
    "NVTE_DPA_FP8_FORMAT": "attention uses other formats than the layers",
    "NVTE_FP8_DPA_BWD": "turns FP8 on or off in the backward pass of attention",
    "NVTE_NVFP4_DISABLE_RHT": "NVFP4 without its Hadamard transform",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "NVFP4 rounds gradients to nearest",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "NVFP4 scales weights along rows",
    "NVTE_FLASH_ATTN": "selects the attention kernel",
    "NVTE_FUSED_ATTN": "selects the attention kernel",
    "NVTE_UNFUSED_ATTN": "selects the attention kernel",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "attention may differ from run to run",
    "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE": "Transformer Engine unpickles state, which can run code",
    "NVTE_TORCH_COMPILE": "turns compiled fusions of Transformer Engine on or off",
    "NVTE_DEBUG": "Transformer Engine's debug features change the code that runs",
    "OMP_NUM_THREADS": "changes the order of sums on a CPU",
    "MKL_NUM_THREADS": "changes the order of sums on a CPU",
    "CUBLAS_WORKSPACE_CONFIG": "whether cuBLAS is deterministic",
    "NVIDIA_TF32_OVERRIDE": "fp32 GEMMs use TF32",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "fp32 GEMMs use TF32",
    "CUDA_VISIBLE_DEVICES": "limits the visible GPUs",
    "TORCHDYNAMO_DISABLE": "turns compilation off",
    "TORCH_COMPILE_DISABLE": "turns compilation off",
}
"""Environment variables that change results, with their effect.

Sources: documentation of Transformer Engine, cuBLAS and torch.
"""


def inventory(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describes this machine as plain data, as `fp8cfg doctor` prints it.

    Args:
        environ: Environment variables of the process.

    Returns:
        Versions, devices, free memory in bytes, the variables with an effect, and whether each
        precision preset runs on each backend. JSON values only.
    """
    hardware, devices = _torch()
    return {
        "fp8cfg": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        # cpu_count() ignores the affinity mask that containers and taskset set. macOS has no mask.
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
        # All NVTE_ variables: newer versions of Transformer Engine have more than this table.
        "variables": {
            k: {"value": v, "effect": INSTALL_VARIABLES.get(k, "")}
            for k, v in sorted(environ.items())
            if (k in INSTALL_VARIABLES or k.startswith("NVTE_")) and not SECRET.search(k)
        },
        "precision": {
            preset: {backend: can(precision, backend, hardware) for backend in BACKENDS}
            for preset, precision in _presets().items()
        },
    }


def can(precision: Precision, backend: str, hardware: Hardware | None) -> str:
    """Returns whether a backend runs a precision: "runs", "emulated", or the reason why not.

    Args:
        precision: The precision node of a recipe.
        backend: Name of the backend.
        hardware: The device. None on a machine without torch.
    """
    if hardware is None:
        return "torch is not installed"
    if not precision.fp8.enabled:
        # Without FP8 all backends would run the same GEMMs. Only the reference backend lists them.
        other = "no FP8 in this preset: torch runs the GEMMs for every backend"
        return "runs" if backend == registry.REFERENCE else other
    if problem := registry.problem(backend):
        return f"backend={backend}: {problem}"
    rules = registry.rules(backend)
    if why := rules.unavailable() or "; ".join(map(str, rules.refusals(precision, hardware))):
        return why
    return "emulated" if rules.product(precision, hardware)[0] == "emulate" else "runs"


def _presets() -> dict[str, Precision]:
    """Returns the shipped precision presets by name."""
    library = Library()
    return {
        name: Precision(**node("precision", name, library)) for name in library.choices("precision")
    }


def _torch() -> tuple[Hardware | None, dict[str, Any]]:
    """Returns the hardware of a run (None without torch), and torch's CUDA version and GPUs."""
    try:
        import torch
    except (ImportError, OSError) as e:  # OSError: a shared library of torch cannot be loaded
        return None, {"cuda": None, "gpus": [], "torch_problem": str(e).splitlines()[0]}
    gpus = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        gpus.append(
            {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory": p.total_memory}
        )
    return find_hardware("auto"), {"cuda": torch.version.cuda, "gpus": gpus, "torch_problem": None}


def _driver() -> str | None:
    """Returns the version of NVIDIA's kernel module, None without one."""
    # Not from nvidia-smi: a container may lack it.
    try:
        found = re.search(
            r"Module\s.*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text()
        )
    except OSError:
        return None
    return found[1] if found else None


def _compiler() -> str | None:
    """Returns the first line of `g++ --version`, None without g++."""
    if shutil.which("g++") is None:
        return None
    done = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0] or None


VARIABLES = {
    *INSTALL_VARIABLES,
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_LAUNCH_BLOCKING",
    "FP8CFG_FAILPOINT",
    "NCCL_ALGO",
    "NCCL_PROTO",
    "NVTE_APPLY_QK_LAYER_SCALING",
    "NVTE_BIAS_DROPOUT_FUSION",
    "NVTE_BIAS_GELU_NVFUSION",
    "NVTE_DEBUG_LEVEL",
    "NVTE_DPA_FP8CS_REDUCE_AMAX",
    "NVTE_DPA_FP8DS_AMAX_ALGO",
    "NVTE_DPA_FP8DS_AMAX_HISTLEN",
    "NVTE_DPA_FP8DS_REDUCE_AMAX",
    "NVTE_FP8_GEMM_HIGH_PRECISION_ACCUMULATION",
    "NVTE_FRAMEWORK",
    "NVTE_FUSED_ATTN_BACKEND",
    "NVTE_NORM_BWD_USE_CUDNN",
    "NVTE_NORM_FWD_USE_CUDNN",
    "NVTE_NVFP4_4OVER6",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION",
    "NVTE_USE_FAST_MATH",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_FREEZING",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_COMPILE_DEBUG",
    "TORCH_LOGS",
}
"""Environment variables saved with a run. Full names only: a prefix could match a secret."""
NO_DIFFERENCE = re.compile(r"command|host|variables\.(TORCHELASTIC_\w*|\w*_DIR)")
"""Entries that may differ between two runs without an effect on results."""


def environment() -> dict[str, Any]:
    """Describes this process for environment.json.

    Returns:
        Versions, hardware, the command, the git commit and the variables in VARIABLES. JSON
        values only.
    """
    import torch  # inside: readers of run folders do not need it

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": (
            {"fp8cfg": __version__}
            | {name: version for name in PACKAGES if (version := installed_version(name))}
        ),
        "cuda": torch.version.cuda,
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu(),
        "cpu_count": os.cpu_count(),
        "gpus": gpus,
        "threads": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "code": _code(),
        "variables": {k: v for k, v in sorted(os.environ.items()) if k in VARIABLES},
    }


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compares two environment records.

    Args:
        before: The earlier record. It comes from a file, so its values can have any type.
        now: The later record.

    Returns:
        One line per difference, as "key: then -> now".
    """
    old, new = _flat(before), _flat(now)
    # Keys of `now` first: their order is ours, the file may have any.
    lines = [
        f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in {**new, **old}
        if old.get(key) != new.get(key) and not NO_DIFFERENCE.fullmatch(key)
    ]
    # The commits can be equal although the code is not.
    if old.get("code.dirty") is True and new.get("code.dirty") is True:
        lines.append(
            "code: uncommitted changes then and now; whether they are the same ones is not recorded"
        )
    return lines


def _flat(data: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """Flattens nested mappings to dotted keys. `at` is the prefix of the keys."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= (
            _flat(value, f"{at}{key}.")
            if isinstance(value, Mapping)
            else {_plain(at + str(key)): value}
        )
    return out


def _shown(value: Any) -> str:
    """Formats a value in one line. None and empty lists are "none"."""
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if value in (None, []) else _plain(text)


def _plain(text: str) -> str:
    """Returns at most 100 printable characters of `text`."""
    # The text may come from somebody else's file. Escape sequences could control the terminal.
    return "".join(c if c.isprintable() else "?" for c in text[:100])


def _cpu() -> str:
    """Returns the name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    # Arm kernels and other systems have no "model name".
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _code() -> dict[str, Any] | None:
    """Returns the commit of this code and whether it has changes. None if git does not track it."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return None  # the package is installed in an environment inside another repository
    commit, changes = (
        _git(here.parent, "rev-parse", "HEAD"),
        _git(here.parent, "status", "--porcelain"),
    )
    return {"commit": commit, "dirty": bool(changes)} if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    """Runs git in `folder` and returns its output, None if it fails."""
    # fsmonitor could start a daemon or a hook. Optional locks could disturb a user's git command.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
