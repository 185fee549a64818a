"""Layer plan: the Transformer that a recipe describes, and what each of its linear layers is to do. No torch."""

from __future__ import annotations

import dataclasses

from fp8cfg.backends import backend_registry
from fp8cfg.backends.gemm_plan import PlannedLinear, layers, plan_linears
from fp8cfg.config.model import Model
from fp8cfg.config.recipe import Recipe
from fp8cfg.models.config import RopeScaling, TransformerConfig
from fp8cfg.models.shapes import linear_layers, norm_names

_SAME = tuple(f.name for f in dataclasses.fields(TransformerConfig) if f.name in Model.model_fields and f.name != "rope_scaling")
"""Keys of the model node that the model room calls the same."""


def transformer_config(recipe: Recipe) -> TransformerConfig:
    """The model's shape as the model room takes it."""
    m, r = recipe.model, recipe.model.rope_scaling
    scaling = RopeScaling(r.factor, r.low_freq_factor, r.high_freq_factor, r.original_max_position, r.rope_type)
    return TransformerConfig(
        **{name: getattr(m, name) for name in _SAME}, head_dim=m.head_dim, rope_scaling=scaling if r.factor != 1.0 else None,
        tie_embeddings=m.share_embeddings_and_output_weights, init_std=m.init_method_std)


def plan(recipe: Recipe, backend: str | None = None) -> list[PlannedLinear]:
    """What each linear layer of `recipe` is meant to do under `backend`, by default the one it names, or native. Raises
    ConfigError where a layer pattern matches nothing."""
    name = backend or (recipe.backend if backend_registry.exists(recipe.backend) else backend_registry.REFERENCE)
    config = transformer_config(recipe)
    norms = norm_names(config) if recipe.fp8.exclude and backend_registry.capabilities(name).norms else ()
    misfit = backend_registry.rules(name).misfit
    return plan_linears(linear_layers(config), recipe.fp8, layers(recipe.model.num_layers), misfit, norms=norms)
