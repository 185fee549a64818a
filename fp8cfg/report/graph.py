"""The Fiddle graph of a recipe as text: what will be built, with which arguments. Loads Fiddle, and no torch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from fp8cfg.composition.yaml_door import listed
from fp8cfg.config.node import Node

if TYPE_CHECKING:
    import fiddle as fdl

    from fp8cfg.job import Job

_OPTIM = {"adamw": ("lr", "betas", "eps", "weight_decay"), "adam": ("lr", "betas", "eps", "weight_decay"),
          "sgd": ("lr", "momentum", "weight_decay")}


def built(graph: fdl.Config[Job]) -> dict[str, dict[str, Any]]:
    """The autocast context, the optimizer, the schedule and the loss scaler of `graph`: each "name" and its arguments."""
    prepared, optimizer = graph.prepared, graph.optimizer
    layers = sum(p.fp8 for p in prepared.plan)
    optim = optimizer.optim
    parts = {
        "autocast": {"name": "Job.autocast", "compute": prepared.compute, "fp8_layers": layers, "product": prepared.product},
        "optimizer": {"name": _returned(optimizer), "inner": optim.name, **{k: getattr(optim, k) for k in _OPTIM[optim.name]},
                      **_scalars(optimizer)},
        "schedule": {"name": _called(graph.schedule), **_scalars(graph.schedule)},
    }
    if graph.loss_scaler is not None:
        parts["loss scaling"] = {"name": _called(graph.loss_scaler), **_scalars(graph.loss_scaler)}
    return parts


def tree(graph: fdl.Config[Job]) -> str:
    """Every path of `graph` and its value, one a line (fiddle.printing). A part that two parents share is shown once; where it
    comes again its path stands."""
    from fiddle import printing

    return str(printing.as_str_flattened(_readable(graph), include_types=False, raw_value_repr=True))


def dot(graph: fdl.Config[Job]) -> str:
    """`graph` as text for Graphviz."""
    from fiddle import graphviz

    return str(graphviz.render(_readable(graph, paths=False), max_str_length=40).source).rstrip()


def _readable(graph: fdl.Config[Job], paths: bool = True) -> fdl.Config[Job]:
    """A copy of `graph` whose leaves fit on a line: nodes of the recipe taken apart, the plan as a count."""
    import fiddle as fdl

    shown = copy.deepcopy(graph)
    del shown.recipe
    shown.plan = shown.prepared.plan = f"{len(graph.plan)} linear layers, {sum(p.fp8 for p in graph.plan)} in FP8"
    shown.prepared.fp8 = fdl.Config(dict, **listed(graph.prepared.fp8))
    shown.optimizer.optim = fdl.Config(dict, **listed(graph.optimizer.optim))
    if paths:
        shown.optimizer.prepared = "= prepared"
        if graph.loss_scaler is not None:
            shown.optimizer.loss_scaler = "= loss_scaler"
    return shown


def _called(config: Any) -> str:
    return str(config.__fn_or_cls__.__name__)


def _returned(config: Any) -> str:
    """The class that a target returns, by its annotation."""
    return str(config.__fn_or_cls__.__annotations__["return"])


def _scalars(config: Any) -> dict[str, Any]:
    return {k: v for k, v in config.__arguments__.items()
            if v is not None and not isinstance(v, Node) and not hasattr(v, "__fn_or_cls__")}
