"""Published FP8 speedups, and the layers of a recipe that are too small for one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.planning.layout import COLUMN_PARALLEL, Part
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS

TE = "nvidia.github.io/TransformerEngine, GEMM Speedups Across Precisions"
TORCHAO = "github.com/pytorch/ao, torchao/float8/README.md"
FILTER = "torchao's _auto_filter_for_recipe (float8_linear_utils.py), made on H100"
# Sizes in Transformer Engine's measurements: a 5B model with 31 sequences of 512 tokens
# (nvidia.github.io/TransformerEngine/features/low_precision_training/speedups.html).
PUBLISHED_HIDDEN = 4096
PUBLISHED_MLP = 16384
PUBLISHED_TOKENS = 15872
# The index of a Transformer layer in a module name.
_INDEX = re.compile(r"^layers\.\d+\.")


@dataclass(frozen=True)
class Published:
    """A published speedup over BF16.

    Attributes:
        scaling: Value of fp8.scaling.
        times: The speedup.
        what: The measured part, such as GEMMs or whole steps.
        where: The GPUs.
        source: Where it was published.
    """

    scaling: str
    times: float
    what: str
    where: str
    source: str

    @property
    def blackwell(self) -> bool:
        """Whether the measurement ran on Blackwell. All others ran on Hopper."""
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
    """Returns the published speedups of the recipe's scaling.

    Args:
        recipe: The recipe.
        capability: Compute capability of the GPU. Speedups of its generation are preferred.
    """
    if not recipe.fp8.enabled:
        return []
    gains = [gain for gain in PUBLISHED if gain.scaling == recipe.fp8.scaling]
    if capability is None:
        return gains
    # Ada has no published speedups in the table. It gets Hopper's.
    is_blackwell = capability >= (10, 0)
    same_generation = [gain for gain in gains if gain.blackwell == is_blackwell]
    return same_generation or gains


def compare_sizes(recipe: Recipe, part: Part) -> str:
    """Returns a line to compare the recipe's GEMM sizes with the published measurements."""
    hidden, mlp = recipe.model.hidden_size, recipe.model.ffn_hidden_size
    tokens = recipe.trainer.micro_batch_size * recipe.model.seq_length // part.context
    sizes = f"hidden {hidden}, MLP {mlp}, {tokens} tokens"
    if part.tensor > 1:
        sizes += f", each matrix over {part.tensor} GPUs"
    published_sizes = (
        f"than hidden {PUBLISHED_HIDDEN}, MLP {PUBLISHED_MLP}, {PUBLISHED_TOKENS} tokens of those"
        " GEMMs"
    )
    has_small_weights = hidden * mlp < PUBLISHED_HIDDEN * PUBLISHED_MLP or part.tensor > 1
    # Half of the published tokens still fill the GPU.
    is_smaller = has_small_weights or tokens * 2 < PUBLISHED_TOKENS
    if is_smaller:
        return f"{sizes}: smaller {published_sizes}, expect less"
    return f"{sizes}: no smaller {published_sizes}"


def too_small_layers(
    recipe: Recipe, linears: Sequence[PlannedLinear], part: Part
) -> dict[str, tuple[int, int]]:
    """Returns the FP8 layers too small for a speedup, by the rules of torchao's filter.

    Quantization then takes more time than the FP8 GEMM saves.

    Args:
        recipe: The recipe.
        linears: The planned linear layers, with the sizes of the whole layer.
        part: Layers and shards of a rank.

    Returns:
        The in and out features on one rank, by layer name.
    """
    # FILTER: torchao has a filter for tensorwise scaling and another one for rowwise scaling. We use
    # the first one for delayed and current scaling, and the second one for all finer scales.
    is_per_tensor = not SCALINGS[recipe.fp8.scaling].block
    small_layers = {}
    for linear in linears:
        inputs, outputs = linear.in_features, linear.out_features
        # Column-parallel layers split output features, row-parallel layers input features.
        if linear.name.endswith(COLUMN_PARALLEL):
            outputs //= part.tensor
        else:
            inputs //= part.tensor
        if is_per_tensor:
            is_small = inputs <= 4096 and outputs <= 1024
        else:
            is_small = outputs <= 2048 or inputs <= 1024 or (outputs <= 4096 and inputs <= 2048)
        if linear.fp8 and is_small:
            small_layers[_INDEX.sub("layers.*.", linear.name)] = (inputs, outputs)
    return small_layers
