"""Environment record: versions, machine, code and variables that can change a run's results.

`describe_machine` is for `fp8cfg doctor`. `collect_environment` describes a run and is saved in its
run folder.
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
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
]
"""Packages whose versions may change results."""
# A backend of another package has its own.
for _backend in BACKENDS:
    for _package in capabilities(_backend).distributions:
        if _package not in PACKAGES:
            PACKAGES.append(_package)
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


def describe_machine(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describes this machine as plain data, as `fp8cfg doctor` prints it.

    Args:
        environ: Environment variables of the process.

    Returns:
        Versions, devices, free memory in bytes, the variables with an effect, and whether each
        precision preset runs on each backend. JSON values only.
    """
    hardware, devices = _find_devices()
    variables = {}
    for name, value in sorted(environ.items()):
        # All NVTE_ variables: newer versions of Transformer Engine have more than this table.
        has_effect = name in INSTALL_VARIABLES or name.startswith("NVTE_")
        if has_effect and not SECRET.search(name):
            variables[name] = {"value": value, "effect": INSTALL_VARIABLES.get(name, "")}
    precisions = {}
    for preset, precision in _load_presets().items():
        precisions[preset] = {
            backend: backend_support(precision, backend, hardware) for backend in BACKENDS
        }
    return {
        "fp8cfg": __version__,
        "python": platform.python_version(),
        "os": platform.platform(),
        "cores": _count_cores(),
        "free_memory": free_memory("cpu"),
        **devices,
        "driver": _driver_version(),
        "compiler": _compiler_version(),
        "packages": {
            name: installed_version(name) for name in (*PACKAGES, "transformers", "triton")
        },
        "variables": variables,
        "precision": precisions,
    }


def backend_support(precision: Precision, backend: str, hardware: Hardware | None) -> str:
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
        if backend == registry.REFERENCE:
            return "runs"
        return "no FP8 in this preset: torch runs the GEMMs for every backend"
    problem = registry.problem(backend)
    if problem:
        return f"backend={backend}: {problem}"
    rules = registry.rules(backend)
    problem = rules.unavailable()
    if not problem:
        problem = "; ".join(map(str, rules.refusals(precision, hardware)))
    if problem:
        return problem
    product, *_ = rules.product(precision, hardware)
    if product == "emulate":
        return "emulated"
    return "runs"


def _load_presets() -> dict[str, Precision]:
    """Returns the shipped precision presets by name."""
    library = Library()
    presets = {}
    for name in library.choices("precision"):
        presets[name] = Precision(**node("precision", name, library))
    return presets


def _count_cores() -> int | None:
    """Returns the number of CPU cores that this process may use."""
    # cpu_count() ignores the affinity mask that containers and taskset set. macOS has no mask.
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _find_devices() -> tuple[Hardware | None, dict[str, Any]]:
    """Returns the hardware of a run (None without torch), and torch's CUDA version and GPUs."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of torch cannot be loaded
        return None, {"cuda": None, "gpus": [], "torch_problem": str(error).splitlines()[0]}
    gpus = []
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        gpus.append(
            {"name": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory": gpu.total_memory}
        )
    return find_hardware("auto"), {"cuda": torch.version.cuda, "gpus": gpus, "torch_problem": None}


def _driver_version() -> str | None:
    """Returns the version of NVIDIA's kernel module, None without one."""
    # Not from nvidia-smi: a container may lack it.
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    match = re.search(r"Module\s.*?(\d+\.[\d.]+)", text)
    return match[1] if match else None


def _compiler_version() -> str | None:
    """Returns the first line of `g++ --version`, None without g++."""
    if shutil.which("g++") is None:
        return None
    process = subprocess.run(["g++", "--version"], capture_output=True, check=False)
    return process.stdout.decode(errors="replace").partition("\n")[0] or None


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


def collect_environment() -> dict[str, Any]:
    """Describes this process for environment.json.

    Returns:
        Versions, hardware, the command, the git commit and the variables in VARIABLES. JSON
        values only.
    """
    import torch  # inside: readers of run folders do not need it

    packages = {"fp8cfg": __version__}
    for name in PACKAGES:
        version = installed_version(name)
        if version:
            packages[name] = version
    variables = {}
    for name, value in sorted(os.environ.items()):
        if name in VARIABLES:
            variables[name] = value
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "packages": packages,
        "cuda": torch.version.cuda,
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": torch.get_num_threads(),
        "ranks": int(os.environ.get("WORLD_SIZE", "1")),
        "code": _code_version(),
        "variables": variables,
    }


def compare_environments(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Compares two environment records.

    Args:
        before: The earlier record. It comes from a file, so its values can have any type.
        now: The later record.

    Returns:
        One line per difference, as "key: then -> now".
    """
    old = _flatten(before)
    new = _flatten(now)
    lines = []
    # Keys of `now` first: their order is ours, the file may have any.
    for key in {**new, **old}:
        if old.get(key) == new.get(key) or NO_DIFFERENCE.fullmatch(key):
            continue
        lines.append(f"{key}: {_format_value(old.get(key))} -> {_format_value(new.get(key))}")
    # The commits can be equal although the code is not.
    if old.get("code.dirty") is True and new.get("code.dirty") is True:
        lines.append(
            "code: uncommitted changes then and now; whether they are the same ones is not recorded"
        )
    return lines


def _flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings to dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[_to_printable(f"{prefix}{key}")] = value
    return flat


def _format_value(value: Any) -> str:
    """Formats a value in one line. None and empty lists are "none"."""
    if value in (None, []):
        return "none"
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    return _to_printable(str(value))


def _to_printable(text: str) -> str:
    """Returns at most 100 printable characters of `text`."""
    # The text may come from somebody else's file. Escape sequences could control the terminal.
    characters = [char if char.isprintable() else "?" for char in text[:100]]
    return "".join(characters)


def _cpu_name() -> str:
    """Returns the name of the CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    # Arm kernels and other systems have no "model name".
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    if match:
        return match[1]
    return platform.processor() or platform.machine()


def _code_version() -> dict[str, Any] | None:
    """Returns the commit of this code and whether it has changes. None if git does not track it."""
    file = Path(__file__).resolve()
    folder = file.parent
    if _run_git(folder, "ls-files", "--error-unmatch", file.name) is None:
        return None  # the package is installed in an environment inside another repository
    commit = _run_git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    changes = _run_git(folder, "status", "--porcelain")
    return {"commit": commit, "dirty": bool(changes)}


def _run_git(folder: Path, *arguments: str) -> str | None:
    """Runs git in `folder` and returns its output, None if it fails."""
    # fsmonitor could start a daemon or a hook. Optional locks could disturb a user's git command.
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    try:
        process = subprocess.run(command, cwd=folder, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    # Git prints the bytes of a file name.
    return process.stdout.decode(errors="replace").strip()
