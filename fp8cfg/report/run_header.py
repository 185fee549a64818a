"""Run header: the composed precision, planned coverage and memory that are printed before a run."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from fp8cfg.backends.choice import Hardware
from fp8cfg.composition.recipe_yaml import listed
from fp8cfg.models.config import parameter_shapes
from fp8cfg.parallel import sharding
from fp8cfg.planning import layout
from fp8cfg.planning.coverage import check_min_coverage, planned_coverage
from fp8cfg.planning.fsdp_memory import gather_line
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.planning.peak_memory import memory_table
from fp8cfg.planning.plan_report import passed_over_lines
from fp8cfg.planning.preflight import choose_backend
from fp8cfg.schema import __version__
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import shown
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import resolved
from fp8cfg.schema.tables import amount, fits, table, wrapped

Pairs = dict[str, tuple[Any, Any]]


def keys(a: Recipe, b: Recipe) -> Pairs:
    """The keys that differ, by their short names, with both values."""
    return a.diff(b)


def versions(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """What differs between two environment.json: Python, packages, CUDA, GPUs, and the code's commit."""
    return pairs(_versions(a), _versions(b))


def pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> Pairs:
    """The keys under which `a` and `b` differ, with both values; None where one of them has no such key."""
    return {
        k: (a.get(k), b.get(k)) for k in [*a, *(k for k in b if k not in a)] if a.get(k) != b.get(k)
    }


def text(name_a: str, name_b: str, parts: Mapping[str, Pairs]) -> str:
    """Both names and a table for each of `parts` (title -> what differs), or that there is no difference. No leaf of a graph is
    null: there None says that a graph does not have it."""
    if not any(parts.values()):
        return "no difference"
    names = [wrapped(name, f"{side}  ", "   ") for side, name in (("A", name_a), ("B", name_b))]
    return "\n".join(
        names + ["\n" + _table(title, found) for title, found in parts.items() if found]
    )


def _table(title: str, found: Pairs) -> str:
    rows = [
        [key, *("-" if title == "leaf" and v is None else shown(v) for v in both)]
        for key, both in found.items()
    ]
    header = [title, "A", "B"]
    if fits(header, rows):
        return table(header, rows)
    return "\n".join(
        [
            title,
            *(
                f"{key}\n{wrapped(a, '  A  ', '     ')}\n{wrapped(b, '  B  ', '     ')}"
                for key, a, b in rows
            ),
        ]
    )


def _versions(environment: Mapping[str, Any]) -> dict[str, Any]:
    packages, code = (
        {**found} if isinstance(found := environment.get(k), dict) else {}
        for k in ("packages", "code")
    )
    rest = {k: environment.get(k) for k in ("python", "cuda", "gpus")}
    return {**rest, **packages, "code": code.get("commit"), "code changed": code.get("dirty")}


def head(recipe: Recipe) -> str:
    """One line on the recipe, and its precision as composed: what is set, and what it resolves to."""
    import yaml

    parameters = sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))
    p, t = recipe.precision, recipe.trainer
    run = (
        f"{amount(parameters)} parameters, {t.max_steps} steps of {t.global_batch_size} x"
        f" {recipe.model.seq_length} tokens"
    )
    lines = [
        f"fp8cfg {__version__}: recipe {recipe.name}",
        run,
        "",
        "precision",
        f"  compute: {p.compute}",
    ]
    nodes = {"fp8": _fp8(recipe), "storage": resolved(p)}
    if p.compute == "fp16":
        dynamic = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        nodes["loss scaling"] = {
            k: getattr(p, k) for k in (dynamic if p.loss_scale is None else ("loss_scale",))
        }
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
    return {
        k: values[k]
        for k in [*leading, *(k for k in values if k not in leading and values[k] != defaults[k])]
    }


def body(recipe: Recipe, hardware: Hardware) -> str:
    """The planned coverage, the backend that will do it, the memory it takes, and the layout. Raises ConfigError as
    `choose` and `plan` do."""
    choice, parts = choose_backend(recipe, hardware, sharding.ranks()), list[str]()
    if recipe.fp8.enabled:
        coverage = planned_coverage(recipe, plan_layers(recipe, choice.backend))
        check_min_coverage(recipe, coverage)
        who = wrapped(f"planned coverage: backend {choice.backend} ({choice.why})", more="  ")
        backend = "\n".join([who, *passed_over_lines(choice)])
        parts.append(f"{backend}\n{coverage}")
    gathered = gather_line(recipe, layout.rank_part(recipe, sharding.ranks()), choice.backend)
    memory = [memory_table(recipe, hardware.device, backend=choice.backend), gathered]
    parts.append("\n".join(line for line in memory if line))
    parts += [line for line in [_scaled_down(recipe)] if line]
    return "\n" + "\n\n".join(parts) + "\n"


def _scaled_down(recipe: Recipe) -> str:
    """The line that says how a layout for other machines is run here, or an empty one."""
    t, here = recipe.trainer, sharding.ranks()
    meant, s = t.num_nodes * t.devices, t.strategy
    gpus = "1 GPU" if meant == 1 else f"{meant} GPUs"
    if layout.layout_violations(recipe, here) or layout.uneven_batch(recipe, here):
        return (
            f"meant for {gpus} (tensor {s.tensor_model_parallel_size}, pipeline"
            f" {s.pipeline_model_parallel_size}, context {s.context_parallel_size})"
        )
    if meant == here and s.size == 1:
        return ""
    steps = t.global_batch_size / (t.micro_batch_size * (here // s.size))
    many = "1 rank" if here == 1 else f"{here} ranks"
    ways = {
        "tensor": s.tensor_model_parallel_size,
        "pipeline": s.pipeline_model_parallel_size,
        "context": s.context_parallel_size,
    }
    split = " x ".join(f"{way} {n}" for way, n in ways.items() if n > 1)
    how = (
        f"data-parallel on {many}"
        if s.size == 1
        else f"on {many} = {split} x data {here // s.size}"
    )
    runs = f"runs here {how}, {steps:g} microbatch{'' if steps == 1 else 'es'} a step on each"
    return runs if meant == here else f"meant for {gpus}\n{runs}"
