"""What is offered where a recipe does not fit or its layout is not run: words that fit, of which none can be left out."""

from __future__ import annotations

import shlex

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.config.recipe_registry import recipes
from fp8cfg.report.memory.nearest_fit import cheapest
from fp8cfg.report.memory.peak import memory
from tests.support.small import small


@pytest.mark.parametrize(("words", "gpu", "gpus", "write"), [
    ("recipe=llama_8b precision=bf16 model.recompute_granularity=none", "h100", 8, ["storage.shard=zero2"]),
    ("recipe=llama_8b precision=bf16_fp8 trainer.strategy.context_parallel_size=1", "h100", 8, ["storage.shard=zero2"]),
    ("recipe=llama_8b precision=bf16 trainer.strategy.tensor_model_parallel_size=2", "l40s", 4, ["storage.shard=fsdp"]),
    ("recipe=llama_1b precision=bf16_fp8 trainer.micro_batch_size=8", "h100", 8, ["trainer.micro_batch_size=4"]),
    ("recipe=llama_70b precision=bf16 model.recompute_granularity=none", "h100", 32, ["model.recompute_granularity=selective"]),
    ("recipe=qwen25_72b precision=bf16_fp8 trainer.strategy.sequence_parallel=false", "h100", 32, ["trainer.micro_batch_size=1"]),
    ("recipe=llama_70b precision=bf16_fp8 opt_level=O2", "h200", 32, ["opt_level=null"]),
])
def test_what_is_offered_fits_and_each_word_is_needed(words: str, gpu: str, gpus: int, write: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    line = capsys.readouterr().err.splitlines()[-1].partition("; runs there: ")[2]
    verb, *offered = shlex.split(line.partition(" · ")[0])
    assert verb == "fp8cfg" and [word for word in offered if word not in words.split()][:len(write)] == write
    plan = fp8cfg.plan(fp8cfg.compose(offered), gpu, gpus)
    assert not plan.problems and not plan.refusals and plan.gpu and plan.widest.total <= plan.gpu.memory
    for word in write if gpus == 8 else []:
        less = fp8cfg.compose([*words.split(), *(w for w in write if w != word)]) if not word.startswith("fp8.params") else None
        assert less is None or fp8cfg.plan(less, gpu, gpus).problems, f"{word} is not needed"


def test_a_fit_of_another_kind_is_offered_beside_the_cheapest(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3.1 8B trains whole on one H200 under O2, which changes the numbers, or recomputing all, which takes time."""
    words = ["recipe=llama_8b", "precision=bf16_fp8", "trainer.devices=1", "trainer.strategy.context_parallel_size=1"]
    assert main(["plan", *words, "--gpu", "h200"]) == 2
    out, err = capsys.readouterr()
    assert "\nruns with: model.recompute_granularity=full\nor with: fp8.params=false opt_level=O2\n" in out
    lines = [shlex.split(line) for line in err.splitlines()[-1].partition("; runs there: ")[2].split(" · ")]
    spare = []
    for verb, *offered in lines:
        assert verb == "fp8cfg" and main(["plan", *offered, "--gpu", "h200"]) == 0
        spare += [line for line in capsys.readouterr().out.splitlines() if line.startswith("fits h200, 139.7 GiB: ")]
    assert len(spare) == len(lines) == 2 and "opt_level=O2" in lines[1]
    plan = fp8cfg.plan(fp8cfg.compose(words), "h200")
    assert (plan.write, plan.alternative) == (("model.recompute_granularity=full",), ("fp8.params=false", "opt_level=O2"))


def test_a_plan_without_problems_ends_with_0_and_offers_nothing() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_1b", "precision=bf16_fp8"]), "h100", 8)
    assert plan.problems == [] and plan.write == plan.alternative == () and "does not run" not in str(plan)


MEANT = {"llama_8b": (8,), "llama_70b": (32, 64), "llama_405b": (512,)}


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp8"])
@pytest.mark.parametrize(("recipe", "gpus"), [(recipe, n) for recipe, every in MEANT.items() for n in every])
def test_large_recipes_run_as_they_stand(recipe: str, gpus: int, precision: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", f"recipe={recipe}", f"precision={precision}", "--gpu", "h100", "--gpus", str(gpus)]) == 0
    assert "\nfits h100, 79.1 GiB: " in capsys.readouterr().out


SIZES = [name for name in recipes() if name != "from_hf" and not name.endswith("_tiny")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SIZES)
def test_every_recipe_runs_on_the_gpus_that_it_is_meant_for(recipe: str) -> None:
    for precision in ("bf16", "bf16_fp8"):
        assert fp8cfg.plan(fp8cfg.compose([f"recipe={recipe}", f"precision={precision}"]), "h100").problems == []


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
