"""job_plan."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice, Hardware, choose
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.composition.precedence import resolved_for_build
from fp8cfg.parallel.sharding import ranks
from fp8cfg.planning import smoke
from fp8cfg.planning.layer_plan import plan
from fp8cfg.planning.layout import shards
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import as_sharded

if TYPE_CHECKING:
    from torch import nn


def planned(
    recipe: Recipe, hardware: Hardware, model: nn.Module | None = None, choice: Choice | None = None
) -> tuple[Sequence[PlannedLinear], Choice]:
    """What each linear layer is to do on `hardware`, and who does it. Raises ConfigError for what cannot run there."""
    choice = choice or choose(
        _sharded(recipe, model),
        hardware,
        statistics=recipe.log.fp8_stats_every_n_steps,
        adapters=recipe.lora.enabled,
        strategy=recipe.trainer.strategy if model is None else None,
    )
    if model is None:
        plans = plan(recipe, choice.backend)
        _refuse_tokens(recipe, choice)
        return plans, choice
    from fp8cfg.backends.any_model.eligibility import plan_model

    if recipe.storage.shard == "fsdp":
        raise ConfigError(
            "storage.shard=fsdp: splits the Transformer of a recipe, not a model of your own; write"
            " fp8cfg.convert_model(model, recipe) with storage.shard=none, and call torch's"
            " fully_shard on it"
        )
    refuse_if(
        [
            f"{said}: of the Transformer of a recipe, not of a model of your own; write false"
            for said in changed(recipe.data, "reset_attention_mask", "reset_position_ids")
        ]
    )
    norms = registry.capabilities(choice.backend).norms
    return (
        plan_model(model, recipe.fp8, registry.rules(choice.backend).misfit, norms=norms),
        choice,
    )


def _sharded(recipe: Recipe, model: nn.Module | None) -> Precision:
    """The precision of `recipe` with storage.shard as it applies on the ranks of the process group: around a given model auto is
    none, since a loop of one's own may save what each rank has as if it were whole."""
    return as_sharded(recipe.precision, 1 if model is not None else shards(recipe, _ranks_here()))


def _ranks_here() -> int:
    """The ranks of the process group, or those that torchrun says."""
    dist: Any = sys.modules.get(
        "torch.distributed"
    )  # whoever has made a group has loaded it; `lower` loads no torch
    return (
        dist.get_world_size() if dist and dist.is_available() and dist.is_initialized() else ranks()
    )


def _refuse_tokens(recipe: Recipe, choice: Choice) -> None:
    """Raise ConfigError where the backend cannot multiply the tokens of a microbatch."""
    t, multiple = recipe.trainer, 1
    if choice.product != "none":
        multiple = registry.rules(choice.backend).tokens_multiple(recipe.fp8, choice.product)
    context = t.strategy.context_parallel_size
    if (tokens := t.micro_batch_size * recipe.model.seq_length // context) % multiple:
        length, near = (
            recipe.model.seq_length,
            -(-recipe.model.seq_length // (multiple * context)) * multiple * context,
        )
        split = f" over {context} context ranks" if context > 1 else ""
        raise ConfigError(
            f"trainer.micro_batch_size={t.micro_batch_size}: with model.seq_length={length}{split}"
            f" that is {tokens} tokens, backend={choice.backend} needs a multiple of {multiple};"
            f" write backend=native, or model.seq_length={near}"
        )


def checked(recipe: Recipe) -> Recipe:
    """`recipe`, if it is one and breaks no rule, with what its preset says given way; else ConfigError."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b'])"
            " gives one"
        )
    recipe = resolved_for_build(recipe)
    recipe.check()
    return recipe


def sized(recipe: Recipe, model: nn.Module | None = None) -> Recipe:
    """`recipe`, cut where trainer.smoke asks for it. Raises ConfigError where a `model` is given, which cannot be cut."""
    if model is not None and recipe.trainer.smoke:
        raise ConfigError(
            "trainer.smoke=true: cuts the Transformer of a recipe, not a model of your own; write"
            " false, and a small trainer.global_batch_size and trainer.max_steps"
        )
    return smoke.cut(recipe, ranks())
