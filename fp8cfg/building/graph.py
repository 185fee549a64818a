"""The Fiddle graph of a recipe, whose nodes are the functions that build a job.

    graph = fp8cfg.lower(recipe)
    graph.optimizer.config.lr = 1e-4
    job = fdl.build(graph)

Settings are nodes of the schema's classes, such as Optim. Builders are nodes of the functions
below. Their arguments are the settings that they read and the parts that they build on:

    recipe -> plan -> model -> optimizer <- loss scaler
                        |
                     autocast            plan -> schedule

`graph.optimizer.config` is the node `graph.recipe.optim`, so an edit under either path acts
everywhere. Fiddle builds a shared node once: there is one plan and one model.

The module loads no torch. The builders do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

import fiddle as fdl
import yaml
from fiddle import daglish, history
from fiddle._src.codegen.import_manager import register_import_alias
from fiddle.experimental import yaml_serialization  # noqa: F401 - it registers Config with YAML

from fp8cfg.building.graph_tags import FP8Layers, OptimizerState
from fp8cfg.building.job import Job, JobAutocast, make_schedule
from fp8cfg.optim import LossScaler, Schedule
from fp8cfg.planning.graph_text import leaf_values, tree_text
from fp8cfg.planning.job_plan import Plan, cut_if_smoke, plan_on_this_machine
from fp8cfg.schema import rules
from fp8cfg.schema.errors import ConfigError, NoSuchKey, refuse_if
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import full, short, shown
from fp8cfg.schema.model import Model
from fp8cfg.schema.node import Node
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe, differences, fields, short_keys
from fp8cfg.schema.training import Optim
from fp8cfg.schema.value_errors import unknown_key

if TYPE_CHECKING:
    from torch import nn

    from fp8cfg.backends.protocol import PreparedModel
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

    Optimizer = MixedPrecisionOptimizer | LowBitTraining

# Code that Fiddle generates defines a function `graph`, which must not hide this module.
register_import_alias(__name__, "from fp8cfg import graph_nodes")

Section = TypeVar("Section", bound=Node)

TAGS = {
    "fp8.output_layer": FP8Layers,
    "fp8.dot_product_attention": FP8Layers,
    "fp8.multi_head_attention": FP8Layers,
    "storage.master_weight": OptimizerState,
    "storage.exp_avg": OptimizerState,
    "storage.exp_avg_sq": OptimizerState,
}
"""Tags of leaves, by the short names of their keys."""

_LOWERED = history.Location(__file__, 1, "graph")
"""Source location of unedited leaves in Fiddle's history."""


class GraphNode(fdl.Config):  # type: ignore[misc]
    """A Config that prints and compares each node once, and that knows the path of a wrong name.

    Fiddle repeats a shared node under each of its paths: `==` takes two seconds, and an
    AttributeError prints thousands of lines. Seen with fiddle 0.3.1.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__signature_info__.parameters:
            return super().__getattr__(name)
        raise NoSuchKey(_unknown_name(self.__fn_or_cls__, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__signature_info__.parameters:
            raise NoSuchKey(_unknown_name(self.__fn_or_cls__, name))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        return tree_text(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, fdl.Config):
            return NotImplemented
        return leaf_values(self) == leaf_values(other) and _targets(self) == _targets(other)

    __hash__ = None  # type: ignore[assignment]


def _targets(graph: fdl.Config[Any]) -> list[Any]:
    """Returns the classes and functions of all nodes, in order."""
    nodes = daglish.iterate(graph, memoized=True)
    return [fdl.get_callable(node) for node, _ in nodes if isinstance(node, fdl.Buildable)]


# Fiddle's YAML knows Config, and not its subclasses.
yaml.SafeDumper.add_representer(GraphNode, yaml.SafeDumper.yaml_representers[fdl.Config])


def make_graph(recipe: Recipe, custom_model: nn.Module | None = None) -> fdl.Config[Job]:
    """Makes the graph of a checked recipe.

    Args:
        recipe: What to build. Edits of the graph do not reach it.
        custom_model: A model to convert, in place of the recipe's Transformer.
    """
    # Without a location Fiddle inspects the stack for each leaf.
    with history.custom_location(lambda: _LOWERED):
        settings = _settings_node(recipe, unused_keys(recipe))
        precision = settings.trainer.plugins
        plan = GraphNode(build_plan, recipe=settings)
        if custom_model is not None:
            plan.custom_model = custom_model
        model = GraphNode(build_model, plan=plan, config=settings.model)
        loss_scaler = GraphNode(build_loss_scaler, plan=plan, precision=precision)
        return GraphNode(
            build_job,
            recipe=settings,
            plan=plan,
            model=model,
            loss_scaler=loss_scaler,
            optimizer=GraphNode(
                build_optimizer,
                plan=plan,
                model=model,
                loss_scaler=loss_scaler,
                config=settings.optim,
            ),
            schedule=GraphNode(build_schedule, plan=plan, config=settings.optim),
            autocast=GraphNode(build_autocast, plan=plan, model=model, fp8=precision.fp8),
        )


def _settings_node(settings: Node, unused: Collection[str]) -> GraphNode:
    """Returns the node of `settings`' class. Unused keys get no leaf, but can be set."""
    arguments = {}
    tags = {}
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        key = settings.key(name)
        if isinstance(value, Node):
            arguments[name] = _settings_node(value, unused)
        elif full(key) not in unused:
            arguments[name] = value
            if key in TAGS:
                tags[name] = TAGS[key]
    node = GraphNode(type(settings), **arguments)
    # Fiddle's code generator fails on tags of leaves without a value.
    for name, tag in tags.items():
        fdl.add_tag(node, name, tag)
    return node


def build_plan(recipe: Recipe, custom_model: nn.Module | None = None) -> Plan:
    """Plans the recipe for this machine before memory is allocated.

    Raises:
        ConfigError: The recipe breaks rules, or does not run or fit here.
    """
    if custom_model is None:
        # The graph may have been edited since compose checked the recipe.
        recipe.check()
        planned = cut_if_smoke(recipe)
        reason = "a smoke run on these ranks"
    else:
        from fp8cfg.conversion import convert

        planned, custom_model = convert.to_build(recipe, custom_model)
        cut_if_smoke(planned, custom_model)
        reason = "the custom model"
    # The other builders read the graph's settings, which must be the planned ones.
    for key, (old, new) in differences(recipe, planned).items():
        raise ConfigError(
            f"{key}={shown(old)}: {reason} has {shown(new)}; set graph.recipe.{full(key)}, or call"
            " fp8cfg.lower again"
        )
    return plan_on_this_machine(planned, custom_model)


def build_model(plan: Plan, config: Model) -> PreparedModel:
    """Builds the model on its device, with its linear layers in FP8 as planned."""
    from fp8cfg.building.model import prepared_model

    _check_section("model.config", config, plan.recipe.model)
    return prepared_model(plan)


def build_loss_scaler(plan: Plan, precision: Precision) -> LossScaler | None:
    """Builds the loss scaler of fp16. Other dtypes need none."""
    # The node is always in the graph, so that an edit of the dtype brings a scaler or removes it.
    _check_section("loss_scaler.precision", precision, plan.recipe.precision)
    if precision.compute != "fp16":
        return None
    return LossScaler(
        loss_scale=precision.loss_scale,
        initial_loss_scale=precision.initial_loss_scale,
        min_loss_scale=precision.min_loss_scale,
        loss_scale_window=precision.loss_scale_window,
        hysteresis=precision.hysteresis,
    )


def build_optimizer(
    plan: Plan, model: PreparedModel, loss_scaler: LossScaler | None, config: Optim
) -> Optimizer:
    """Builds the optimizer of the model's parameters. It takes the float32 masters from `model`."""
    from fp8cfg.building import optimizer

    _check_section("optimizer.config", config, plan.recipe.optim)
    _check_plan("optimizer.plan", plan, model)
    trainer = plan.recipe.trainer
    return optimizer.optimizer(
        model,
        plan.precision,
        config,
        trainer.gradient_clip_val,
        plan.choice,
        loss_scaler,
        trainer.seed,
    )


def build_schedule(plan: Plan, config: Optim) -> Schedule:
    """Builds the learning-rate schedule."""
    _check_section("schedule.config", config, plan.recipe.optim)
    return make_schedule(plan.recipe)


def build_autocast(plan: Plan, model: PreparedModel, fp8: FP8) -> JobAutocast:
    """Builds `job.autocast`, which makes the contexts in which FP8 layers multiply in FP8."""
    _check_section("autocast.fp8", fp8, plan.recipe.fp8)
    _check_plan("autocast.plan", plan, model)
    return JobAutocast(model, plan.choice, plan.precision, plan.custom_model is not None)


def build_job(
    recipe: Recipe,
    plan: Plan,
    model: PreparedModel,
    loss_scaler: LossScaler | None,
    optimizer: Optimizer,
    schedule: Schedule,
    autocast: JobAutocast,
) -> Job:
    """Puts the parts together. Each was built once."""
    from fp8cfg.backends.any_model.conversion_state import mark, refuse_ddp
    from fp8cfg.building.model import planned_here

    _check_section("recipe", recipe, plan.recipe)
    _check_plan("plan", plan, model)
    _check_parts(plan, model, loss_scaler, optimizer, schedule, autocast)
    job = Job(
        recipe,
        model,
        optimizer,
        schedule,
        autocast,
        plan.gemms,
        plan.choice,
        loss_scaler,
        foreign=plan.custom_model is not None,
    )
    mark(
        model.model,
        recipe.fp8,
        planned_here(plan.gemms, model.model),
        plan.choice,
        own_optimizer=True,
        torch_autocast=autocast.torch_dtype,
    )
    refuse_ddp(model.model)
    return job


def _check_section(path: str, section: Section, planned: Section) -> None:
    """Raises ConfigError if an edit replaced the settings under one path only."""
    # Values, since pydantic copies a section into the recipe.
    if section != planned:
        raise ConfigError(
            f"graph.{path}: another {type(planned).__name__} than graph.recipe has; edit the keys"
            " of that shared node, or assign the new node under both paths"
        )


def _check_plan(path: str, plan: Plan, model: PreparedModel) -> None:
    """Raises ConfigError if `model` was built by another plan node."""
    if model.state is not plan.state:
        raise ConfigError(f"graph.{path}: another plan than graph.model has; share one node")


def _check_parts(
    plan: Plan,
    model: PreparedModel,
    loss_scaler: LossScaler | None,
    optimizer: Optimizer,
    schedule: Schedule,
    autocast: JobAutocast,
) -> None:
    """Raises ConfigError if an edit gave one part a second model, loss scaler or plan."""
    problems = []
    if autocast.prepared is not model:
        problems.append("graph.autocast.model: another model than graph.model; share one node")
    parameters = {id(parameter) for parameter in model.model.parameters()}
    for group in optimizer.param_groups:
        if not all(id(parameter) in parameters for parameter in group["params"]):
            problems.append("graph.optimizer.model: another model than graph.model; share one node")
    if optimizer.loss_scaler is not loss_scaler:
        problems.append("graph.optimizer.loss_scaler: another one than graph.loss_scaler; share it")
    if schedule != make_schedule(plan.recipe):
        problems.append("graph.schedule.plan: another plan than graph.plan; share one node")
    refuse_if(problems)


def construct(graph: fdl.Config[Any]) -> Any:
    """Builds `graph` as fdl.build does, also inside of another build and with one-line errors."""

    def build(value: Any, state: Any) -> Any:
        if not isinstance(value, fdl.Buildable):
            return state.map_children(value)
        arguments = {}
        for name, child in value.__arguments__.items():
            arguments[name] = state.call(child, daglish.Attr(name))
        return fdl.get_callable(value)(**arguments)

    return daglish.MemoizedTraversal.run(build, graph)


_EFFECTIVE: dict[str, Callable[[Recipe], bool]] = {
    "trainer.strategy.sequence_parallel": (
        lambda recipe: recipe.trainer.strategy.tensor_model_parallel_size > 1
    ),
    "trainer.strategy.pipeline_schedule": (
        lambda recipe: recipe.trainer.strategy.pipeline_model_parallel_size > 1
    ),
    "trainer.strategy.data_parallel_replicate_size": (
        lambda recipe: recipe.trainer.strategy.data_parallel_replicate_size > 1
    ),
    full("fp8.multi_head_attention"): lambda recipe: recipe.fp8.dot_product_attention,
    "log.resume": lambda recipe: recipe.log.folder is not None,
    "data.mixture": lambda recipe: bool(recipe.data.mixture),
    "checkpoint.every_minutes": lambda recipe: recipe.checkpoint.every_minutes > 0,
    "log.fp8_stats_every_n_steps": lambda recipe: recipe.log.fp8_stats_every_n_steps > 0,
}
"""When a key has an effect, for keys whose rules accept the default even without an effect."""


def unused_keys(recipe: Recipe) -> set[str]:
    """Returns the full names of keys without an effect in a checked recipe."""
    unused = set()
    # The rules reject such a key if it is written, even at its default.
    for violation in rules.broken(recipe, short_keys()):
        for key, default in violation.fixes[:1]:
            if attrgetter(key)(recipe) == default:
                unused.add(full(key))
    for key, field in fields().items():
        if field.default is None and attrgetter(key)(recipe) is None:
            unused.add(key)
    for key, is_effective in _EFFECTIVE.items():
        if not is_effective(recipe):
            unused.add(key)
    return unused


_MOVED = {"given": "plan.custom_model", "layout": "recipe.trainer.strategy"}
"""Nodes of earlier graphs that are no keys."""


def _unknown_name(function: Any, name: str) -> str:
    """Returns the line for a name that a node does not have, with the path of that name."""
    if isinstance(function, type) and issubclass(function, Node):
        # The recipe's short names, such as fp8, are properties of the class and no fields.
        if function is Recipe and full(name) != name:
            return f"recipe.{name}: no such node of the graph; write graph.recipe.{full(name)}"
        return unknown_key(function, name)
    # The builder of graph.schedule is build_schedule; build_job is the graph itself.
    node = function.__name__.replace("build_job", "graph").replace("build_", "graph.")
    place = f"{node}.{name}: no such name in the graph"
    if name in _MOVED:
        return f"{place}; write graph.{_MOVED[name]}"
    paths = []
    for key in fields():
        if name in (key.rpartition(".")[2], short(key)):
            paths.append(f"graph.recipe.{key}")
    if paths:
        return f"{place}; write {' or '.join(paths)}"
    names = fdl.Config(function).__signature_info__.parameters
    return f"{place}; it has {', '.join(names)}"
