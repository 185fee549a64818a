"""Fiddle graph of a recipe: every key that acts once, values alone, and what is changed in it is what the job's recipe says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import fiddle as fdl
import pytest
import torch
from fiddle import diffing, printing, selectors, tagging
from fiddle.codegen import codegen
from fiddle.experimental import serialization, yaml_serialization

import fp8cfg
from fp8cfg.building import graph as graph_nodes
from fp8cfg.building.graph import Part
from fp8cfg.building.graph_tags import FP8Layers, OptimizerState
from fp8cfg.composition.recipe_yaml import flat, is_node
from fp8cfg.planning import graph_text
from fp8cfg.recipes import llama_8b
from fp8cfg.schema.keys import full, short
from fp8cfg.schema.presets import choices
from fp8cfg.schema.recipe import fields
from tests.support.small import small

FP8 = "precision=bf16_fp8"


def changed(make: Any, *words: str) -> Any:
    return fp8cfg.lower(fp8cfg.compose(list(words), base=make()))


def lines(graph: Any) -> list[str]:
    return printing.as_str_flattened(graph, include_types=False, raw_value_repr=True).splitlines()


def parts(cls: type[Part] = graph_nodes.Root) -> list[type[Part]]:
    return [cls, *(below for node in cls.nodes.values() for below in parts(node))]


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


def test_every_key_of_the_schema_is_a_leaf_of_one_node() -> None:
    keys = [key for part in parts() for key in part.keys.values()]
    assert sorted(keys) == sorted(key for key in fields() if not is_node(key))
    assert set(parts()) == {graph_nodes.Root, *Part.__subclasses__()}


def test_as_str_flattened_prints_each_acting_key_once_in_a_hundred_lines(graph: Any) -> None:
    shown = lines(graph)
    assert len(shown) <= 100 and max(map(len, shown)) <= 100
    assert len({line.partition(" = ")[0] for line in shown}) == len(shown)
    assert "precision.fp8.linear.scaling.margin = 0" in shown and "schedule.lr = 0.0003" in shown
    idle = (
        ".granularity",
        "stochastic_rounding",
        "hysteresis",
        "momentum",
    )  # of other scalings, of fp16, of SGD
    assert not [line for line in shown if line.partition(" = ")[0].endswith(idle)]
    assert not [
        line
        for line in lines(fp8cfg.lower(llama_8b()))
        if ".scaling" in line.replace("rope_scaling", "")
    ], "no FP8"


def test_leaves_are_plain_values(graph: Any) -> None:
    for value in printing.as_dict_flattened(graph).values():
        assert value is None or type(value) in (str, int, float, bool, tuple), value


@pytest.mark.parametrize("preset", choices())
def test_every_preset_comes_back_from_its_graph_and_from_json(preset: str) -> None:
    recipe = fp8cfg.compose([f"precision={preset}", "model.num_layers=32"])
    graph = fp8cfg.lower(
        recipe, choice=None if recipe.backend == "auto" else _named(recipe.backend)
    )
    text = serialization.dump_json(graph)
    assert serialization.load_json(text) == graph
    built = graph_nodes.built(serialization.load_json(text).precision)
    assert {short(k): v for k, v in built.settings.items()}.items() <= {
        short(k): v for k, v in flat(recipe).items()
    }.items()
    parts = {name: graph_nodes.built(node) for name, node in graph.__arguments__.items()}
    assert graph_nodes.recipe_of(parts) == recipe


def _named(backend: str) -> Any:
    from fp8cfg.backends.choice import Choice

    return Choice(backend, "scaled_mm", "asked for")


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
    changes = diffing.build_diff(graph, other_graph).changes
    paths = {".".join(attr.name for attr in change.target) for change in changes}
    mine, theirs = graph_text.leaf_values(graph), graph_text.leaf_values(other_graph)
    assert paths == {
        path for path in mine.keys() | theirs.keys() if mine.get(path) != theirs.get(path)
    }
    assert len(paths) == 9 and "precision.fp8.linear.scaling.scaling" in paths


def test_the_code_of_a_graph_is_read_as_blocks_of_nodes(graph: Any) -> None:
    """A node that does not fit into a line is a block of its own, indented under the node that has it."""
    written = graph_text.code_text(graph).splitlines()
    assert len(written) < 100 and max(map(len, written)) <= 100
    assert "        schedule=fdl.Config(graph_nodes.Schedule," in written
    assert (
        "            lr=0.0003, lr_decay_style='cosine', warmup_steps=2000, constant_steps=0,"
        in written
    )
    nodes = sum(line.count("fdl.Config(") for line in written)
    assert nodes == len(parts()) - 1 and all(line.count("fdl.Config(") <= 1 for line in written), (
        "no loss scaler under bf16, the job's own"
    )


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


def test_lower_copies() -> None:
    recipe = small(FP8)
    graph = fp8cfg.lower(recipe)
    graph.precision.fp8.linear.scaling.margin = 3
    graph.model.num_layers = 1
    assert recipe == small(FP8)


def test_what_is_edited_is_what_the_job_and_its_recipe_have() -> None:
    graph = fp8cfg.lower(small(FP8))
    graph.schedule.lr = 0.5
    graph.precision.fp8.linear.scaling.margin = 3
    job = fdl.build(graph)
    assert isinstance(job, fp8cfg.Job) and job.schedule.lr_at(2) == 0.5
    assert job.recipe == fp8cfg.compose(["optim.lr=0.5", "fp8.margin=3"], base=small(FP8))
    from fp8cfg.numerics import fp8_linears

    assert {layer.scaling.margin for layer in fp8_linears(job.model)} == {3}


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (
            "schedule.max_lr",
            0.5,
            r"Schedule\.max_lr: no such leaf of the graph; Schedule has lr \(optim\.lr\), min_lr",
        ),
        (
            "schedule.margin",
            3,
            r"Schedule\.margin: no such leaf of the graph; fp8\.margin is Scaling\.margin",
        ),
        (
            "precision.fp8.linear.scaling.margn",
            3,
            r"Scaling\.margn: no such leaf of the graph; did you mean 'margin'\?",
        ),
        ("schedule.lr", -1.0, r"optim\.lr=-1\.0: must be more than 0"),
        (
            "precision.fp8.linear.scaling.granularity",
            "row",
            r"fp8\.granularity=row: has no effect under fp8\.scaling=delayed",
        ),
        (
            "optimizer",
            fdl.Config(torch.nn.Linear, 2, 2),
            r"optimizer=Linear: needs a node graph_nodes\.Optimizer, which has name \(optim\.name\)",
        ),
        ("model.num_layers", 0, r"model\.num_layers=0: must be at least 1"),
    ],
)
def test_what_no_key_says_is_refused(path: str, value: Any, line: str) -> None:
    graph = fp8cfg.lower(small(FP8))
    *above, leaf = path.split(".")
    node = graph
    for name in above:
        node = getattr(node, name)
    setattr(node, leaf, value)
    with pytest.raises(fp8cfg.ConfigError, match=line) as e:
        fdl.build(graph)
    assert len(e.value.problems) == 1


def test_selections_and_tags_set_a_value_on_all_of_a_kind() -> None:
    graph = fp8cfg.lower(small("precision=bf16_fp8", "fp8.params=false"))
    assert tagging.list_tags(graph) == {FP8Layers, OptimizerState}
    fdl.set_tagged(graph, tag=OptimizerState, value="bf16")
    selectors.select(graph, graph_nodes.Scaling).set(margin=2, amax_history_len=8)
    selectors.select(graph, tag=FP8Layers).replace(True)
    graph.precision.fp8.attention.multi_head_attention = False
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


def test_a_model_of_ones_own_is_a_leaf_or_a_node() -> None:
    graph = fp8cfg.lower(small(FP8))
    graph.given = fdl.Config(torch.nn.Linear, 32, 32)
    job = fdl.build(graph)
    assert job.foreign and [p.in_features for p in job.plan] == [32]
