"""trainer.smoke: every shipped recipe and preset cut to a size for any machine, and some of them trained, saved and resumed."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.composition.config_groups import Library
from fp8cfg.parallel.process_group import World
from fp8cfg.planning import smoke
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.layout import distinct_parts, layout_violations
from fp8cfg.planning.peak_memory import plan_memory
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.storage import resolve_state_dtypes
from fp8cfg.training.loop import Result
from fp8cfg.training.runs import ResumeDiffers
from fp8cfg.training.runs import resume_smoke as resume
from tests.support.every_recipe import every_recipe

LARGEST = 4 << 30
PRESETS = sorted(Library().choices("precision"))


@functools.cache
def composed(*words: str) -> Recipe:
    return fp8cfg.compose(list(words))


def cut(*words: str, ranks: int = 1) -> Recipe:
    recipe = composed(*words).model_copy(deep=True)
    recipe.trainer.smoke = True
    return smoke.cut_recipe(recipe, ranks)


@pytest.mark.parametrize(
    "words",
    [
        *every_recipe("precision=bf16_fp8"),
        *(("recipe=llama_8b", f"precision={name}") for name in PRESETS),
    ],
    ids=" ".join,
)
def test_every_recipe_and_preset_is_planned_in_four_gib_over_all_ranks(
    words: tuple[str, ...],
) -> None:
    small, eight = cut(*words), cut(*words, ranks=8)
    m, t = small.model, small.trainer
    assert (
        sum(plan_memory(small, "cpu").values())
        <= LARGEST
        >= 8
        * max(sum(plan_memory(eight, "cpu", part).values()) for part in distinct_parts(eight, 8))
    )
    assert not any(
        size % 16 for size in (m.hidden_size, m.ffn_hidden_size, m.vocab_size, m.seq_length)
    )
    assert (
        m.num_attention_heads % m.num_query_groups == 0
        and t.strategy.size == 1
        and t.max_steps == 3
    )
    meant, kept = composed(*words).trainer.strategy, eight.trainer.strategy
    tensor, stages = (
        math.gcd(meant.tensor_model_parallel_size, m.num_query_groups),
        math.gcd(meant.pipeline_model_parallel_size, 2),
    )
    context = math.gcd(meant.context_parallel_size, 8 // tensor // stages)
    assert (kept.tensor_model_parallel_size, kept.context_parallel_size, kept.size) == (
        tensor,
        context,
        tensor * context * stages,
    )
    assert kept.virtual_pipeline_model_parallel_size == (
        2 if meant.chunks > 1 and stages > 1 else None
    )
    assert eight.model.num_layers % (stages * kept.chunks) == 0
    assert kept.sequence_parallel == (
        meant.sequence_parallel and tensor > 1
    ) and not layout_violations(eight, 8)
    assert m.seq_length % (2 * context) == 0
    assert (
        t.global_batch_size % t.micro_batch_size
        == 0
        == eight.trainer.global_batch_size % (eight.trainer.micro_batch_size * 8 // kept.size)
    )
    assert smoke.cut_recipe(small, 1) == small and smoke.cut_recipe(eight, 8) == eight, (
        "what is cut is cut no further"
    )
    assert planned_coverage(small, plan_layers(small)).layers_in_fp8 >= 4 * small.fp8.enabled


@pytest.mark.parametrize("preset", PRESETS)
def test_a_layout_that_a_precision_does_not_have_is_cut_too(preset: str) -> None:
    small = cut(
        "recipe=llama_8b",
        f"precision={preset}",
        "trainer.strategy.tensor_model_parallel_size=2",
        ranks=4,
    )
    assert not layout_violations(small, 4)
    state = resolve_state_dtypes(small.precision)
    whole = state.low_bit and not state.can_be_split  # state in fewer bits
    assert small.trainer.strategy.tensor_model_parallel_size == (1 if whole else 2)


def test_adapters_stand_beside_whole_matrices() -> None:
    assert not layout_violations(cut("recipe=llama_405b", "task=lora", ranks=4), 4)


@pytest.mark.parametrize(
    ("words", "key", "new"),
    [
        (["fp8.high_precision_at_start=4", "fp8.high_precision_at_end=4"], "num_layers", 5),
        (["fp8.exclude=['layers.17.*','*.linear_fc2']"], "exclude", ("*.linear_fc2",)),
        (["fp8.min_coverage=0.9"], "min_coverage", 0.0),
        (["model.kv_channels=256"], "kv_channels", 128),
    ],
)
def test_what_a_small_model_has_not_is_cut_with_it(words: list[str], key: str, new: object) -> None:
    small = cut("recipe=llama_8b", "precision=bf16_fp8", *words)
    assert getattr(small.fp8 if key in ("exclude", "min_coverage") else small.model, key) == new
    assert planned_coverage(small, plan_layers(small)).layers_in_fp8 > 0


def test_a_global_batch_of_many_ranks_leaves_tokens_for_an_evaluation() -> None:
    small = cut("recipe=llama_405b", ranks=256)
    assert (
        small.trainer.global_batch_size * small.model.seq_length <= 10_000
        and small.model.seq_length % 16 == 0
    )


def test_sequences_of_an_odd_length_are_cut_to_whole_chunks_of_the_ranks_that_share_them() -> None:
    words = ("recipe=llama_tiny", "trainer.devices=2", "trainer.strategy.context_parallel_size=2")
    assert [
        cut(*words, f"model.seq_length={length}", ranks=2).model.seq_length
        for length in (8, 32, 44)
    ] == [16, 32, 32]


def test_without_the_key_nothing_is_cut() -> None:
    recipe = composed("recipe=llama_405b")
    assert smoke.cut_recipe(recipe, 1) is recipe and smoke.describe_cuts(recipe, recipe) == ""


class Run(NamedTuple):
    words: list[str]
    folder: Path
    out: str
    err: str


@pytest.fixture(
    scope="module",
    params=[
        "recipe=llama_405b precision=bf16_fp8_current",
        "recipe=llama_1b precision=fp16_fp8 storage.shard=zero2",
    ],
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A smoke run through the command line."""
    folder = tmp_path_factory.mktemp("smoke")
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([*request.param.split(), "trainer.smoke=true", "trainer.compile=off"]) == 0
    return Run(
        request.param.split(), next((folder / "runs").iterdir()), out.getvalue(), err.getvalue()
    )


def test_three_steps_an_evaluation_a_save_and_a_resume(run: Run) -> None:
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert [line["step"] for line in lines if "val_loss" in line] == [3]
    assert sorted(p.name for p in (run.folder / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert "resume: step 3 from step-00000002 gave the same losses" in run.out
    notes = [line for line in run.err.splitlines() if "trainer.smoke" in line]
    assert (
        len(notes) == 1
        and "model.num_layers " in notes[0]
        and "data.name stdlib -> tiny" in notes[0]
    )


def test_a_resume_with_another_loss_ends_with_exit_code_4(run: Run) -> None:
    recipe = fp8cfg.from_yaml(run.folder / "recipe.yaml")
    losses = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    loss = next(line["loss"] for line in losses if line["step"] == 3 and "loss" in line)
    val = next(line["val_loss"] for line in losses if "val_loss" in line)
    first = Result(3, loss, val)
    with pytest.raises(ResumeDiffers, match="a training loss of") as e:
        resume(recipe, run.folder, dataclasses.replace(first, loss=loss + 1e-6), World(), print)
    assert e.value.exit_code == 4


def test_a_smoke_run_is_resumed_as_any_run_is(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the size to which it was cut, and no other run becomes one; what started it goes on with it after that too."""
    folder = shutil.copytree(run.folder, tmp_path / "run")
    assert (
        main(["resume", str(folder), "trainer.max_steps=4"]) == 0
        and "done: 4 steps" in capsys.readouterr().out
    )
    assert not fp8cfg.from_yaml(folder / "recipe.yaml").trainer.smoke
    assert fp8cfg.resume(folder, ["trainer.max_steps=5"], say=lambda _: None).steps == 5
    assert main(["resume", str(folder), "trainer.smoke=true"]) == 2
    assert (
        capsys.readouterr().err
        == "error: trainer.smoke=true: the checkpoint of step 5 has trainer.smoke=false; start a new run\n"
    )
    again = ["trainer.smoke=true", "trainer.compile=off", f"log.folder={folder}", "log.resume=auto"]
    assert (
        main([*run.words, *again]) == 0 and "nothing left to do: 5 steps" in capsys.readouterr().out
    )
    assert main(
        [*run.words, *again, "model.num_layers=1"]
    ) == 2 and capsys.readouterr().err.endswith("start a new run\n")


def test_a_model_of_one_s_own_is_not_cut() -> None:
    import torch

    recipe = composed("recipe=llama_tiny", "precision=bf16_fp8").model_copy(deep=True)
    recipe.trainer.smoke = True
    with pytest.raises(
        fp8cfg.ConfigError, match=r"trainer\.smoke=true: reduces a recipe's Transformer"
    ):
        fp8cfg.build(recipe, model=torch.nn.Sequential(torch.nn.Linear(16, 16)))
