"""Layer plan: the Transformer that a recipe describes, and what each of its linear layers is to do. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    PlannedAttention,
    PlannedLinear,
    layers,
    plan_attention,
    plan_linears,
)
from fp8cfg.models.config import (
    Projection,
    RopeScaling,
    TransformerConfig,
    linear_layers,
    matches,
    norm_names,
    projections,
    targeted,
)
from fp8cfg.schema.errors import refuse_if, suggest
from fp8cfg.schema.model import Model
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.violation import Violation

_SAME = tuple(
    f.name
    for f in dataclasses.fields(TransformerConfig)
    if f.name in Model.model_fields and f.name != "rope_scaling"
)
"""Keys of the model node that the model room calls the same."""


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """The model's shape as the model room takes it."""
    m, r = recipe.model, recipe.model.rope_scaling
    scaling = RopeScaling(
        r.factor, r.low_freq_factor, r.high_freq_factor, r.original_max_position, r.rope_type
    )
    return TransformerConfig(
        **{name: getattr(m, name) for name in _SAME},
        head_dim=m.head_dim,
        rope_scaling=scaling if r.factor != 1.0 else None,
        tie_embeddings=m.share_embeddings_and_output_weights,
        init_std=m.init_method_std,
    )


def plan_layers(recipe: Recipe, backend: str | None = None) -> list[PlannedLinear]:
    """What each linear layer of `recipe` is meant to do under `backend`, by default the one it names, or native. Raises
    ConfigError where a layer pattern matches nothing; norms are left out by those backends that have some, which auto may take.
    """
    name, norms = planned_with(recipe, backend)
    misfit = registry.rules(name).misfit
    shapes = linear_layers(transformer_config(recipe))
    found = plan_linears(shapes, recipe.fp8, layers(recipe.model.num_layers), misfit, norms=norms)
    return (
        _frozen(found, {p.module for p in adapted_projections(recipe)})
        if recipe.lora.enabled
        else found
    )


def planned_with(recipe: Recipe, backend: str | None = None) -> tuple[str, Collection[str]]:
    """The backend of a plan, and the norms that patterns of fp8.exclude may name."""
    name = backend or (recipe.backend if registry.exists(recipe.backend) else registry.REFERENCE)
    any_of = [name] if backend or recipe.backend != "auto" else registry.preference()
    has_norms = recipe.fp8.exclude and any(registry.capabilities(each).norms for each in any_of)
    return name, norm_names(transformer_config(recipe)) if has_norms else ()


def attention_plan(recipe: Recipe) -> list[PlannedAttention]:
    """What the attention of each layer of `recipe` is to do: before the first adapter nothing of its backward pass."""
    found = plan_attention(recipe.fp8, recipe.model.num_layers)
    if not recipe.lora.enabled:
        return found
    before = next(
        iter(adapted_projections(recipe))
    ).module  # they are in the order of the forward pass
    number = int(before.split(".")[1]) if before.startswith("layers.") else len(found)
    first = number if before.endswith("linear_qkv") else number + 1
    return [
        (
            replace(p, gemms=(*p.gemms[:2], *[None] * 4), left_out=ATTENTION_GEMMS[2:])
            if n < first
            else p
        )
        for n, p in enumerate(found)
    ]


def adapted_projections(recipe: Recipe) -> Sequence[Projection]:
    """The projections of `recipe` that have adapters; none without lora.enabled. Raises ConfigError for a pattern of lora.targets
    that matches none."""
    if not recipe.lora.enabled:
        return []
    config = transformer_config(recipe)
    every = projections(config)
    if wrong := [
        pattern for pattern in recipe.lora.targets if not any(matches(p, pattern) for p in every)
    ]:
        names = sorted({name.rpartition(".")[2] for p in every for name in p.names})
        there = f"; there are {', '.join(names)}"
        refuse_if(
            [
                Violation(
                    f"lora.targets={pattern}",
                    f"matches no linear layer{suggest(pattern, names) or there}",
                )
                for pattern in wrong
            ]
        )
    return targeted(config, recipe.lora.targets)


def _frozen(plans: Iterable[PlannedLinear], adapters: Collection[str]) -> list[PlannedLinear]:
    """`plans`, in the order of the forward pass, where weights are frozen; `adapters` names the layers with one. No weight has a
    gradient, and before the first adapter no input has one."""
    made, reached = [], False
    for p in plans:
        left_out = ("wgrad",) if reached else ("dgrad", "wgrad")
        made.append(
            replace(p, gemms=(p.gemms[0], p.gemms[1] if reached else None, None), left_out=left_out)
        )
        reached = reached or p.name in adapters
    return made
