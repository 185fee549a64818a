"""Fiddle graph as text: what will be built, with which arguments. Loads Fiddle, and no torch."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.flatten import listed
from fp8cfg.config.node import Node
from fp8cfg.config.precision import Precision
from fp8cfg.config.storage import low_bit
from fp8cfg.report.tables import wrapped

if TYPE_CHECKING:
    import fiddle as fdl

_OPTIM = {"adamw": ("lr", "betas", "eps", "weight_decay"), "adam": ("lr", "betas", "eps", "weight_decay"),
          "sgd": ("lr", "momentum", "weight_decay")}


def built(graph: fdl.Config[Any]) -> dict[str, dict[str, Any]]:
    """The autocast context, the optimizer, the schedule and the loss scaler of `graph`: each "name" and its arguments."""
    prepared, optimizer = graph.prepared, graph.optimizer
    precision, optim = prepared.precision, optimizer.optim
    layers = sum(p.fp8 for p in prepared.plan)
    reduced = {"reduce_amax": precision.fp8.reduce_amax} if precision.fp8.enabled else {}
    parts = {
        "autocast": {"name": "Job.autocast", "compute": precision.compute, "fp8_layers": layers,
                     "product": prepared.choice.product},
        "optimizer": {**_optimizer(precision, optim.name),
                      **{k: getattr(optim, k) for k in _OPTIM[optim.name]}, "clip_grad": optimizer.clip_grad, **reduced},
        "schedule": {"name": _called(graph.schedule), **_scalars(graph.schedule)},
    }
    if graph.loss_scaler is not None:
        parts["loss scaling"] = {"name": _called(graph.loss_scaler), **_scalars(graph.loss_scaler)}
    return parts


def tree(graph: fdl.Config[Any]) -> str:
    """Every path of `graph` and its value, one a line (fiddle.printing). A part that two parents share is shown once; where it
    comes again its path stands."""
    from fiddle import printing

    lines = printing.as_str_flattened(_readable(graph), include_types=False, raw_value_repr=True).splitlines()
    return "\n".join(wrapped(line, more="    ") for line in lines)


def dot(graph: fdl.Config[Any]) -> str:
    """`graph` as text for Graphviz."""
    from fiddle import graphviz

    return str(graphviz.render(_readable(graph, paths=False), max_str_length=40).source).rstrip()


def _readable(graph: fdl.Config[Any], paths: bool = True) -> fdl.Config[Any]:
    """A copy of `graph` whose leaves fit on a line: nodes of the recipe and the backend's choice taken apart, the plan as a
    count."""
    shown = copy.deepcopy(graph)
    shown.recipe = graph.recipe.name
    shown.plan = shown.prepared.plan = f"{len(graph.plan)} linear layers, {sum(p.fp8 for p in graph.plan)} in FP8"
    shown.prepared.precision = shown.optimizer.precision = _apart(listed(graph.prepared.precision))
    shown.optimizer.optim = _apart(listed(graph.optimizer.optim))
    shown.choice = shown.prepared.choice = shown.optimizer.choice = _apart(asdict(graph.choice))
    if paths:
        shown.prepared.choice = shown.optimizer.choice = "= choice"
        shown.optimizer.prepared, shown.optimizer.precision = "= prepared", "= prepared.precision"
        if graph.loss_scaler is not None:
            shown.optimizer.loss_scaler = "= loss_scaler"
    return shown


def _apart(data: dict[str, Any]) -> fdl.Config[Any]:
    """`data` as nodes of the graph."""
    import fiddle as fdl

    return fdl.Config(dict, **{k: _apart(v) if isinstance(v, dict) else v for k, v in data.items()})


def _called(config: Any) -> str:
    return str(config.__fn_or_cls__.__name__)


def _optimizer(precision: Precision, inner: str) -> dict[str, str]:
    """What `targets.optimizer` makes of `inner`."""
    if low_bit(precision):
        name = {"adamw": "LowBitTrainingAdamW", "adam": "LowBitTrainingAdam"}[inner]
        return {"name": name, "rounding": precision.storage.rounding}
    return {"name": "MixedPrecisionOptimizer", "inner": inner}


def _scalars(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.__arguments__.items()
            if v is not None and not isinstance(v, Node) and not hasattr(v, "__fn_or_cls__")}
