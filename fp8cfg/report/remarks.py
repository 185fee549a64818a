"""Remarks: settings that are allowed and may be unintended, or that have no effect in this run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fp8cfg.config.backend_capabilities import capabilities
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.refusal import changed
from fp8cfg.config.rules_storage import late_updates, lost_averages, slow_averages
from fp8cfg.config.storage import level, resolved, sharding
from fp8cfg.config.training_nodes import Log
from fp8cfg.report.idle_patterns import idle_patterns


def lines(recipe: Recipe, ranks: int) -> list[str]:
    """A line for each, where so many ranks have the same parameters."""
    every = (
        *_storage(recipe, ranks),
        *_one_microbatch(recipe, ranks),
        *_one_rank(recipe, ranks),
        *_folders(recipe),
        *(idle_patterns(recipe) if recipe.fp8.enabled else ()),
    )
    return [f"note: {line}" for line in every]


def _storage(recipe: Recipe, ranks: int) -> Iterator[str]:
    p, o = recipe.precision, recipe.optim
    if o.name != "sgd":
        yield from slow_averages(resolved(p), o.betas)
        yield from lost_averages(resolved(p))
        if o.lr_decay_style != "constant":
            yield from late_updates(
                resolved(p), p.storage.rounding, o.lr, o.end_lr, recipe.model.init_method_std
            )
    if level(p) == "O3" and sharding(p, ranks) == "none":
        yield (
            "opt_level=O3: on one rank it takes more than O2's 6 B/param; storage.shard=zero1 or"
            " zero2 splits its state"
        )
    if recipe.lora.enabled:
        yield "lora.enabled=true: masters, gradients and moments are of adapters alone"
    if p.storage.shard not in ("auto", "none") and ranks == 1:
        yield (
            f"storage.shard={p.storage.shard}: splits state over data-parallel ranks; on one there"
            " is nothing to split"
        )


def _one_microbatch(recipe: Recipe, ranks: int) -> Iterator[str]:
    """What concerns several microbatches of a step."""
    p, t = recipe.precision, recipe.trainer
    data = ranks * t.strategy.data_parallel_replicate_size // t.strategy.context_parallel_size
    if t.global_batch_size > t.micro_batch_size * data:
        return
    if p.fp8.keep_transpose_cache:
        yield (
            "fp8.keep_transpose_cache=true: keeps nothing, the one microbatch of a step reads each"
            " transpose once"
        )
    if (
        p.storage.accumulate == "stored" and not capabilities(p.backend).own_state
    ):  # which has nothing else
        yield "storage.accumulate=stored: adds up nothing, a step has one microbatch"


def _one_rank(recipe: Recipe, ranks: int) -> Iterator[str]:
    """What ranks send one another, and how long they wait; not of gradients that are sent as they are stored."""
    p, s = recipe.precision, recipe.trainer.strategy
    same = (
        ranks * s.data_parallel_replicate_size
    )  # with the same parameters: data-parallel and context ranks
    sent = (
        changed(p.storage, "comm")
        if same == 1 and resolved(p)["comm"] != resolved(p)["weight_grad"]
        else []
    )
    if not capabilities(p.backend).own_state:
        sent += changed(p.fp8, "reduce_amax") if same * s.tensor_model_parallel_size == 1 else []
        sent += changed(p.fp8, "tp_only_amax_red") if same == s.context_parallel_size else []
    if same * s.size == 1:
        if found := [*sent, *changed(recipe.trainer.timeout)]:
            yield f"{', '.join(found)}: of several ranks; one sends nothing and waits for none"
    elif sent:
        yield f"{', '.join(sent)}: of several data-parallel ranks, and there is one"


def _folders(recipe: Recipe) -> Iterator[str]:
    every, steps, log = recipe.checkpoint.every_n_steps, recipe.trainer.max_steps, recipe.log
    saves, keep = -(-steps // every) if every else 1, recipe.checkpoint.keep
    if 1 < saves < keep:
        yield (
            f"checkpoint.keep={keep}: there are {saves} checkpoints;"
            f" checkpoint.every_n_steps={every}, trainer.max_steps={steps}"
        )
    if every >= steps and (found := changed(recipe.checkpoint, "keep", "async_save")):
        yield (
            f"{', '.join(found)}: there is one checkpoint, the last;"
            f" checkpoint.every_n_steps={every}, trainer.max_steps={steps}"
        )
    if log.folder:
        yield from idle_dir(log, "log.folder", log.folder)


def idle_dir(log: Log, key: str, folder: str) -> Iterator[str]:
    """A line where log.dir is changed and the run `folder`, which `key` names, is not in it."""
    if (dirs := changed(log, "dir")) and Path(log.dir).absolute() not in Path(
        folder
    ).absolute().parents:
        yield f"{dirs[0]}: makes no folder, {key}={folder} is the run folder"
