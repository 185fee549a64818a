"""Compiled runs: the numbers of eager ones without recompiling, and when a run compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import runs
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate, validation_batches
from tests.support import whole_checkpoints
from tests.support.small import PACKED, small, steps
from tests.support.traced import trace_model

FP8 = "precision=bf16_fp8"


@pytest.mark.parametrize(
    ("words", "compiles"),
    [
        (("precision=bf16",), trace_model),
        ((FP8, "model.num_layers=1"), Job.compile_model),
        ((FP8, "fp8.params=false"), trace_model),
        (("precision=bf16_fp8_current", "model.num_layers=4"), trace_model),
        (("precision=bf16", "model.num_layers=1", *PACKED), trace_model),
        pytest.param(
            ("precision=bf16", "model.num_layers=1", *PACKED),
            Job.compile_model,
            marks=pytest.mark.slow,
        ),
    ],
    ids=[
        "bf16",
        "delayed under Inductor",
        "wide weights",
        "current",
        "packed and masked",
        "packed under Inductor",
    ],
)
def test_compiled_runs_follow_eager_ones_without_recompiling(
    words: tuple[str, ...], compiles: Callable[[Job], None]
) -> None:
    eager, compiled = (fp8cfg.build(small(*words, "trainer.micro_batch_size=4")) for _ in range(2))
    compiles(compiled)
    assert compiled.compiled and not eager.compiled
    want = [s.loss for s in steps(eager, 4)]
    got = [s.loss for s in steps(compiled, 2)]
    with torch._dynamo.config.patch(error_on_recompile=True):
        _, held_out = run_data(compiled.recipe)
        evaluate(
            compiled,
            validation_batches(compiled.recipe, held_out, World()),
            World(),
            masked=held_out.masked,
        )
        got += [s.loss for s in steps(compiled, 2, first=2)]
    assert got == pytest.approx(want, rel=2e-3)


@pytest.mark.slow
def test_fit_compiles_where_the_recipe_says_so() -> None:
    for word, compiled in (("on", True), ("off", False)):
        job, said = (
            fp8cfg.build(
                small(FP8, "trainer.compile=" + word, "trainer.max_steps=2", "model.num_layers=1")
            ),
            [],
        )
        runs.train_job(job, say=said.append)
        assert job.compiled == compiled and any("compiling" in text for text in said) == compiled
        compared = [
            text
            for text in said
            if "compiled gradients of the first microbatch match the eager ones (" in text
        ]
        assert len(compared) == compiled


def test_when_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.planning.layer_plan import plan_layers
    from fp8cfg.recipes import llama_8b
    from fp8cfg.training.compile import compiles

    def decision(recipe: fp8cfg.Recipe) -> bool:
        return compiles(recipe, plan_layers(recipe), "cpu")

    assert decision(small("trainer.compile=on")) and not decision(small("trainer.compile=off"))
    assert not decision(small()) and decision(llama_8b())
    monkeypatch.setenv(variable := "TORCH_COMPILE_DISABLE", "1")
    assert not decision(llama_8b())
    with pytest.raises(
        ConfigError,
        match=rf"^{variable}=1: .*disables torch.compile; unset it, or set trainer.compile=off$",
    ):
        decision(small("trainer.compile=on"))


def test_the_compiler_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.planning.layer_plan import plan_layers
    from fp8cfg.training.compile import compiles

    monkeypatch.setenv("CXX", "/nope")
    recipe = small("trainer.compile=on")
    with pytest.raises(
        ConfigError,
        match=r"^trainer.compile=on: no C\+\+ compiler \(/nope\) here; set it to off, or unset CXX$",
    ):
        compiles(recipe, plan_layers(recipe), "cpu")


def test_a_run_that_was_compiled_does_not_go_on_where_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fp8cfg.training.compile import compile_as_chosen

    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    job = fp8cfg.build(small(FP8))
    batches, _ = run_data(job.recipe)
    before = {"recipe": {"trainer": {"compile": "auto"}}, "compiled": True}
    with pytest.raises(ConfigError, match=r"^TORCHDYNAMO_DISABLE=1: "):
        compile_as_chosen(job, before, batches, 0, World(), say=lambda line: pytest.fail(line))
    assert not job.compiled


@pytest.mark.slow
def test_a_resumed_run_compiles_as_before_unless_the_key_changed() -> None:
    recipe = small("trainer.max_steps=2")
    job = fp8cfg.build(recipe)
    list(steps(job, 1))

    tensors, state = whole_checkpoints.collect(job, run_data(recipe)[0], 1)
    for word, compiled in (("auto", False), ("on", True)):
        again = fp8cfg.build(fp8cfg.compose([f"trainer.compile={word}"], base=recipe))
        runs.train_job(again, start_from=(tensors, state), say=lambda _: None)
        assert again.compiled == compiled
