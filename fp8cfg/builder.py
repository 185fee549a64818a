"""Builder: a recipe is lowered to a Fiddle graph, without torch, and the graph is built into a Job once everything is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8cfg import job_parts
from fp8cfg.backends import backend_registry
from fp8cfg.backends.backend_choice import Choice, Hardware, choose
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.recipe import Recipe
from fp8cfg.job import Job
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.models.config import TransformerConfig
from fp8cfg.optim import LossScaler, Schedule

if TYPE_CHECKING:
    import fiddle as fdl
    from torch import nn

__all__ = ["Job", "build", "lower"]


def lower(
    recipe: Recipe, hardware: Hardware | None = None, model: nn.Module | None = None, choice: Choice | None = None
) -> fdl.Config[Job]:
    """The Fiddle graph of `recipe` on `hardware` (by default a CPU), every shared part in it once; around `model` where it is
    given. `choice` is who multiplies, by default whoever can here. Loads no torch.

    Raises ConfigError for what the recipe's rules or the hardware refuse.
    """
    import fiddle as fdl

    _checked(recipe)
    hardware = hardware or Hardware("cpu")
    choice = choice or choose(recipe.precision, hardware, statistics=recipe.log.fp8_stats_every_n_steps)
    p = recipe.precision
    if model is None:
        plans = plan(recipe, choice.backend)
        _refuse_tokens(recipe, choice)
        built = fdl.Config(
            job_parts.transformer, config=_config_node(recipe), recompute=recipe.model.recompute_granularity == "full",
            device=hardware.device, seed=recipe.trainer.seed)
    else:
        from fp8cfg.backends.eligibility import plan_model

        if p.storage.shard == "fsdp":
            raise ConfigError("storage.shard=fsdp: splits the Transformer of a recipe, not a model of your own; write "
                              "fp8cfg.convert_model(model, recipe) with storage.shard=none, and call torch's fully_shard on it")
        plans = plan_model(model, p.fp8, backend_registry.rules(choice.backend).misfit)
        built = fdl.Config(job_parts.given, model=model, device=hardware.device)
    prepared = fdl.Config(
        job_parts.prepared_model, model=built, precision=p, plan=plans, choice=choice, seed=recipe.trainer.seed)
    scaler = fdl.Config(
        LossScaler, loss_scale=p.loss_scale, initial_loss_scale=p.initial_loss_scale, min_loss_scale=p.min_loss_scale,
        loss_scale_window=p.loss_scale_window, hysteresis=p.hysteresis) if p.compute == "fp16" else None
    optimizer = fdl.Config(
        job_parts.optimizer, prepared=prepared, precision=p, optim=recipe.optim, clip_grad=recipe.trainer.gradient_clip_val,
        choice=choice, loss_scaler=scaler, seed=recipe.trainer.seed)
    return fdl.Config(
        Job, recipe=recipe, prepared=prepared, optimizer=optimizer, schedule=_schedule(recipe), plan=plans, choice=choice,
        loss_scaler=scaler, foreign=model is not None)


def build(recipe: Recipe, model: nn.Module | None = None) -> Job:
    """The Job of `recipe` on this machine. Raises ConfigError, before any memory is taken, for a recipe that cannot run here,
    one that does not fit into memory among them.

    The recipe is copied: later changes to it do not reach the job. With `model` the job is around that one, converted in place
    and moved to the device, and the recipe's `model` node has no effect. Its parameters become float32 and then what the
    recipe's storage says; what it would leave in float32 beside linear layers has the compute dtype, over float32 masters. An
    nn.Linear is put into an nn.Sequential, for a root cannot be replaced in place.
    """
    import fiddle as fdl

    from fp8cfg.backends.exclusions import mark
    from fp8cfg.report.machine import find_hardware, free_memory
    from fp8cfg.report.memory.nearest_fit import refuse_if_too_large

    if model is None:
        recipe = _checked(recipe).model_copy(deep=True)
    else:
        from fp8cfg.conversion import convert

        recipe, model = convert.to_build(recipe, model)
    hardware = find_hardware(recipe.trainer.accelerator)
    graph = lower(recipe, hardware, model)
    if model is None:
        refuse_if_too_large(recipe, hardware.device, free_memory(hardware.device), graph.choice.backend)
    if recipe.storage.shard == "fsdp":
        from fp8cfg.training.distributed.fsdp import refuse_uneven

        refuse_uneven(graph.plan, recipe.precision, graph.choice.backend)
    job = fdl.build(graph)
    assert isinstance(job, Job)
    mark(job.model, recipe.fp8, job.plan, job.choice, own_optimizer=True)
    return job


def _refuse_tokens(recipe: Recipe, choice: Choice) -> None:
    """Raise ConfigError where the backend cannot multiply the tokens of a microbatch."""
    t, multiple = recipe.trainer, 1
    if choice.product != "none":
        multiple = backend_registry.rules(choice.backend).tokens_multiple(recipe.fp8, choice.product)
    if (tokens := t.micro_batch_size * recipe.model.seq_length) % multiple:
        raise ConfigError(f"trainer.micro_batch_size={t.micro_batch_size}: with model.seq_length={recipe.model.seq_length} that is "
                          f"{tokens} tokens, backend={choice.backend} needs a multiple of {multiple}; write backend=native, or "
                          f"model.seq_length={-(-recipe.model.seq_length // multiple) * multiple}")


def _checked(recipe: Recipe) -> Recipe:
    """`recipe`, if it is one and breaks no rule; else ConfigError."""
    if not isinstance(recipe, Recipe):
        raise ConfigError(f"expected a Recipe, got {type(recipe).__name__}; compose(['recipe=llama_8b']) gives one")
    recipe.check()
    return recipe


def _config_node(recipe: Recipe) -> fdl.Config[TransformerConfig]:
    import dataclasses

    import fiddle as fdl

    config = transformer_config(recipe)
    return fdl.Config(TransformerConfig, **{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})


def _schedule(recipe: Recipe) -> fdl.Config[Schedule]:
    import fiddle as fdl

    o = recipe.optim
    return fdl.Config(
        Schedule, max_lr=o.lr, min_lr=o.end_lr, warmup_steps=o.warmup_steps, max_steps=recipe.trainer.max_steps,
        constant_steps=o.constant_steps, decay=o.lr_decay_style)


