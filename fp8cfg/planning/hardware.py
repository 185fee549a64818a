"""Local hardware: the device of this machine, and the memory that is free on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8cfg.backends.choice import Hardware
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.layout import Part
from fp8cfg.schema.errors import ConfigError, nearest
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS


@dataclass(frozen=True)
class GPU:
    """One GPU. `gib` is the memory that CUDA reports: total capacity in torch's out-of-memory messages, the least of those
    found; CUDA itself takes about half a GiB of it. `bf16` and `fp8` are dense peaks in TFLOP/s with float32 accumulation,
    `fp8` None where there are no such units."""

    name: str
    gib: float
    capability: tuple[int, int]
    bf16: float
    fp8: float | None
    source: str

    @property
    def memory(self) -> int:
        """Bytes."""
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
"""Datasheets give most peaks with sparsity; these are half of those."""


def find_gpu(name: str, option: str = "--gpu ") -> GPU:
    """The GPU called `name`, whatever its case. Raises ConfigError with the nearest name; `option` is what named it."""
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is None:
        begins = [known for known in GPUS if known.startswith(name.lower())]
        if begins:
            hint = f"; did you mean {' or '.join(begins)}?"
        elif near := nearest(name, GPUS, 0.8):
            hint = f"; did you mean {near!r}?"
        else:
            hint = f"; it has {', '.join(GPUS)}"
        raise ConfigError(f"{option}{name}: no such GPU in the table{hint}")
    return gpu


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


def count_gpus() -> int:
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


TE = "nvidia.github.io/TransformerEngine, GEMM Speedups Across Precisions"
TORCHAO = "github.com/pytorch/ao, torchao/float8/README.md"
FILTER = "torchao's _auto_filter_for_recipe (float8_linear_utils.py), made on H100"
HIDDEN, MLP, TOKENS = 4096, 16384, 15872
"""Sizes at which Transformer Engine's GEMMs were measured: a 5B model, 31 sequences of 512
(nvidia.github.io/TransformerEngine/features/low_precision_training/speedups.html)."""
_COLUMNS = (
    "linear_qkv",
    "linear_fc1",
    "output_layer",
)  # split by rows of the weight over tensor-parallel ranks


@dataclass(frozen=True)
class Published:
    """A published gain: `times` the speed of BF16, of `what`, on `where`, under one scaling."""

    scaling: str
    times: float
    what: str
    where: str
    source: str

    @property
    def blackwell(self) -> bool:
        """Whether it is of the generation after Hopper."""
        return self.where.startswith("B")


_GEMMS = "linear layers' GEMMs with quantization"
PUBLISHED = [
    Published("delayed", 1.69, _GEMMS, "H200 NVL", TE),
    Published("current", 1.58, _GEMMS, "H200 NVL", TE),
    Published("block", 1.40, _GEMMS, "H200 NVL", TE),
    Published("delayed", 1.64, _GEMMS, "B300", TE),
    Published("current", 1.39, _GEMMS, "B300", TE),
    Published("mxfp8", 1.42, _GEMMS, "B300", TE),
    Published("nvfp4", 1.98, _GEMMS, "B300", TE),
    Published("current", 1.25, "whole steps of Llama 3 8B, compiled", "8 H100", TORCHAO),
    Published(
        "current", 1.5, "whole steps of Llama 3.1 405B, compiled, at most", "512 H100", TORCHAO
    ),
]


def published_gains(recipe: Recipe, capability: tuple[int, int] | None) -> list[Published]:
    """The gains under the recipe's scaling: of the GPU's generation where it is known and there are some, else all."""
    found = [p for p in PUBLISHED if p.scaling == recipe.fp8.scaling] if recipe.fp8.enabled else []
    same = [p for p in found if capability is None or p.blackwell == (capability >= (10, 0))]
    return same or found


def compare_sizes(recipe: Recipe, part: Part) -> str:
    """How the recipe's GEMMs compare with those of the published figures."""
    m = recipe.model
    mine = (
        m.hidden_size,
        m.ffn_hidden_size,
        recipe.trainer.micro_batch_size * m.seq_length // part.context,
    )
    shown = f"hidden {mine[0]}, MLP {mine[1]}, {mine[2]} tokens"
    smaller = mine[0] * mine[1] < HIDDEN * MLP or mine[2] * 2 < TOKENS or part.tensor > 1
    split = f", each matrix over {part.tensor} GPUs" if part.tensor > 1 else ""
    than = f"than hidden {HIDDEN}, MLP {MLP}, {TOKENS} tokens of those GEMMs"
    return f"{shown}{split}: " + (
        f"smaller {than}, expect less" if smaller else f"no smaller {than}"
    )


def too_small_layers(
    recipe: Recipe, linears: Sequence[PlannedLinear], part: Part
) -> dict[str, tuple[int, int]]:
    """Layers in FP8 that torchao's filter leaves in BF16, since small products lose: name -> (in, out) on one rank.

    Its per-tensor thresholds are for delayed and current scaling, its row-wise ones for the others.
    """
    found = {}
    for p in linears:
        leaf, split = p.name.rpartition(".")[2], part.tensor
        k, n = (
            (p.in_features, p.out_features // split)
            if leaf in _COLUMNS
            else (p.in_features // split, p.out_features)
        )
        per_tensor = not SCALINGS[recipe.fp8.scaling].block
        small = (
            (k <= 4096 and n <= 1024)
            if per_tensor
            else (n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048))
        )
        if p.fp8 and small:
            found[
                f"layers.*.{p.name.split('.', 2)[2]}" if p.name.startswith("layers.") else p.name
            ] = (k, n)
    return found
