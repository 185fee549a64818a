"""Hardware: a table of GPUs for plans, and the devices and the memory of this machine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8cfg.backends.choice import Hardware
from fp8cfg.schema.errors import ConfigError, nearest


@dataclass(frozen=True)
class GPU:
    """A GPU in the table.

    Attributes:
        name: Name in `--gpu`.
        gib: Memory in GiB as reported by CUDA: the smallest total capacity found in torch's
            out-of-memory messages. CUDA itself takes about half a GiB of it.
        capability: CUDA compute capability.
        bf16: Dense BF16 peak in TFLOP/s with float32 accumulation.
        fp8: Dense FP8 peak in TFLOP/s. None without FP8 tensor cores.
        source: Source of the peaks.
    """

    name: str
    gib: float
    capability: tuple[int, int]
    bf16: float
    fp8: float | None
    source: str

    @property
    def memory(self) -> int:
        """Memory in bytes."""
        return int(self.gib * 2**30)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40", 39.3, (8, 0), 312, None, "NVIDIA A100 datasheet"),
        GPU("a100-80", 79.1, (8, 0), 312, None, "NVIDIA A100 datasheet"),
        GPU("h100", 79.1, (9, 0), 989, 1979, "NVIDIA H100 datasheet, SXM"),
        GPU("h100-pcie", 79.1, (9, 0), 756, 1513, "NVIDIA H100 datasheet, PCIe"),
        GPU("h200", 139.7, (9, 0), 989, 1979, "NVIDIA H200 datasheet, SXM"),
        GPU("b200", 178.3, (10, 0), 2250, 4500, "NVIDIA HGX B200 datasheet, an eighth of it"),
        GPU("l4", 22.0, (8, 9), 121, 242, "NVIDIA L4 datasheet"),
        GPU("l40s", 44.3, (8, 9), 362, 733, "NVIDIA L40S datasheet"),
        GPU("rtx4090", 23.5, (8, 9), 165, 330, "NVIDIA Ada architecture whitepaper"),
        GPU("rtx5090", 31.3, (12, 0), 209, 419, "NVIDIA RTX Blackwell architecture whitepaper"),
    )
}
"""Dense peaks. Most datasheets list peaks with sparsity, twice as high."""


CGROUP = Path("/sys/fs/cgroup")
"""Limits and usage of the container of this process."""


def find_gpu(name: str, option: str = "--gpu ") -> GPU:
    """Returns the GPU with a name, in upper or lower case.

    Args:
        name: The name, such as "h100".
        option: The option for the error message, such as "--gpu ".

    Raises:
        ConfigError: The table has no such GPU. The message has the nearest name.
    """
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is not None:
        return gpu
    longer_names = [known for known in GPUS if known.startswith(name.lower())]
    similar = nearest(name, GPUS, 0.8)
    if longer_names:
        hint = f"did you mean {' or '.join(longer_names)}?"
    elif similar:
        hint = f"did you mean {similar!r}?"
    else:
        hint = f"it has {', '.join(GPUS)}"
    raise ConfigError(f"{option}{name}: no such GPU in the table; {hint}")


def gpu_of_device(name: str) -> GPU | None:
    """Returns the GPU of the table for a name that the driver reports, or None.

    Args:
        name: The name, such as "NVIDIA H100 80GB HBM3" or "NVIDIA A100-SXM4-40GB".
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    # Other models, and parts of a GPU, have other peaks.
    if words & {"nvl", "mig", "laptop", "mobile", "super", "d"}:
        return None
    if "a100" in words:
        if "80gb" in words:
            return GPUS["a100-80"]
        return GPUS["a100-40"]
    if "h100" in words and "pcie" in words:
        return GPUS["h100-pcie"]
    if "rtx" in words:
        return next((gpu for gpu in GPUS.values() if gpu.name.removeprefix("rtx") in words), None)
    return next((gpu for gpu in GPUS.values() if gpu.name in words), None)


def find_hardware(accelerator: str) -> Hardware:
    """Returns the device of this machine.

    Args:
        accelerator: Value of trainer.accelerator: "auto", "cpu" or "cuda".

    Returns:
        The device, with compute capability and library versions on CUDA.

    Raises:
        ConfigError: `accelerator` is "cuda" and torch has no CUDA device.
    """
    import torch

    if accelerator == "cuda":
        problem = no_cuda()
        if problem:
            raise ConfigError(
                f"trainer.accelerator=cuda: torch has no CUDA device here ({problem}); set cpu"
                " or auto"
            )
    if accelerator == "cpu" or not torch.cuda.is_available():
        return Hardware("cpu")
    capability = torch.cuda.get_device_capability()
    version = [int(part) for part in (torch.version.cuda or "0.0").split(".")]
    return Hardware("cuda", capability, (version[0], version[1]), cudnn=_cudnn_version())


def _cudnn_version() -> tuple[int, int, int] | None:
    """The version of cuDNN, None before cuDNN 9. torch returns a number such as 91900."""
    from torch.backends import cudnn

    number = None
    # torch raises RuntimeError if the installed cuDNN is older than the one at build time.
    with suppress(RuntimeError):
        number = cudnn.version()
    if number is None or number < 90000:
        return None
    return number // 10000, number // 100 % 100, number % 100


def no_cuda() -> str:
    """Returns torch's reason for a missing CUDA device, such as an old driver, else ""."""
    import torch

    if torch.cuda.is_available():
        return ""
    # is_available() hides the reason. init() raises it: AssertionError for a build without CUDA.
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0]
    return "none is visible"


def count_gpus() -> int:
    """Returns the number of GPUs visible to CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory(device: str, ranks: int | None = None) -> int:
    """Returns the free memory in bytes for each rank on this machine.

    Args:
        device: "cpu" or "cuda".
        ranks: Number of ranks to start here. Defaults to the launched ranks.
    """
    if device == "cuda":
        import torch

        if ranks:
            # A launcher does not train. mem_get_info would create a CUDA context in its process,
            # and take memory from the first rank.
            return torch.cuda.get_device_properties(0).total_memory
        return int(torch.cuda.mem_get_info()[0])
    if ranks is None:
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    limits = [_available_memory(), *_left_of_cgroup_limit()]
    return min(limits) // ranks


def _available_memory() -> int:
    """Available host memory in bytes. Total memory on systems without /proc."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _left_of_cgroup_limit() -> list[int]:
    """Bytes left below the memory limit of a container (cgroup v2 or v1). Empty without one."""
    for folder, limit, usage, cache in (
        (CGROUP, "memory.max", "memory.current", "inactive_file"),
        (
            CGROUP / "memory",
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        ),
    ):
        try:
            free_bytes = int((folder / limit).read_text()) - int((folder / usage).read_text())
        except (OSError, ValueError):  # no such controller, or "max"
            continue
        # The usage includes the page cache. The kernel frees its inactive part on demand.
        with suppress(OSError, ValueError):  # some container runtimes have no memory.stat
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(f"{cache} "):
                    free_bytes += int(line.split()[1])
        return [max(0, free_bytes)]
    return []
