"""Local hardware: the device of this machine, and the memory that is free on it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from fp8cfg.backends.backend_choice import Hardware
from fp8cfg.config.errors import ConfigError


def find_hardware(accelerator: str) -> Hardware:
    """The device that `trainer.accelerator` means here. Raises ConfigError where it is cuda and there is none."""
    import torch

    if accelerator == "cuda" and (why := no_cuda()):
        raise ConfigError(
            f"trainer.accelerator=cuda: torch has no CUDA device here ({why}); write cpu or auto"
        )
    if accelerator == "cpu" or not torch.cuda.is_available():
        return Hardware("cpu")
    major, minor = torch.cuda.get_device_capability()
    version = [int(part) for part in (torch.version.cuda or "0.0").split(".")]
    return Hardware("cuda", (major, minor), (version[0], version[1]), cudnn=_cudnn())


def _cudnn() -> tuple[int, int, int] | None:
    """The version of cuDNN, which since 9 is a number as 91900; None where torch refuses the one that it finds."""
    from torch.backends import cudnn

    with suppress(RuntimeError):
        if (number := cudnn.version()) and number >= 90000:
            return number // 10000, number // 100 % 100, number % 100
    return None


def no_cuda() -> str:
    """Why torch has no CUDA device here, in its own words: an old driver, say, or a build without CUDA; empty where it has one."""
    import torch

    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:
        return str(e).partition(". ")[0]
    return "none is visible"


def gpus() -> int:
    """GPUs of this machine that CUDA sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory(device: str, ranks: int | None = None) -> int:
    """Bytes that a run on `device` could take now, on this rank: free on the GPU, or on the machine within its limits. On each of
    so many `ranks` that are to be started here it is all of a GPU, on which this process makes no context.
    """
    if device == "cuda":
        import torch

        return (
            torch.cuda.get_device_properties(0).total_memory
            if ranks
            else int(torch.cuda.mem_get_info()[0])
        )
    share = ranks or int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min([_available(), *_cgroup()]) // share


def _available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cgroup() -> list[int]:
    """What is left of a container's limit (cgroup v2, then v1); empty where there is none."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            root = Path("/sys/fs/cgroup")
            return [max(0, int((root / limit).read_text()) - int((root / used).read_text()))]
        except (OSError, ValueError):  # no such controller, or "max"
            continue
    return []
