"""What is offered where a recipe does not fit or its layout is not run: words that fit, of which none can be left out."""

from __future__ import annotations

import shlex

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.report.memory.nearest_fit import cheapest
from fp8cfg.report.memory.peak import memory
from tests.support.small import small


@pytest.mark.parametrize(("words", "gpu", "gpus", "write"), [
    ("recipe=llama_8b precision=bf16", "h100", 8, ["storage.shard=zero2"]),
    ("recipe=llama_8b precision=bf16_fp8 trainer.strategy.context_parallel_size=1", "h100", 8, ["storage.shard=zero2"]),
    ("recipe=llama_8b precision=bf16 trainer.strategy.tensor_model_parallel_size=2", "l40s", 4, ["model.recompute_granularity=full", "storage.shard=zero2"]),
    ("recipe=llama_1b precision=bf16_fp8 trainer.micro_batch_size=8", "h100", 8, ["trainer.micro_batch_size=4"]),
    ("recipe=llama_70b precision=bf16", "h100", 32, ["model.recompute_granularity=full"]),
    ("recipe=qwen25_72b precision=bf16_fp8", "h100", 32, ["trainer.micro_batch_size=1"]),
    ("recipe=llama_70b precision=bf16 storage.shard=fsdp", "h200", 32, ["trainer.strategy.pipeline_model_parallel_size=1"]),
])
def test_what_is_offered_fits_and_each_word_is_needed(words: str, gpu: str, gpus: int, write: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    line = capsys.readouterr().err.splitlines()[-1].partition("; runs there: ")[2]
    verb, *offered = shlex.split(line)
    assert verb == "fp8cfg" and [word for word in offered if word not in words.split()][:len(write)] == write
    plan = fp8cfg.plan(fp8cfg.compose(offered), gpu, gpus)
    assert not plan.problems and not plan.refusals and plan.gpu and plan.widest.total <= plan.gpu.memory
    for word in write if gpus == 8 else []:
        less = fp8cfg.compose([*words.split(), *(w for w in write if w != word)]) if not word.startswith("fp8.params") else None
        assert less is None or fp8cfg.plan(less, gpu, gpus).problems, f"{word} is not needed"


def test_a_plan_without_problems_ends_with_0_and_offers_nothing() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_1b", "precision=bf16_fp8"]), "h100", 8)
    assert plan.problems == [] and plan.write == () and "does not run" not in str(plan)
    for words, gpus in (("recipe=llama_70b", 64), ("recipe=llama_405b", 512), ("recipe=llama_405b precision=bf16_fp8", 512)):
        assert fp8cfg.plan(fp8cfg.compose(words.split()), "h100", gpus).problems == [], "large recipes run as they stand"


def test_levels_change_numbers_and_go_last() -> None:
    recipe = small("precision=bf16_fp8", "model.hidden_size=512", "trainer.micro_batch_size=1", "trainer.global_batch_size=1",
                   "model.recompute_granularity=full")
    need = sum(memory(recipe, "cpu").values())
    fit = cheapest(recipe, "cpu", need - 1, 1, lambda _: "native")
    assert fit and [word for word in fit.words if word.startswith("opt_level=")] and fit.spare >= 0
    assert cheapest(recipe, "cpu", need, 1, lambda _: "native").words == ()  # type: ignore[union-attr]


def test_nothing_is_offered_where_nothing_fits() -> None:
    assert cheapest(small("precision=bf16"), "cpu", 1 << 10, 8, lambda _: "native") is None


def test_micro_batches_divide_the_global_batch_over_the_ranks() -> None:
    recipe = small("precision=bf16", "trainer.global_batch_size=12", "trainer.micro_batch_size=12")
    fit = cheapest(recipe, "cpu", 1 << 40, 4, lambda _: "native")
    assert fit and "trainer.micro_batch_size=3" in fit.words
