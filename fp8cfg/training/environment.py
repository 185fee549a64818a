"""Environment record: versions, machine, code and environment variables that a result may depend on besides the recipe."""

from __future__ import annotations

import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp8cfg import __version__
from fp8cfg.config.installed_version import installed_version
from fp8cfg.report.installation import PACKAGES
from fp8cfg.report.installation import VARIABLES as CHANGES_RESULTS

VARIABLES = {
    *CHANGES_RESULTS,
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
    "TORCHDYNAMO_DISABLE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_FREEZING",
    "TORCHINDUCTOR_MAX_AUTOTUNE",
    "TORCH_COMPILE_DEBUG",
    "TORCH_LOGS",
}
"""Environment variables that are kept, by name: switches, numbers, a folder. A prefix would let in what others call alike."""
NO_DIFFERENCE = re.compile(r"command|host|variables\.(TORCHELASTIC_\w*|\w*_DIR)")
"""What may differ between two runs without any meaning for their results."""


def environment() -> dict[str, Any]:
    """The environment of this process; JSON values only.

    Of the environment only VARIABLES are kept.
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
    """`key: then -> now` for all that differs between two environments; `before`, read from a file, may be anything."""
    old, new = _flat(before), _flat(now)
    lines = [
        f"{key}: {_shown(old.get(key))} -> {_shown(new.get(key))}"
        for key in {**new, **old}
        if old.get(key) != new.get(key) and not NO_DIFFERENCE.fullmatch(key)
    ]
    if old.get("code.dirty") is True and new.get("code.dirty") is True:
        lines.append(
            "code: uncommitted changes then and now; whether they are the same ones is not recorded"
        )
    return lines


def _flat(data: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in data.items():
        out |= (
            _flat(value, f"{at}{key}.")
            if isinstance(value, Mapping)
            else {_plain(at + str(key)): value}
        )
    return out


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return "none" if value in (None, []) else _plain(text)


def _plain(text: str) -> str:
    """One line that a terminal prints as it is, whoever wrote the file."""
    return "".join(c if c.isprintable() else "?" for c in text[:100])


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _code() -> dict[str, Any] | None:
    """Commit of this code and whether it has uncommitted changes; None where it is not tracked in a git work tree."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return (
            None  # installed into an environment that happens to lie inside somebody's repository
        )
    commit, changes = (
        _git(here.parent, "rev-parse", "HEAD"),
        _git(here.parent, "status", "--porcelain"),
    )
    return {"commit": commit, "dirty": bool(changes)} if commit else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", "core.fsmonitor=false", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
