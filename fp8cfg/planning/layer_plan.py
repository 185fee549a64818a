"""Layer plan: shape of a recipe's Transformer and formats of its GEMMs. Loads no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from fp8cfg.backends import registry
from fp8cfg.backends.gemm_plan import (
    ATTENTION_GEMMS,
    PlannedAttention,
    PlannedLinear,
    layer_numbering,
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

_SHARED_KEYS = tuple(
    field.name
    for field in dataclasses.fields(TransformerConfig)
    if field.name in Model.model_fields and field.name != "rope_scaling"
)
"""Keys of the `model` node with the same name in TransformerConfig."""


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """Converts the `model` node to a TransformerConfig for `fp8cfg.models`."""
    model, rope = recipe.model, recipe.model.rope_scaling
    scaling = None
    # A factor of 1 is plain RoPE, whatever the other keys are.
    if rope.factor != 1.0:
        scaling = RopeScaling(
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_max_position,
            rope.rope_type,
        )
    return TransformerConfig(
        **{key: getattr(model, key) for key in _SHARED_KEYS},
        head_dim=model.head_dim,
        rope_scaling=scaling,
        tie_embeddings=model.share_embeddings_and_output_weights,
        init_std=model.init_method_std,
    )


def plan_layers(recipe: Recipe, backend: str | None = None) -> list[PlannedLinear]:
    """Plans the GEMMs of each linear layer, in the order of the forward pass.

    Args:
        recipe: The recipe.
        backend: Name of the backend. Defaults to the recipe's backend, or to native under auto.

    Returns:
        The operand formats of fprop, dgrad and wgrad for each layer, with the reason for high
        precision. With LoRA the GEMMs of frozen weights are left out.

    Raises:
        ConfigError: A pattern of fp8.include, fp8.exclude or lora.targets matches nothing.
    """
    name, norms = backend_and_norms(recipe, backend)
    misfit = registry.rules(name).misfit
    shapes = linear_layers(transformer_config(recipe))
    numbering = layer_numbering(recipe.model.num_layers)
    linears = plan_linears(shapes, recipe.fp8, numbering, misfit, norms=norms)
    if not recipe.lora.enabled:
        return linears
    with_adapters = {projection.module for projection in adapted_projections(recipe)}
    return _without_frozen_gemms(linears, with_adapters)


def backend_and_norms(recipe: Recipe, backend: str | None = None) -> tuple[str, Collection[str]]:
    """Returns the backend of a plan, and the norms allowed in patterns of fp8.exclude.

    Args:
        recipe: The recipe.
        backend: Name of the backend. Defaults to the recipe's backend, or to native under auto.
    """
    name = backend
    if name is None:
        name = recipe.backend if registry.exists(recipe.backend) else registry.REFERENCE
    candidates: Collection[str] = [name]
    if backend is None and recipe.backend == "auto":
        candidates = registry.preference()
    if not recipe.fp8.exclude:
        return name, ()
    # Only some backends replace norms. Under auto each of them may still be chosen.
    if not any(registry.capabilities(candidate).norms for candidate in candidates):
        return name, ()
    return name, norm_names(transformer_config(recipe))


def attention_plan(recipe: Recipe) -> list[PlannedAttention]:
    """Plans the GEMMs of each layer's attention.

    With LoRA, layers before the first adapter have no backward pass.
    """
    attentions = plan_attention(recipe.fp8, recipe.model.num_layers)
    if not recipe.lora.enabled:
        return attentions
    first_adapter = adapted_projections(recipe)[0].module  # in the order of the forward pass
    first_layer = len(attentions)
    if first_adapter.startswith("layers."):
        first_layer = int(first_adapter.split(".")[1])
    # An adapter of linear_qkv precedes attention. All other adapters of a layer follow it, so
    # that attention of that layer needs no backward pass.
    first_with_backward = first_layer + (not first_adapter.endswith("linear_qkv"))
    planned = []
    for number, attention in enumerate(attentions):
        if number < first_with_backward:
            gemms = (*attention.gemms[:2], None, None, None, None)
            attention = replace(attention, gemms=gemms, left_out=ATTENTION_GEMMS[2:])
        planned.append(attention)
    return planned


def attention_flops(recipe: Recipe) -> float:
    """Returns the FLOPs per token of all attention layers, forward and backward.

    Only the causal half of the scores counts. A multiply-add has 2 FLOPs.
    """
    model = recipe.model
    config = transformer_config(recipe)
    # `reach` already has the factor 2 of a multiply-add.
    reach = 0.0
    for layer, attention in enumerate(attention_plan(recipe)):
        reach += attention.count * _attention_reach(model.seq_length, config.window(layer))
    return float(reach * model.num_attention_heads * model.head_dim)


def _attention_reach(tokens: int, window: int | None) -> float:
    """Twice the average number of keys per query under a causal mask, in leading order."""
    # Full attention: a query sees half of the tokens on average. With a window of w tokens a
    # query sees w of them, except for the first w queries with half of that.
    if window is None or window >= tokens:
        return tokens
    return 2 * window - window * window / tokens


def adapted_projections(recipe: Recipe) -> Sequence[Projection]:
    """Returns the projections with LoRA adapters. Empty without lora.enabled.

    Raises:
        ConfigError: A pattern of lora.targets matches no projection.
    """
    if not recipe.lora.enabled:
        return []
    config = transformer_config(recipe)
    candidates = projections(config)
    names = sorted(
        {name.rpartition(".")[2] for candidate in candidates for name in candidate.names}
    )
    problems = []
    for pattern in recipe.lora.targets:
        if any(matches(projection, pattern) for projection in candidates):
            continue
        hint = suggest(pattern, names) or f"; there are {', '.join(names)}"
        problems.append(Violation(f"lora.targets={pattern}", f"matches no linear layer{hint}"))
    refuse_if(problems)
    return targeted(config, recipe.lora.targets)


def _without_frozen_gemms(
    linears: Iterable[PlannedLinear], with_adapters: Collection[str]
) -> list[PlannedLinear]:
    """Removes GEMMs without a use from the plan of a model with frozen weights.

    Frozen weights need no wgrad. Layers up to the first adapter need no dgrad.

    Args:
        linears: The linear layers, in the order of the forward pass.
        with_adapters: Names of the layers with adapters.
    """
    planned = []
    # The first layer with an adapter needs no dgrad either: autograd wants gradients of the
    # adapter's weights only, not of the layer's input.
    has_input_gradient = False
    for linear in linears:
        fprop, dgrad, _ = linear.gemms
        if has_input_gradient:
            linear = replace(linear, gemms=(fprop, dgrad, None), left_out=("wgrad",))
        else:
            linear = replace(linear, gemms=(fprop, None, None), left_out=("dgrad", "wgrad"))
        planned.append(linear)
        has_input_gradient = has_input_gradient or linear.name in with_adapters
    return planned
