"""Pre-training sizes: one line of a family's table, with NeMo's defaults for training around it. All of it is BF16."""

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
"""Layers, hidden size, FFN size, attention heads, query groups, standard deviation of the first weights."""
SHORT = {"batch": (32, 2), "optim": Optim(min_lr=3e-5, warmup_steps=500), "every": 500}
"""NeMo's defaults of the families whose recipes have flat arguments (Qwen, Gemma 2, Nemotron), with 300000 steps or more."""


def _pretrain(
    name: str,
    generation: Model,
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
    """A size with NeMo's pre-training defaults: 512 sequences a step, AdamW with cosine decay, BF16. `batch` is global and micro
    batch, `more` other keys of the model; `every` so many steps come evaluation and checkpoint. `recompute` is selective where the
    model fits no H100 of 80 GB on its nodes without, in BF16 or with FP8."""
    layers, hidden, ffn, heads, groups, std = shape
    model = generation.model_copy(
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
    if kv_channels or more:
        model = model.model_copy(
            update={**({"kv_channels": kv_channels} if kv_channels else {}), **(more or {})}
        )
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


def size(name: str, generation: Model, shape: Shape, about: str, **others: Any) -> RecipeFunction:
    """The recipe `name`: a function that returns a size of `generation`, whose first line of documentation is `about`. `shape` is
    layers, hidden size, FFN size, attention heads, query groups and standard deviation of the first weights; `others` has what
    `_pretrain` takes beside these: nodes and parallel sizes, 1 where nothing is said, width of a head, batch.
    """

    def make() -> Recipe:
        return _pretrain(name, generation, shape, **others)

    return _named(make, name, about, sys._getframe(1).f_globals["__name__"])


def tiny(name: str, generation: Model, about: str, **shape: Any) -> RecipeFunction:
    """The recipe `name`: a model of `generation` with llama_tiny's shape, but for `shape`, on bytes of the standard library. It
    trains visibly on two CPU cores in a minute."""

    def make() -> Recipe:
        small = {
            key: getattr(Model(), key)
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
            model=generation.model_copy(deep=True, update=small | shape),
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

    return _named(make, name, about, sys._getframe(1).f_globals["__name__"])


def _named(make: Callable[[], Recipe], name: str, about: str, module: str) -> RecipeFunction:
    """`make` as the recipe function `name` of the family's module."""
    make.__name__ = make.__qualname__ = name
    make.__doc__, make.__module__ = about, module
    make.__code__ = make.__code__.replace(
        co_name=name, co_qualname=name
    )  # fp8cfg explain names the frame
    return recipe(make)
