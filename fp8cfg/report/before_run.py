"""Run header: the composed precision, planned coverage and memory that are printed before a run; and the last refusals."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod

from fp8cfg import __version__
from fp8cfg.backends.backend_choice import Choice, Hardware, choose
from fp8cfg.composition.flatten import listed
from fp8cfg.config.errors import ConfigError, NotFP8Error, refuse_if
from fp8cfg.config.fp8 import FP8
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.rules import missing_data
from fp8cfg.config.storage import as_sharded, resolved
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.models.shapes import parameter_shapes
from fp8cfg.report.coverage import planned
from fp8cfg.report.machine import free_memory, gpus
from fp8cfg.report.memory import layout
from fp8cfg.report.memory.fit_search import Fit, Takes
from fp8cfg.report.memory.fsdp_gather import gather_line
from fp8cfg.report.memory.machines import placed
from fp8cfg.report.memory.nearest_fit import Line, alternatives, offering, smoke_run, too_large
from fp8cfg.report.memory.peak import memory_table
from fp8cfg.report.plan_text import passed_over
from fp8cfg.report.tables import amount, wrapped
from fp8cfg.scalings import SCALINGS


def head(recipe: Recipe) -> str:
    """One line on the recipe, and its precision as composed: what is set, and what it resolves to."""
    import yaml

    parameters = sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))
    p, t = recipe.precision, recipe.trainer
    run = f"{amount(parameters)} parameters, {t.max_steps} steps of {t.global_batch_size} x {recipe.model.seq_length} tokens"
    lines = [f"fp8cfg {__version__}: recipe {recipe.name}", run, "", "precision", f"  compute: {p.compute}"]
    nodes = {"fp8": _fp8(recipe), "storage": resolved(p)}
    if p.compute == "fp16":
        dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        nodes["loss scaling"] = {k: getattr(p, k) for k in (dynamic if p.loss_scale is None else ("loss_scale",))}
    for name, node in nodes.items():
        text = yaml.safe_dump(node, sort_keys=False, default_flow_style=True, width=48)
        lines.append(f"  {name}: " + text.strip().replace("\n", "\n   "))
    return "\n".join(lines)


def _fp8(recipe: Recipe) -> dict[str, object]:
    """The keys of the fp8 node that say something under its scaling: the leading ones, and those that differ from defaults."""
    f = recipe.fp8
    if not f.enabled:
        return {"enabled": False}
    leading = ["enabled", "scaling", "format", "params"]
    if SCALINGS[f.scaling].history:
        leading[3:3] = ["margin", "amax_history_len", "amax_compute_algo"]
    values, defaults = listed(f), listed(FP8())
    return {k: values[k] for k in [*leading, *(k for k in values if k not in leading and values[k] != defaults[k])]}


def body(recipe: Recipe, hardware: Hardware) -> str:
    """The planned coverage, the backend that will do it, the memory it takes, and the layout. Raises ConfigError as
    `choose` and `plan` do."""
    choice, parts = choose_backend(recipe, hardware, layout.ranks()), list[str]()
    if recipe.fp8.enabled:
        coverage = planned(recipe, plan(recipe, choice.backend))
        least = recipe.fp8.min_coverage
        if coverage.share < least:
            raise NotFP8Error(f"fp8.min_coverage={least:g}: {coverage.share:.1%} of matmul FLOPs would run in FP8")
        who = wrapped(f"planned coverage: backend {choice.backend} ({choice.why})", more="  ")
        backend = "\n".join([who, *passed_over(choice)])
        parts.append(f"{backend}\n{coverage}")
    gathered = gather_line(recipe, layout.shards(recipe, layout.ranks()), choice.backend)
    memory = [memory_table(recipe, hardware.device, backend=choice.backend), gathered]
    parts.append("\n".join(line for line in memory if line))
    parts += [line for line in [_scaled_down(recipe)] if line]
    return "\n" + "\n\n".join(parts) + "\n"


def refuse_layout(recipe: Recipe, ranks: int, given: bool = False) -> None:
    """Raise ConfigError for a parallel layout, which is never changed for the user, that training does not have, or not on so many
    `ranks`, or not of a model that is `given`."""
    refuse_if(layout.refused(recipe, ranks, given))


def refuse(
    recipe: Recipe, hardware: Hardware, whole_line: Line, problems_of_layout: Sequence[str] = (), ranks: int | None = None,
    takes: Takes | None = None,
) -> None:
    """Raise ConfigError, before anything is made, for a recipe without data, for one with `problems_of_layout`, and for one whose
    layout or memory the ranks here, or `ranks` that are to be started here, do not have. Its line ends with those that run here, as
    `whole_line` has them."""
    refuse_if(list(missing_data(recipe)))
    if lines := _problems(recipe, hardware, problems_of_layout, ranks):
        found = [*fits(recipe, hardware, ranks, takes), *([] if takes else smoke_run_here(recipe, hardware, ranks))]
        raise ConfigError(offering(lines, "here", list(map(whole_line, found))))


def _problems(recipe: Recipe, hardware: Hardware, of_layout: Sequence[str], ranks: int | None) -> list[str]:
    """Why the ranks of this run, or `ranks` that are to be started, do not train `recipe`: what of the layout they do not have,
    the problems `of_layout` of the recipe itself, or memory."""
    if of_layout and not ranks and not _launched():
        return list(of_layout)
    started = ranks or layout.ranks()
    if lines := layout.refused(recipe, started) or list(of_layout) or layout.uneven_batch(recipe, started):
        return layout.refused(recipe, ranks or _ranks(recipe, hardware.device)) or lines
    free, backend = free_memory(hardware.device, ranks), choose_backend(recipe, hardware, started).backend
    line = too_large(recipe, hardware.device, free, backend, started)
    return [line] if line else []


def fits(recipe: Recipe, hardware: Hardware, ranks: int | None = None, takes: Takes | None = None) -> list[Fit]:
    """What runs here in the place of `recipe`: on `ranks` that are to be started, or those of this run. Of a run that is gone on
    with what it `takes`. Outside of a launcher it is a recipe of this machine alone, with trainer.devices where these are no
    multiple of the ranks, over which a layout might not divide."""
    there = ranks or _ranks(recipe, hardware.device)
    if not ranks and not _launched():
        devices = recipe.trainer.devices
        recipe = placed(recipe, 1, there if devices % there else devices)
    return alternatives(recipe, hardware.device, free_memory(hardware.device, ranks), there,
                        lambda other: choose_backend(other, hardware, there).backend, takes)


def smoke_run_here(recipe: Recipe, hardware: Hardware, ranks: int | None = None) -> list[Fit]:
    """The smoke run of `recipe` on `ranks` that are to be started here, or those that start by themselves, if there is one."""
    there = ranks or (min(gpus(), recipe.trainer.devices) if _starts_here(hardware.device) else layout.ranks())
    return smoke_run(recipe, there, lambda other: choose_backend(other, hardware, there).backend)


def choose_backend(recipe: Recipe, hardware: Hardware, ranks: int) -> Choice:
    """Who multiplies `recipe` on so many ranks of that hardware. Raises ConfigError as `choose` does."""
    precision = as_sharded(recipe.precision, layout.shards(recipe, ranks))
    return choose(precision, hardware, statistics=recipe.log.fp8_stats_every_n_steps, adapters=recipe.lora.enabled,
                  strategy=recipe.trainer.strategy)


def _ranks(recipe: Recipe, device: str) -> int:
    """The ranks of this run; outside of a launcher, those that a line for this machine starts on its GPUs."""
    if not _starts_here(device):
        return layout.ranks()
    t = recipe.trainer
    return next(n for n in range(min(gpus(), t.devices), 0, -1) if t.global_batch_size % n == 0)


def _starts_here(device: str) -> bool:
    """Whether a line for this machine starts ranks on its GPUs: outside of a launcher."""
    return device == "cuda" and not _launched()


def _launched() -> bool:
    return bool({"RANK", "WORLD_SIZE"} & os.environ.keys())


def _scaled_down(recipe: Recipe) -> str:
    """The line that says how a layout for other machines is run here, or an empty one."""
    t, here = recipe.trainer, layout.ranks()
    meant, s = t.num_nodes * t.devices, t.strategy
    if layout.refused(recipe, here) or layout.uneven_batch(recipe, here):
        return (f"meant for {meant} GPUs (tensor {s.tensor_model_parallel_size}, pipeline {s.pipeline_model_parallel_size}, "
                f"context {s.context_parallel_size})")
    if meant == here and s.size == 1:
        return ""
    steps = t.global_batch_size / (t.micro_batch_size * (here // s.size))
    many = "1 rank" if here == 1 else f"{here} ranks"
    ways = {"tensor": s.tensor_model_parallel_size, "pipeline": s.pipeline_model_parallel_size, "context": s.context_parallel_size}
    split = " x ".join(f"{way} {n}" for way, n in ways.items() if n > 1)
    how = f"data-parallel on {many}" if s.size == 1 else f"on {many} = {split} x data {here // s.size}"
    runs = f"runs here {how}, {steps:g} microbatches a step on each"
    return runs if meant == here else f"meant for {meant} GPUs\n{runs}"

