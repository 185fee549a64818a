"""FP8 speedups over BF16 that others have published for such sizes, and the layers too small to gain. Nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.config.recipe import Recipe
from fp8cfg.report.memory.layout import Part
from fp8cfg.scalings import SCALINGS

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


def published(recipe: Recipe, capability: tuple[int, int] | None) -> list[Published]:
    """The gains under the recipe's scaling: of the GPU's generation where it is known and there are some, else all."""
    found = [p for p in PUBLISHED if p.scaling == recipe.fp8.scaling] if recipe.fp8.enabled else []
    same = [p for p in found if capability is None or p.blackwell == (capability >= (10, 0))]
    return same or found


def sizes(recipe: Recipe, part: Part) -> str:
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


def too_small(
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
