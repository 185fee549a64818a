"""Builders of pre-training recipes: a model shape with NeMo's training defaults, in BF16."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from fp8cfg.schema.data import Data
from fp8cfg.schema.model import Model
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import RecipeFunction, recipe
from fp8cfg.schema.training import Checkpoint, Log, Optim, Strategy, Trainer

Shape = tuple[int, int, int, int, int, float]
"""Layers, hidden size, FFN size, attention heads, query groups, and std of initial weights."""
SHORT = {"batch": (32, 2), "optim": Optim(min_lr=3e-5, warmup_steps=500), "every": 500}
"""NeMo's defaults for Qwen, Gemma 2 and Nemotron, whose recipes have flat arguments in NeMo."""


def size(
    name: str, base_model: Model, shape: Shape, description: str, **settings: Any
) -> RecipeFunction:
    """Makes and registers the recipe function of one size of a family.

    Args:
        name: Name of the recipe.
        base_model: Model node of the family. The shape replaces its sizes.
        shape: Layers, hidden size, FFN size, attention heads, query groups, and standard deviation
            of initial weights.
        description: Docstring of the recipe.
        **settings: Other arguments of `_pretraining_recipe`.
    """

    def make() -> Recipe:
        return _pretraining_recipe(name, base_model, shape, **settings)

    return _register(make, name, description, sys._getframe(1).f_globals["__name__"])


def tiny(name: str, base_model: Model, description: str, **model_keys: Any) -> RecipeFunction:
    """Makes and registers a tiny model of a family. It learns visibly in a minute on two CPU cores.

    It has the shape of llama_tiny and trains on bytes of the standard library.

    Args:
        name: Name of the recipe.
        base_model: Model node of the family.
        description: Docstring of the recipe.
        **model_keys: Other keys of the model.
    """

    def make() -> Recipe:
        default = Model()
        keys = {
            key: getattr(default, key)
            for key in (
                "vocab_size",
                "seq_length",
                "num_layers",
                "hidden_size",
                "ffn_hidden_size",
                "num_attention_heads",
                "num_query_groups",
            )
        }
        return Recipe(
            name=name,
            model=base_model.model_copy(deep=True, update=keys | model_keys),
            data=Data(name="stdlib"),
            optim=Optim(lr=3e-3, warmup_steps=20),
            trainer=Trainer(
                plugins=precision_preset("bf16"),
                max_steps=100,
                val_check_interval=50,
                limit_val_batches=4,
            ),
            checkpoint=Checkpoint(every_n_steps=50),
            log=Log(every_n_steps=10),
        )

    return _register(make, name, description, sys._getframe(1).f_globals["__name__"])


def _pretraining_recipe(
    name: str,
    base_model: Model,
    shape: Shape,
    kv_channels: int | None = None,
    more: Mapping[str, Any] | None = None,
    batch: tuple[int, int] = (512, 1),
    optim: Optim | None = None,
    every: int = 2000,
    max_steps: int = 1168251,
    nodes: int = 1,
    tp: int = 1,
    pp: int = 1,
    vp: int | None = None,
    cp: int = 1,
    sp: bool = False,
    recompute: str = "none",
) -> Recipe:
    """Returns a recipe with NeMo's pre-training defaults: AdamW with cosine decay, BF16.

    Args:
        name: Name of the recipe.
        base_model: Model node of the family.
        shape: See `size`.
        kv_channels: Channels of a head. Default hidden size / attention heads.
        more: Other keys of the model.
        batch: Global batch size and microbatch size.
        optim: Optimizer settings. Default NeMo's.
        every: Steps between evaluations, and between checkpoints.
        max_steps: Number of steps.
        nodes: Nodes of 8 GPUs.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        vp: Virtual pipeline parallel size.
        cp: Context parallel size.
        sp: Whether to use sequence parallelism.
        recompute: Recomputation granularity. "selective" for models that otherwise exceed the 80 GB
            of an H100 on these nodes, in BF16 or FP8.
    """
    layers, hidden, ffn, heads, groups, std = shape
    model = base_model.model_copy(
        deep=True,
        update={
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "init_method_std": std,
            "recompute_granularity": recompute,
        },
    )
    updates: dict[str, Any] = {}
    if kv_channels:
        updates["kv_channels"] = kv_channels
    if more:
        updates.update(more)
    if updates:
        model = model.model_copy(update=updates)
    strategy = Strategy(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vp,
        context_parallel_size=cp,
        sequence_parallel=sp,
    )
    return Recipe(
        name=name,
        model=model,
        optim=optim or Optim(),
        trainer=Trainer(
            plugins=precision_preset("bf16"),
            strategy=strategy,
            num_nodes=nodes,
            devices=8,
            max_steps=max_steps,
            global_batch_size=batch[0],
            micro_batch_size=batch[1],
            val_check_interval=every,
        ),
        checkpoint=Checkpoint(every_n_steps=every),
    )


def _register(
    make: Callable[[], Recipe], name: str, description: str, module: str
) -> RecipeFunction:
    """Registers `make` as the recipe function `name` of a family's module."""
    make.__name__ = name
    make.__qualname__ = name
    make.__doc__ = description
    make.__module__ = module
    # `fp8cfg explain` reads the function's name from its frame.
    make.__code__ = make.__code__.replace(co_name=name, co_qualname=name)
    return recipe(make)
