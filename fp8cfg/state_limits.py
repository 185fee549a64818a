"""Limits of MS-AMP's levels, of gradients sent in FP8 and of ZeRO's owners of tensors: they go with data parallelism alone.

Beside tensor, pipeline and context parallelism torch's FSDP2 shards state, or each rank keeps all of its own (storage.shard=none).
The lines are remarks where a recipe is planned or exported, and refuse one that is to run here, as those of tensor_limits.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from fp8cfg.config.backend_capabilities import capabilities, ordered
from fp8cfg.config.fsdp_sharding import ZERO, by_fsdp2
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import LayoutRefusal
from fp8cfg.config.storage import SCALED, level, resolved, sharding
from fp8cfg.tensor_limits import of_state


def limits(recipe: Recipe, ranks: int) -> list[str]:
    """A line for each reason why state of `recipe` does not go with its parallel layout on `ranks` ranks."""
    s = recipe.trainer.strategy
    sizes = {
        name: size
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
        if (size := getattr(s, name)) > 1
    }
    if not sizes:
        return []
    alone = (
        "with data parallelism alone, not with"
        f" {', '.join(f'{name}={size}' for name, size in sizes.items())}"
    )
    if level(recipe.precision):
        return [_level(recipe, alone, [s.key(name) for name in sizes])]
    owned = (
        []
        if [*of_state(recipe)]
        else _owned(recipe, max(1, ranks // s.size) * s.context_parallel_size, alone)
    )
    return [*_sent(recipe, alone), *owned]


def _level(recipe: Recipe, alone: str, keys: list[str]) -> str:
    p = recipe.precision
    if capabilities(p.backend).level:
        plain = "backend=native opt_level=null" if p.opt_level else "backend=native"
        return LayoutRefusal(
            f"backend={p.backend}: its level {level(p)} goes {alone}; write {plain}",
            {"backend": "native"},
        )
    # The search for what fits gives levels up by itself, at their cost, and writes what a stage more needs.
    other = f", or {keys[0]}=1" if len(keys) == 1 and recipe.trainer.strategy.chunks == 1 else ""
    return f"opt_level={p.opt_level}: goes {alone}; write opt_level=null{other}"


def _sent(recipe: Recipe, alone: str) -> Iterator[str]:
    p, storage = recipe.precision, recipe.storage
    if resolved(p)["comm"] not in SCALED:
        return
    write = {
        "storage.comm": "auto",
        **({} if storage.accumulate == "wide" else {"storage.accumulate": "wide"}),
    }
    words = " ".join(f"{key}={value}" for key, value in write.items())
    yield LayoutRefusal(
        f"storage.comm={storage.comm}: gradients sent in FP8 go {alone}; write {words}", write
    )


def _owned(recipe: Recipe, alike: int, alone: str) -> Iterator[str]:
    """Of whole tensors that have owners among the `alike` ranks with the same parameters, where FSDP2 does not shard them, whatever
    gradients are sent in."""
    p, backend = recipe.precision.model_copy(deep=True), recipe.precision.backend
    p.storage.comm = "auto"
    recipe = recipe.model_copy(update={"precision": p})
    shard, backends = sharding(p, alike), ordered() if backend == "auto" else [backend]
    if alike > 1 and shard in ZERO and not any(by_fsdp2(recipe, alike, name) for name in backends):
        said = f"storage.shard={p.storage.shard}" + (
            "" if p.storage.shard == shard else f", which is {shard}"
        )
        yield LayoutRefusal(
            f"{said}: tensors of this state have owners, which go {alone}; write"
            " storage.shard=none",
            {"storage.shard": "none"},
        )
