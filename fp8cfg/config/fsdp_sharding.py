"""FSDP2 sharding: which recipes have their state split over data-parallel ranks by torch's FSDP2, as float32 shards.

`storage.shard=fsdp` always; zero1, zero2, and none, which is one shard on each rank, where masters are float32, gradients are sent
in plain dtypes, and each trained weight can be gathered as a rank alone stores it. Moments and gradients may be of any codec,
encoded by shard. Masters of fewer bits, and beside parts of matrices or other backends' FP8 products weights in a codec that is
neither float32 nor what these read, are those of whole tensors: under none every rank has all, and gradients are summed after the
backward pass; else each tensor has one owner (training/distributed/zero.py). But under fsdp weights that are frozen beside adapters
are whole on each rank, as Megatron's distributed optimizer leaves them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.storage import (
    SCALED,
    against_gathered_params,
    float32_masters,
    fp8_weights,
    level,
    low_bit,
    others,
    resolved,
    sharding,
)

if TYPE_CHECKING:
    from fp8cfg.config.precision import Precision
    from fp8cfg.config.recipe import Recipe

ZERO = ("zero1", "zero2")


def by_fsdp2(recipe: Recipe, ranks: int, backend: str) -> bool:
    """Whether FSDP2 keeps the parameters of the recipe's Transformer over `ranks` that share them, where `backend` multiplies."""
    shard, groups = (
        sharding(recipe.precision, ranks),
        recipe.trainer.strategy.data_parallel_replicate_size,
    )
    if shard == "fsdp" or ranks == 1:
        return shard == "fsdp"
    if groups > 1 and _sent_wider(
        recipe.precision
    ):  # which groups would not be: they sum what is kept
        return False
    return _gathered_as_stored(recipe, backend)


def _gathered_as_stored(recipe: Recipe, backend: str) -> bool:
    p, tensor = recipe.precision, recipe.trainer.strategy.tensor_model_parallel_size
    if level(p) or not capabilities(backend).fully_shards:
        return False
    linear, rest = resolved(p), others(p)
    if low_bit(p) and not float32_masters(p):
        return False
    if {linear["comm"], rest["comm"]} & {*SCALED}:
        return False
    if recipe.lora.enabled:  # which are no weights of linear layers
        return True
    if fp8_weights(p):
        read = capabilities(backend).fp8_gather == "params" or not against_gathered_params(
            p.fp8, backend
        )
        return capabilities(backend).zero_fp8_weights and read
    in_codec = tensor == 1 and (not p.fp8.enabled or capabilities(backend).fp8_gather == "params")
    return in_codec or linear["weight"] == rest["weight"]


def gathered_plain(precision: Precision) -> str:
    """The codec in which FSDP2 gathers what it does not gather in FP8: precision.compute, or float32 where others have
    weights that the unsharded run casts in each pass."""
    return precision.compute if precision.storage.shard == "fsdp" else others(precision)["weight"]


def _sent_wider(p: Precision) -> bool:
    """Whether gradients are sent in another dtype than that of fewer bits than float32 in which they are added up."""
    return others(p)["weight_grad"] not in (others(p)["comm"], "fp32")
