"""Fiddle graph of a recipe: every key with an effect is one leaf, and an edit changes the job and its recipe, or is rejected."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import fiddle as fdl
import pytest
import torch
from fiddle import diffing, selectors, tagging
from fiddle.codegen import codegen
from fiddle.experimental import serialization, yaml_serialization

import fp8cfg
from fp8cfg.building import graph as graph_nodes
from fp8cfg.building.graph_tags import FP8Layers, OptimizerState
from fp8cfg.composition.recipe_yaml import is_node
from fp8cfg.planning import graph_text
from fp8cfg.recipes import llama_8b
from fp8cfg.schema.keys import full
from fp8cfg.schema.presets import choices
from fp8cfg.schema.recipe import fields
from fp8cfg.schema.training import Optim
from tests.support.small import small, steps

FP8 = "precision=bf16_fp8"


def lines(graph: Any) -> list[str]:
    return graph_text.tree_text(graph).splitlines()


def set_path(graph: Any, path: str, value: Any) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        graph = getattr(graph, parent)
    setattr(graph, name, value)


def train(job: fp8cfg.Job) -> list[Any]:
    """Losses, parameters and state of a job after two steps, each tensor as its bytes."""
    losses = [step.loss for step in steps(job, 2)]
    state = [losses, dict(job.model.named_parameters()), job.state_dict()]
    scaler = job.loss_scaler.state() if job.loss_scaler else None
    return as_bytes([state, job.optimizer.state_dict(), scaler])


def as_bytes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        tensor = value.detach().contiguous().reshape(-1)
        return (value.dtype, value.shape, tensor.view(torch.uint8).numpy().tobytes())
    if isinstance(value, dict):
        return {name: as_bytes(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_bytes(item) for item in value]
    return value


def module(code: str, folder: Path) -> ModuleType:
    """What `code` defines, run from a file as auto_config wants."""
    (folder / "written.py").write_text(code)
    spec = importlib.util.spec_from_file_location("written", folder / "written.py")
    assert spec and spec.loader
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def recipe() -> fp8cfg.Recipe:
    made = llama_8b()
    made.precision = "bf16_fp8"
    return made


@pytest.fixture(scope="module")
def graph(recipe: fp8cfg.Recipe) -> Any:
    return fp8cfg.lower(recipe)


def test_every_leaf_is_a_key_and_every_key_a_name_of_a_node(graph: Any) -> None:
    leaves = {
        path.removeprefix("recipe."): value for path, value in graph_text.leaf_values(graph).items()
    }
    values = {path for path, value in leaves.items() if not isinstance(value, graph_text.Reference)}
    keys = {key for key in fields() if not is_node(key)}
    assert values == keys - graph_nodes.unused_keys(small_8b()) and values < keys
    for key in keys - values:
        set_path(fp8cfg.lower(small_8b()), f"recipe.{key}", None)


def small_8b() -> fp8cfg.Recipe:
    return fp8cfg.compose([FP8], base=llama_8b())


def test_the_tree_prints_each_leaf_and_each_shared_node_once(graph: Any) -> None:
    shown = lines(graph)
    assert len(shown) <= 120 and max(map(len, shown)) <= 100
    assert len({line.partition(" = ")[0] for line in shown}) == len(shown)
    assert "recipe.trainer.plugins.fp8.margin = 0" in shown and "recipe.optim.lr = 0.0003" in shown
    assert [line for line in shown if " -> " in line] == [
        "plan.recipe -> recipe",
        "model.plan -> plan",
        "model.config -> recipe.model",
        "loss_scaler.plan -> plan",
        "loss_scaler.precision -> recipe.trainer.plugins",
        "optimizer.plan -> plan",
        "optimizer.model -> model",
        "optimizer.loss_scaler -> loss_scaler",
        "optimizer.config -> recipe.optim",
        "schedule.plan -> plan",
        "schedule.config -> recipe.optim",
        "autocast.plan -> plan",
        "autocast.model -> model",
        "autocast.fp8 -> recipe.trainer.plugins.fp8",
    ]
    # Of other scalings, of fp16, of SGD.
    unused = (".granularity", "stochastic_rounding", "hysteresis", "momentum")
    assert not [line for line in shown if line.partition(" = ")[0].endswith(unused)]
    without_fp8 = lines(fp8cfg.lower(llama_8b()))
    assert not [line for line in without_fp8 if "fp8.scaling" in line]


def test_leaves_are_plain_values(graph: Any) -> None:
    for value in graph_text.leaf_values(graph).values():
        assert value is None or isinstance(value, str | int | float | bool | tuple), value


@pytest.mark.parametrize("preset", choices())
def test_every_preset_comes_back_from_its_graph_and_from_json(preset: str) -> None:
    recipe = fp8cfg.compose([f"precision={preset}", "model.num_layers=32"])
    graph = fp8cfg.lower(
        recipe, choice=None if recipe.backend == "auto" else _named(recipe.backend)
    )
    reloaded = serialization.load_json(serialization.dump_json(graph))
    assert reloaded == graph and reloaded.optimizer.model is reloaded.model
    assert graph_nodes.construct(reloaded.recipe) == recipe
    graph_nodes.construct(reloaded.recipe).check()


def _named(backend: str) -> Any:
    from fp8cfg.backends.choice import Choice

    return Choice(backend, "scaled_mm", "asked for")


@pytest.mark.parametrize(
    "words",
    [(FP8,), ("precision=fp16_fp8",), (FP8, "opt_level=O2"), (FP8, "lora.enabled=true")],
)
def test_a_graph_builds_the_job_that_is_wired_by_hand_bit_for_bit(words: tuple[str, ...]) -> None:
    recipe = small(*words)
    job = fdl.build(serialization.load_json(serialization.dump_json(fp8cfg.lower(recipe))))
    assert job.recipe == recipe
    assert train(job) == train(wired_by_hand(recipe))


def wired_by_hand(recipe: fp8cfg.Recipe) -> fp8cfg.Job:
    """The job of `recipe`, without a graph."""
    from fp8cfg.building import graph, optimizer
    from fp8cfg.building.job import JobAutocast
    from fp8cfg.building.model import prepare_model
    from fp8cfg.optim.lr_schedule import Schedule
    from fp8cfg.planning.job_plan import plan_on_this_machine

    plan = plan_on_this_machine(recipe)
    model = prepare_model(plan)
    scaler = graph.build_loss_scaler(plan, recipe.precision)
    clip, seed = recipe.trainer.gradient_clip_val, recipe.trainer.seed
    adam = optimizer.make_optimizer(
        model, plan.precision, recipe.optim, clip, plan.choice, scaler, seed
    )
    autocast = JobAutocast(model, plan.choice, plan.precision, custom_model=False)
    return graph.build_job(
        recipe, plan, model, scaler, adam, Schedule.from_recipe(recipe), autocast
    )


def test_a_build_makes_one_plan_and_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.building import model

    calls = []
    for module, name in ((graph_nodes, "plan_on_this_machine"), (model, "prepare_model")):
        function = getattr(module, name)

        def count(*args: Any, function: Any = function, name: str = name) -> Any:
            calls.append(name)
            return function(*args)

        monkeypatch.setattr(module, name, count)
    job = fdl.build(fp8cfg.lower(small(FP8)))
    assert calls == ["plan_on_this_machine", "prepare_model"]
    parameters = {id(parameter) for parameter in job.model.parameters()}
    assert {id(p) for group in job.optimizer.param_groups for p in group["params"]} == parameters


def test_yaml_of_fiddle_is_written(graph: Any) -> None:
    assert "margin: 0" in yaml_serialization.dump_yaml(graph)


@pytest.mark.parametrize(
    "word",
    [
        "fp8.margin=3",
        "optim.lr=.5",
        "model.num_layers=16",
        "fp8.exclude=['*.linear_fc2']",
        "storage.exp_avg=bf16",
        "trainer.seed=7",
        "trainer.strategy.context_parallel_size=4",
        "fp8.use_autocast_during_eval=true",
        "log.dir=elsewhere",
        "fp8.output_layer=true",
    ],
)
def test_a_key_is_one_leaf_of_a_diff(word: str, recipe: fp8cfg.Recipe, graph: Any) -> None:
    other = fp8cfg.lower(fp8cfg.compose([word], base=recipe))
    (change,) = diffing.build_diff(graph, other).changes
    key = full(word.partition("=")[0])
    assert change.target[-1].name == key.rpartition(".")[2]


def test_the_diff_against_mxfp8_is_what_differs(graph: Any) -> None:
    """As Fiddle has it, and as `fp8cfg diff --tree` prints it (tests/cli/test_diff.py)."""
    other = llama_8b()
    other.precision = "bf16_mxfp8"
    other_graph = fp8cfg.lower(other)
    names = {change.target[-1].name for change in diffing.build_diff(graph, other_graph).changes}
    mine, theirs = graph_text.leaf_values(graph), graph_text.leaf_values(other_graph)
    paths = {path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)}
    assert names == {path.rpartition(".")[2] for path in paths}
    assert len(paths) == 9 and "recipe.trainer.plugins.fp8.scaling" in paths


def test_the_code_of_a_graph_is_read_as_blocks_of_nodes(graph: Any) -> None:
    """A node that does not fit into a line is a block of its own, indented under its parent."""
    written = graph_text.code_text(graph).splitlines()
    assert len(written) < 120 and max(map(len, written)) <= 100
    assert "    optim = graph_nodes.GraphNode(training.Optim," in written
    assert (
        "        name='adamw', lr=0.0003, betas=(0.9, 0.95), eps=1e-05, weight_decay=0.1,"
        in written
    )
    nodes = [line.count("GraphNode(") for line in written]
    assert sum(nodes) == 15 + 7 and max(nodes) == 1, "settings and builders"


def test_code_of_long_values_makes_the_graph_again() -> None:
    recipe = fp8cfg.compose(
        [
            "precision=fp16_fp8",
            "model.num_layers=16",
            "data=text",
            "data.path=x",
            "log.dir=" + 40 * "word/",
        ]
    )
    recipe.fp8.exclude = [f"layers.{n}.self_attention.*" for n in range(16)]
    recipe.data.path = "fdl.Config(job, 'x' , (" * 8
    made: dict[str, Any] = {}
    written = graph_text.code_text(graph := fp8cfg.lower(recipe))
    exec(written, made)
    assert made["graph"]() == graph
    assert [len(line) > 100 for line in written.splitlines()].count(True) == 2, (
        "the two paths, which are longer themselves"
    )


def test_graphs_differ_in_a_leaf_a_reference_or_a_function() -> None:
    graph = fp8cfg.lower(small(FP8))
    for edit in (set_optim_alone, add_second_model):
        other = fp8cfg.lower(small(FP8))
        assert graph == other
        edit(other)
        assert graph != other
    autocast = fdl.ordered_arguments(graph.autocast)
    same_arguments = fdl.Config(lambda plan, model, fp8: None, **autocast)
    assert same_arguments != graph.autocast


def test_lower_copies() -> None:
    recipe = small(FP8)
    graph = fp8cfg.lower(recipe)
    graph.autocast.fp8.margin = 3
    graph.model.config.num_layers = 1
    assert recipe == small(FP8)


@pytest.mark.parametrize(
    ("words", "path", "value", "word"),
    [
        ((FP8,), "optimizer.config.lr", 1e-4, "optim.lr=1e-4"),
        ((FP8,), "schedule.config.warmup_steps", 0, "optim.warmup_steps=0"),
        ((FP8,), "model.config.num_layers", 1, "model.num_layers=1"),
        ((FP8,), "autocast.fp8.margin", 3, "fp8.margin=3"),
        (("precision=bf16",), "recipe.trainer.seed", 5, "trainer.seed=5"),
        (("precision=bf16",), "loss_scaler.precision.compute", "fp16", "precision.compute=fp16"),
    ],
)
def test_an_edit_builds_the_job_of_the_changed_recipe(
    words: tuple[str, ...], path: str, value: Any, word: str
) -> None:
    graph = fp8cfg.lower(small(*words))
    set_path(graph, path, value)
    job = fdl.build(graph)
    recipe = fp8cfg.compose([word], base=small(*words))
    assert job.recipe == recipe
    assert train(job) == train(fp8cfg.build(recipe))


def set_optim_alone(graph: Any) -> None:
    graph.optimizer.config = fdl.Config(Optim, lr=1e-4)


def add_second_model(graph: Any) -> None:
    config = graph.model.config
    graph.optimizer.model = fdl.Config(graph_nodes.build_model, plan=graph.plan, config=config)


def add_second_plan(graph: Any) -> None:
    graph.schedule.plan = fdl.Config(graph_nodes.build_plan, recipe=fdl.Config(small, "optim.lr=1"))
    graph.schedule.config = fdl.Config(lambda: small("optim.lr=1").optim)


def add_second_loss_scaler(graph: Any) -> None:
    precision = graph.recipe.trainer.plugins
    precision.compute = "fp16"
    graph.loss_scaler = fdl.Config(
        graph_nodes.build_loss_scaler, plan=graph.plan, precision=precision
    )


def ask_for_a_smoke_run(graph: Any) -> None:
    graph.recipe.trainer.smoke = True


def set_a_model_with_other_layers(graph: Any) -> None:
    graph.plan.custom_model = fdl.Config(custom_blocks)


def custom_blocks() -> torch.nn.Module:
    blocks = [torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(5)]
    return torch.nn.Sequential(torch.nn.ModuleList(blocks))


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        (set_optim_alone, r"graph\.optimizer\.config: another Optim than graph\.recipe has; edit"),
        (add_second_model, r"graph\.optimizer\.model: another model than graph\.model; share one"),
        (add_second_plan, r"graph\.schedule\.plan: another plan than graph\.plan; share one node"),
        (add_second_loss_scaler, r"graph\.optimizer\.loss_scaler: another one than graph\.loss_sc"),
        (ask_for_a_smoke_run, r"=.*: a smoke run on these ranks has .*; set graph\.recipe\."),
        (
            set_a_model_with_other_layers,
            r"model\.num_layers=2: the custom model has 5; set graph\.recipe\.model\.num_layers, or",
        ),
    ],
)
def test_an_edit_of_the_wiring_is_rejected(edit: Callable[[Any], None], line: str) -> None:
    graph = fp8cfg.lower(small(FP8))
    edit(graph)
    with pytest.raises(fp8cfg.ConfigError) as error:
        fdl.build(graph)
    assert len(error.value.problems) == 1
    assert re.search(line, error.value.problems[0])


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("optimizer.config.lr", -1.0, r"optim\.lr=-1\.0: must be more than 0"),
        ("optimizer.config.lr", "abc", r"optim\.lr=abc: expected a number, got str"),
        (
            "autocast.fp8.granularity",
            "row",
            r"fp8\.granularity=row: has no effect with fp8\.scaling=delayed",
        ),
        ("model.config.num_layers", 0, r"model\.num_layers=0: must be at least 1"),
    ],
)
def test_an_edit_that_breaks_a_rule_is_rejected(path: str, value: Any, line: str) -> None:
    graph = fp8cfg.lower(small(FP8))
    set_path(graph, path, value)
    with pytest.raises(fp8cfg.ConfigError, match=line) as error:
        fdl.build(graph)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (
            "schedule.lr",
            "graph.schedule.lr: no such name in the graph; write graph.recipe.optim.lr",
        ),
        (
            "schedule.max_lr",
            "graph.schedule.max_lr: no such name in the graph; it has plan, config",
        ),
        (
            "precision.fp8.linear.scaling.margin",
            "graph.precision: no such name in the graph; write graph.recipe.trainer.plugins",
        ),
        (
            "autocast.margin",
            "graph.autocast.margin: no such name in the graph; write"
            " graph.recipe.trainer.plugins.fp8.margin",
        ),
        (
            "recipe.fp8.margin",
            "recipe.fp8: no such node of the graph; write graph.recipe.trainer.plugins.fp8",
        ),
        ("autocast.fp8.margn", "fp8.margn: no such key; did you mean 'fp8.margin'?"),
        (
            "layout.devices",
            "graph.layout: no such name in the graph; write graph.recipe.trainer.strategy",
        ),
        ("given", "graph.given: no such name in the graph; write graph.plan.custom_model"),
    ],
)
def test_a_wrong_name_is_rejected_with_the_path_of_that_name(path: str, line: str) -> None:
    with pytest.raises(AttributeError) as error:
        set_path(fp8cfg.lower(small(FP8)), path, 1)
    assert isinstance(error.value, fp8cfg.ConfigError) and str(error.value) == line


def test_selections_and_tags_set_a_value_on_all_of_a_kind() -> None:
    graph = fp8cfg.lower(small("precision=bf16_fp8", "fp8.params=false"))
    assert tagging.list_tags(graph) == {FP8Layers, OptimizerState}
    fdl.set_tagged(graph, tag=OptimizerState, value="bf16")
    selectors.select(graph, fp8cfg.FP8).set(margin=2, amax_history_len=8)
    selectors.select(graph, tag=FP8Layers).replace(True)
    graph.autocast.fp8.multi_head_attention = False
    recipe = fdl.build(graph).recipe
    assert (recipe.storage.master_weight, recipe.storage.exp_avg, recipe.storage.exp_avg_sq) == (
        "bf16",
        "bf16",
        "bf16",
    )
    assert (recipe.fp8.margin, recipe.fp8.amax_history_len) == (2, 8)
    assert recipe.fp8.output_layer and recipe.fp8.dot_product_attention


@pytest.mark.parametrize(
    "words", [(FP8,), ("precision=fp16_fp8",), ("precision=fp32",), ("precision=bf16_mxfp8",)]
)
def test_the_code_that_fiddle_writes_builds_an_equal_job(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    recipe = small(*words)
    graph = fp8cfg.lower(recipe)
    written = {
        "config_fixture": codegen.new_codegen(graph),
        "build_config": "\n".join(codegen.codegen_dot_syntax(graph).lines()),
    }
    for name, code in written.items():
        made = getattr(module(code, tmp_path), name)()
        assert made == graph
        job = fdl.build(made)
        assert job.recipe == recipe
    mine = fp8cfg.build(recipe)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            job.model.state_dict().values(), mine.model.state_dict().values(), strict=True
        )
    )


def test_auto_config_code_makes_the_same_graph(graph: Any, tmp_path: Path) -> None:
    assert (
        module(codegen.auto_config_codegen(graph), tmp_path).config_fixture.as_buildable() == graph
    )


@pytest.mark.filterwarnings("default")  # what it imports warns
@pytest.mark.skipif(not importlib.util.find_spec("nemo_run"), reason="nemo_run is not installed")
def test_nemo_runs_serializer_takes_it(graph: Any) -> None:
    """What its executors send. Its YAML reader takes 'none' for null, and so other values than were written."""
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    sent = ZlibJSONSerializer()
    assert sent.deserialize(sent.serialize(graph)) == graph


def test_build_works_inside_another_build() -> None:
    job = fdl.build(fdl.Config(fp8cfg.build, recipe=fdl.Config(small, FP8)))
    assert job.recipe == small(FP8)


def test_a_custom_model_is_a_leaf_or_a_node() -> None:
    graph = fp8cfg.lower(small(FP8))
    graph.plan.custom_model = fdl.Config(torch.nn.Linear, 32, 32)
    job = fdl.build(graph)
    assert job.foreign and [p.in_features for p in job.plan] == [32]
