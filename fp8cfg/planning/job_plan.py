"""Plan of a job: what follows from a recipe on given hardware and ranks.

    recipe -> Plan -> model, optimizer, reports, checkpoints

A plan is made once and passed on. It has the backend of the FP8 layers, the layers and shards of
each rank, the storage dtypes and the formats of all GEMMs. Planning loads torch only for a custom
model or for this machine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from fp8cfg.backends import registry
from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.backends.gemm_plan import PlannedAttention, PlannedLinear
from fp8cfg.composition.precedence import resolved_for_build
from fp8cfg.parallel import sharding
from fp8cfg.planning import layer_plan, smoke
from fp8cfg.planning.fit_search import check_memory
from fp8cfg.planning.hardware import find_hardware, free_memory
from fp8cfg.planning.layout import Part, rank_part
from fp8cfg.planning.preflight import check_layout, choose_backend
from fp8cfg.planning.violations import violations
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import StateDtypes

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, repr=False)
class Plan:
    """Everything that is derived from a checked recipe before the model exists."""

    recipe: Recipe
    """The planned recipe."""
    hardware: Hardware
    """Device, compute capability and library versions."""
    choice: Choice
    """The backend, how it multiplies (scaled_mm, emulate or none), and the reason."""
    layout: Part
    """Sizes of the parallel layout on each rank, before pipeline stages differ."""
    gemms: Sequence[PlannedLinear]
    """Operand formats of the three GEMMs of each linear layer."""
    attention: Sequence[PlannedAttention]
    """The GEMMs of each layer's attention. Empty for a custom model."""
    custom_model: nn.Module | None = None
    """The model to convert. None for the recipe's own Transformer."""

    @property
    def state(self) -> StateDtypes:
        """Storage dtypes of weights, gradients and optimizer state."""
        return self.layout.state

    @property
    def precision(self) -> Precision:
        """The recipe's precision, with storage.shard resolved for these ranks."""
        return self.state.precision

    def __repr__(self) -> str:
        # Fiddle prints the arguments of a failing builder. A list of all layers would fill pages.
        in_fp8 = sum(linear.fp8 for linear in self.gemms)
        layers = f"{in_fp8} of {len(self.gemms)} linear layers in FP8"
        return f"Plan({self.recipe.name}, backend={self.choice.backend}, {layers})"


def plan_on_this_machine(recipe: Recipe, model: nn.Module | None = None) -> Plan:
    """Plans a recipe for this machine and checks that it runs here.

    Args:
        recipe: A checked recipe. A smoke run is already cut to size.
        model: A custom model to convert. None plans the recipe's own Transformer.

    Raises:
        ConfigError: The hardware, the number of ranks or the free memory does not suffice.
    """
    hardware = find_hardware(recipe.trainer.accelerator)
    plan = make_plan(recipe, hardware, model)
    # The size of a custom model is not in the recipe, and the caller distributes it.
    if model is None:
        strategy = recipe.trainer.strategy
        if strategy.size > 1 or strategy.data_parallel_replicate_size > 1:
            check_layout(recipe, current_ranks())
        free = free_memory(hardware.device)
        check_memory(recipe, hardware.device, free, plan.choice.backend)
    if plan.precision.storage.shard == "fsdp":
        from fp8cfg.parallel.fsdp_refusals import refuse_uneven  # loads torch

        refuse_uneven(plan.gemms, plan.precision, plan.choice.backend, plan.layout.shards)
    return plan


def make_plan(
    recipe: Recipe,
    hardware: Hardware,
    model: nn.Module | None = None,
    choice: Choice | None = None,
    world: int | None = None,
) -> Plan:
    """Plans a recipe for given hardware.

    Args:
        recipe: A checked recipe.
        hardware: Device of the GEMMs.
        model: A custom model to convert. None plans the recipe's own Transformer.
        choice: The backend. Chosen here by default.
        world: Number of ranks. Defaults to the size of the process group, or to torchrun's
            WORLD_SIZE. A custom model is always planned for one rank.

    Raises:
        ConfigError: No backend runs the recipe on this hardware. Or a custom model is given and a
            key only works with the recipe's Transformer.
    """
    # Each rank keeps a whole custom model, without ZeRO shards. Your training loop may save the
    # tensors of each rank as if they were complete.
    if model is not None:
        world = 1
    elif world is None:
        world = current_ranks()
    layout = rank_part(recipe, world)
    if model is not None:
        choice = choice or choose_backend(recipe, hardware, layout, is_custom_model=True)
        gemms = _plan_custom_model(recipe, model, choice)
        return Plan(recipe, hardware, choice, layout, gemms, attention=(), custom_model=model)
    try:
        choice = choice or choose_backend(recipe, hardware, layout)
        gemms = layer_plan.plan_layers(recipe, choice.backend)
    except ConfigError:
        # Report all violations, not only those of the first failing check.
        refuse_if(violations(recipe, hardware, world))
        raise
    _check_tokens(recipe, choice)
    return Plan(recipe, hardware, choice, layout, gemms, layer_plan.attention_plan(recipe))


def _plan_custom_model(recipe: Recipe, model: nn.Module, choice: Choice) -> Sequence[PlannedLinear]:
    """Plans the linear layers of a custom model. Rejects keys of the recipe's Transformer."""
    from fp8cfg.backends.any_model.eligibility import plan_model  # loads torch

    if recipe.storage.shard == "fsdp":
        raise ConfigError(
            "storage.shard=fsdp: shards a recipe's Transformer, not a custom model; call"
            " fp8cfg.convert_model(model, recipe) with storage.shard=none, and then torch's"
            " fully_shard"
        )
    transformer_keys = changed(recipe.data, "reset_attention_mask", "reset_position_ids")
    refuse_if(
        [
            f"{key}: works for a recipe's Transformer, not for a custom model; set it to false"
            for key in transformer_keys
        ]
    )
    misfit = registry.rules(choice.backend).misfit
    norms = registry.capabilities(choice.backend).norms
    return plan_model(model, recipe.fp8, misfit, norms=norms)


def current_ranks() -> int:
    """Returns the size of the process group, or torchrun's WORLD_SIZE before initialization."""
    # A process group implies that torch is loaded. Otherwise this function must not load it.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    return sharding.ranks()


def _check_tokens(recipe: Recipe, choice: Choice) -> None:
    """Raises ConfigError if the tokens of a microbatch do not suit the backend's GEMMs."""
    # wgrad contracts over tokens. native pads them with zeros. Other backends need a multiple.
    if choice.product == "none":
        return
    multiple = registry.rules(choice.backend).tokens_multiple(recipe.fp8, choice.product)
    context = recipe.trainer.strategy.context_parallel_size
    length = recipe.model.seq_length
    micro = recipe.trainer.micro_batch_size
    tokens = micro * length // context
    if tokens % multiple == 0:
        return
    step = multiple * context
    split = f" over {context} context ranks" if context > 1 else ""
    raise ConfigError(
        f"trainer.micro_batch_size={micro}: gives {tokens} tokens with"
        f" model.seq_length={length}{split}, but backend={choice.backend} needs a multiple of"
        f" {multiple}; set backend=native, or model.seq_length={ceil(length / step) * step}"
    )


def checked_recipe(recipe: Recipe) -> Recipe:
    """Resolves conflicts between overrides and presets, and checks all rules.

    Raises:
        ConfigError: `recipe` is not a Recipe, or it breaks a rule.
    """
    if not isinstance(recipe, Recipe):
        raise ConfigError(
            f"expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b'])"
            " returns one"
        )
    recipe = resolved_for_build(recipe)
    recipe.check()
    return recipe


def cut_if_smoke(recipe: Recipe, model: nn.Module | None = None) -> Recipe:
    """Cuts the recipe to a smoke run if trainer.smoke is set.

    Raises:
        ConfigError: trainer.smoke is set with a custom model. Its size cannot be reduced.
    """
    if model is not None and recipe.trainer.smoke:
        raise ConfigError(
            "trainer.smoke=true: reduces a recipe's Transformer, not a custom model; set it to"
            " false, with a small trainer.global_batch_size and trainer.max_steps"
        )
    return smoke.cut_recipe(recipe, sharding.ranks())
