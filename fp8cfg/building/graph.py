"""Graph nodes: the parts of a job, each with the keys of the recipe that it is made from. A lowered graph is a tree of them.

Every key that acts is one leaf of one node, under the last part of its name, so that an edited leaf is a changed key: what a graph
says is checked as a recipe is, and is what the job's recipe says. Keys that have no effect are left out, as the rules between keys
tell; so are nodes without any.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import fiddle as fdl
from fiddle import history
from fiddle._src.codegen.import_manager import register_import_alias

from fp8cfg.building.graph_tags import FP8Layers, OptimizerState
from fp8cfg.schema import rules
from fp8cfg.schema.errors import ConfigError, nearest
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.node import Node
from fp8cfg.schema.recipe import Recipe, fields, short_keys

if TYPE_CHECKING:
    from torch import nn

    from fp8cfg.building.job import Job

# Code that Fiddle generates defines a function `graph`, which must not hide this module.
register_import_alias(__name__, "from fp8cfg import graph_nodes")

_LOWERED = history.Location(__file__, 1, "graph")
"""Where Fiddle's history says that leaves come from that nobody has edited."""


def _keys(home: str, *names: str) -> dict[str, str]:
    """Full keys by the names of their leaves: `names` of the node `home`, by default all of them that are no nodes."""
    cls: Any = fields()[full(home)].annotation
    leaves = [
        n
        for n, f in cls.model_fields.items()
        if not (isinstance(f.annotation, type) and issubclass(f.annotation, Node))
    ]
    return {name: full(f"{home}.{name}") for name in names or leaves}


class Part:
    """A node, once it is built: the values of its keys and of those below it, by their full names."""

    keys: ClassVar[Mapping[str, str]] = {}
    nodes: ClassVar[Mapping[str, type[Part]]] = {}
    tags: ClassVar[Mapping[str, Any]] = {}

    def __init_subclass__(cls, **nodes: type[Part]) -> None:
        cls.nodes = nodes

    def __init__(self, /, **values: Any) -> None:
        self.settings: dict[str, Any] = {}
        for name, value in values.items():
            if kind := self.nodes.get(name):
                if not isinstance(value, kind):
                    raise ConfigError(
                        f"{name}={type(value).__name__}: needs a node graph_nodes.{kind.__name__},"
                        f" which has {_said(kind)}; what no key says is for a loop of your own"
                    )
                self.settings |= value.settings
            elif key := self.keys.get(name):
                self.settings[key] = value
            else:
                raise ConfigError(_unknown(type(self), name))

    # Fiddle evaluates them for each node again: half of the time that lowering takes
    __init__.__annotations__.clear()


class RopeScaling(Part):
    """Stretching of rotary frequencies."""

    keys = _keys("model.rope_scaling")


class Model(Part, rope_scaling=RopeScaling):
    """Shape of the Transformer."""

    keys = _keys("model")


class LoRA(Part):
    """Adapters over frozen weights."""

    keys = _keys("lora")


class Data(Part):
    """What is trained on."""

    keys = _keys("data")


class Layout(Part):
    """Parallel layout, and the machines that it is for."""

    keys = _keys("trainer.strategy") | _keys("trainer", "num_nodes", "devices")


class Scaling(Part):
    """Scaling of FP8 tensors; attention in FP8 has the same."""

    keys = _keys(
        "fp8",
        "scaling",
        "format",
        "margin",
        "interval",
        "amax_history_len",
        "amax_compute_algo",
        "first_step",
        "granularity",
        "use_power_2_scales",
        "enable_2d_quantization",
        "random_hadamard_transform",
        "stochastic_rounding",
    )


class Linear(Part, scaling=Scaling):
    """Linear layers that are converted to FP8: which, and which of their products."""

    keys = _keys(
        "fp8",
        "params",
        "keep_transpose_cache",
        "include",
        "exclude",
        "high_precision_at_start",
        "high_precision_at_end",
        "output_layer",
    ) | _keys("fp8.override_linear_precision")
    tags = dict.fromkeys(["output_layer"], FP8Layers)


class Attention(Part):
    """Attention that is converted to FP8."""

    keys = _keys("fp8", "dot_product_attention", "multi_head_attention")
    tags = dict.fromkeys(keys, FP8Layers)


class FP8(Part, linear=Linear, attention=Attention):
    """Products in FP8: whether, of which kinds of layers, and how many of them at least."""

    keys = _keys("fp8", "enabled", "emulate", "min_coverage")


class Storage(Part):
    """Codecs in which weights and gradients are stored and sent."""

    keys = _keys("storage", "weight", "weight_grad", "comm", "accumulate", "shard", "gather")


class Precision(Part, fp8=FP8, storage=Storage):
    """The precision plugin: what multiplies, how state is stored, who does it."""

    keys = _keys("precision", "compute") | {
        "backend": full("backend"),
        "opt_level": full("opt_level"),
    }


class Autocast(Part):
    """The context in which layers multiply in FP8."""

    keys = _keys("fp8", "use_autocast_during_eval", "reduce_amax", "tp_only_amax_red")


class Codecs(Part):
    """Codecs of the optimizer's state."""

    keys = _keys("storage", "master_weight", "exp_avg", "exp_avg_sq", "rounding")
    tags = dict.fromkeys(("master_weight", "exp_avg", "exp_avg_sq"), OptimizerState)


class Optimizer(Part, codecs=Codecs):
    """The optimizer, and the codecs of its state."""

    keys = _keys("optim", "name", "betas", "eps", "momentum", "weight_decay") | _keys(
        "trainer", "gradient_clip_val"
    )


class Schedule(Part):
    """Learning-rate schedule."""

    keys = _keys("optim", "lr", "min_lr", "lr_decay_style", "warmup_steps", "constant_steps")


class LossScaler(Part):
    """Loss scaling under fp16."""

    keys = _keys(
        "precision",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
    )


class Timeout(Part):
    """Limits of waiting for other ranks."""

    keys = _keys("trainer.timeout")


class Run(Part, timeout=Timeout):
    """The loop: its name, steps, batches and evaluations, and where it runs."""

    keys = {"name": "name"} | {
        k: v for k, v in _keys("trainer").items() if k not in (*Layout.keys, *Optimizer.keys)
    }


class Checkpoint(Part):
    """What is saved, and when."""

    keys = _keys("checkpoint")


class Log(Part):
    """What a run writes and prints."""

    keys = _keys("log")


class Root(
    Part,
    recipe=Run,
    model=Model,
    lora=LoRA,
    data=Data,
    layout=Layout,
    precision=Precision,
    autocast=Autocast,
    optimizer=Optimizer,
    schedule=Schedule,
    loss_scaler=LossScaler,
    checkpoint=Checkpoint,
    log=Log,
):
    """The parts of a job, which are its recipe."""


def graph(job: Any, recipe: Recipe, model: nn.Module | None = None) -> fdl.Config[Job]:
    """The graph of a checked `recipe`: a call of `job` with the parts of Root, and with `model` as `given`, where there is one."""
    given = {} if model is None else {"given": model}
    with history.custom_location(lambda: _LOWERED):
        return fdl.Config(job, **_below(Root, recipe, _idle(recipe)), **given)


def built(graph: fdl.Config[Any]) -> Any:
    """What `graph` builds, as fdl.build does, which refuses to run inside of another build; and errors stay one line."""
    from fiddle import daglish

    def build(value: Any, state: Any) -> Any:
        if not isinstance(value, fdl.Buildable):
            return state.map_children(value)
        arguments = {
            name: state.call(child, daglish.Attr(name))
            for name, child in value.__arguments__.items()
        }
        return fdl.get_callable(value)(**arguments)

    return daglish.MemoizedTraversal.run(build, graph)


def recipe_of(parts: Mapping[str, Any]) -> Recipe:
    """The checked recipe of built `parts`, as a graph has them. Raises ConfigError with every problem found."""
    from fp8cfg.composition.recipe_yaml import nested

    recipe = Recipe(**nested(Root(**parts).settings))
    recipe.check()
    return recipe


def _below(part: type[Part], recipe: Recipe, idle: Collection[str]) -> dict[str, fdl.Config[Any]]:
    """The nodes below `part` that have a key, or a node below them that has one, by their names."""
    found = {}
    for name, cls in part.nodes.items():
        leaves = {
            leaf: attrgetter(key)(recipe) for leaf, key in cls.keys.items() if key not in idle
        }
        if arguments := leaves | _below(cls, recipe, idle):
            found[name] = fdl.Config(cls, **arguments)
            for leaf in cls.tags.keys() & leaves:
                fdl.add_tag(found[name], leaf, cls.tags[leaf])
    return found


_ACTS: dict[str, Callable[[Recipe], bool]] = {
    "trainer.strategy.sequence_parallel": (
        lambda r: r.trainer.strategy.tensor_model_parallel_size > 1
    ),
    "trainer.strategy.pipeline_schedule": (
        lambda r: r.trainer.strategy.pipeline_model_parallel_size > 1
    ),
    "trainer.strategy.data_parallel_replicate_size": (
        lambda r: r.trainer.strategy.data_parallel_replicate_size > 1
    ),
    full("fp8.multi_head_attention"): lambda r: r.fp8.dot_product_attention,
    "log.resume": lambda r: r.log.folder is not None,
    "data.mixture": lambda r: bool(r.data.mixture),
    "checkpoint.every_minutes": lambda r: r.checkpoint.every_minutes > 0,
    "log.fp8_stats_every_n_steps": lambda r: r.log.fp8_stats_every_n_steps > 0,
}
"""When keys have an effect whose rules refuse another value than their default alone, or whose default asks for nothing."""
_NULLABLE = [(key, attrgetter(key)) for key, field in fields().items() if field.default is None]


def _idle(recipe: Recipe) -> set[str]:
    """Full keys that have no effect in a checked `recipe`: those which the rules refuse at their default, were they written, and
    those that are null by default, which ask for nothing."""
    refused = {
        full(key)
        for violation in rules.broken(recipe, short_keys())
        for key, default in violation.fixes[:1]
        if attrgetter(key)(recipe) == default
    }
    null = {key for key, value in _NULLABLE if value(recipe) is None}
    return refused | null | {key for key, acts in _ACTS.items() if not acts(recipe)}


def _said(part: type[Part]) -> str:
    """What `part` has: its leaves by the keys that they are, and its nodes."""
    return ", ".join([*(f"{leaf} ({short(key)})" for leaf, key in part.keys.items()), *part.nodes])


def _unknown(part: type[Part], name: str) -> str:
    """The line for a leaf that `part` does not have: where it is, what is near, or what there is."""
    at = f"{part.__name__}.{name}: no such leaf of the graph"
    for cls in Part.__subclasses__():
        if name in cls.keys:
            return f"{at}; {short(cls.keys[name])} is {cls.__name__}.{name}"
    near = nearest(name, [*part.keys, *part.nodes], 0.75)
    return f"{at}; did you mean {near!r}?" if near else f"{at}; {part.__name__} has {_said(part)}"
