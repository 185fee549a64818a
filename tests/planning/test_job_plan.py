"""Storage dtypes are resolved once for a plan, and everything else reads them there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import Hardware
from fp8cfg.planning.job_plan import make_plan
from fp8cfg.schema import storage
from fp8cfg.schema.precision import Precision
from tests.support.small import small


def count_resolutions(work: Callable[[], Any]) -> int:
    """How often `work` resolves the storage dtypes of a precision."""
    code = storage.resolved.__code__
    count = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_code is code:
            count += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def test_resolutions_are_counted() -> None:
    assert count_resolutions(lambda: storage.low_bit(Precision())) == 1
    assert count_resolutions(lambda: None) == 0


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["precision=bf16_fp8"],
        ["precision=bf16_fp8", "opt_level=O3"],
        ["precision=bf16_fp8", "storage.shard=zero2", "trainer.devices=8"],
    ],
    ids=" ".join,
)
def test_a_printed_plan_resolves_storage_at_most_50_times(
    overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert count_resolutions(lambda: main(["plan", "recipe=llama_8b", *overrides])) <= 50
    assert "memory per rank" in capsys.readouterr().out


def test_a_build_resolves_storage_a_few_times_beside_the_rules() -> None:
    """Each check of the rules resolves; a build checks the recipe twice more than `compose`."""
    recipe = small("precision=bf16_fp8")
    of_rules = count_resolutions(recipe.check)
    assert count_resolutions(lambda: fp8cfg.build(recipe)) <= 4 * of_rules + 6


def test_a_plan_resolves_storage_once_for_its_layout_and_once_for_its_backend() -> None:
    recipe = small("precision=bf16_fp8")
    assert count_resolutions(lambda: make_plan(recipe, Hardware("cpu"))) <= 2


def test_a_plan_names_recipe_backend_and_layers() -> None:
    plan = make_plan(small("precision=bf16_fp8"), Hardware("cpu"))
    assert repr(plan) == "Plan(llama_tiny, backend=native, 8 of 9 linear layers in FP8)"
    assert plan.state.linear["weight"] == "fp8" and plan.precision.storage.shard == "none"
