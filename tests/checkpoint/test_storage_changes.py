"""Resumed runs with other words: stored state that stays as it was, and what may change."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.checkpoint import job_state, resume_rules
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.small import small, steps
from tests.support.storage_rows import FP8, OWN, after, words


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        (f"{FP8}", "opt_level=O2", "opt_level=O2: this run has opt_level=null; start a new run"),
        (
            f"{FP8} opt_level=O2",
            "storage.exp_avg=fp8_pow2",
            "storage.exp_avg=fp8_pow2: this run has storage.exp_avg=auto; start a new run",
        ),
        (
            f"{FP8} opt_level=O2",
            "opt_level=O1",
            "opt_level=O1: this run has opt_level=O2; start a new run",
        ),
        (
            f"{FP8} opt_level=O2",
            "opt_level=O3",
            "opt_level=O3: this run has opt_level=O2; start a new run",
        ),
        (
            f"{FP8} opt_level=O3",
            "fp8.exclude=['*linear_fc2']",
            "fp8.exclude=['*linear_fc2']: this run has fp8.exclude=[]; start a new run",
        ),
    ],
)
def test_a_resumed_run_keeps_the_state_it_has(before: str, now: str, line: str) -> None:
    recipe = small(*before.split())
    with pytest.raises(fp8cfg.ConfigError) as e:
        resume_rules.refuse_changes(recipe, fp8cfg.compose([now], base=recipe), [])
    assert e.value.problems == [line]
    if "new run" in line:
        with pytest.raises(fp8cfg.ConfigError, match="start a new run"):
            resume_rules.refuse_changes(
                recipe, fp8cfg.compose([now], base=recipe), [now.partition("=")[0]]
            )


@pytest.mark.parametrize(
    ("before", "now", "key"),
    [
        (f"{FP8} opt_level=O2", "fp8.exclude=['*linear_fc2']", "fp8.exclude"),
        (f"{FP8} opt_level=O3", "fp8.margin=1", "fp8.margin"),
        (f"{FP8} opt_level=O3", "fp8.scaling=current", "fp8.scaling"),
        (f"{FP8} opt_level=O1", "storage.rounding=stochastic", "storage.rounding"),
        ("precision=bf16 storage.weight=fp8", "storage.weight=bf16", "storage.weight"),
        ("precision=bf16", "storage.weight=fp8", "storage.weight"),
        (f"{FP8} {OWN} opt_level=O2", "storage.weight_grad=fp32", "storage.weight_grad"),
        (f"{FP8} storage.exp_avg=bf16", "fp8.params=false", "fp8.params"),
        (f"{FP8} precision.compute=fp32", "fp8.params=false", "fp8.params"),
        (f"{FP8} precision.compute=fp32", "fp8.exclude=['*linear_fc2']", "fp8.exclude"),
        ("precision=bf16 storage.weight=fp32", "storage.weight=bf16", "storage.weight"),
        (
            f"{FP8} opt_level=O3 model.share_embeddings_and_output_weights=true",
            "fp8.output_layer=true",
            "fp8.output_layer",
        ),
    ],
)
def test_an_allowed_change_then_fits(before: str, now: str, key: str) -> None:
    recipe = small(*before.split(), "optim.lr=1e-3")
    other = fp8cfg.compose([now], base=recipe)
    with pytest.raises(fp8cfg.ConfigError, match=f"to change it, add --allow {key}"):
        resume_rules.refuse_changes(recipe, other, [])
    resume_rules.refuse_changes(recipe, other, [key])
    job, changed = fp8cfg.build(recipe), fp8cfg.build(other)
    list(steps(job, 3))
    tensors, state = whole_checkpoints.collect(job, run_data(recipe)[0], 3)
    job_state.restore(changed, tensors, state, run_data(recipe)[0])
    assert [s.loss for s in steps(changed, 2, first=3)] == pytest.approx(
        [s.loss for s in steps(job, 2, first=3)], abs=5e-3
    )


def test_other_codecs_in_a_checkpoint_are_one_line() -> None:
    _, tensors, state = after("O2, delayed", 1)
    job = fp8cfg.build(small(*words("O2, powers of two")))
    with pytest.raises(fp8cfg.ConfigError) as e:
        job_state.restore(job, tensors, state, run_data(job.recipe)[0])
    assert e.value.problems == [
        "the checkpoint does not fit this recipe: optimizer state: embedding.weight is stored as exp_avg e4m3 exact, exp_avg_sq fp16 pow2, "
        "expected exp_avg e4m3 pow2, exp_avg_sq fp16 pow2"
    ]


def test_time_limits_may_change_for_they_change_no_number() -> None:
    recipe = small()
    longer = fp8cfg.compose(["trainer.timeout.step=300", "trainer.timeout.start=900"], base=recipe)
    assert resume_rules.changes(recipe, longer) == ["trainer.timeout.start", "trainer.timeout.step"]
    resume_rules.refuse_changes(recipe, longer, [])
