"""What is offered where a recipe does not fit or its layout is not run: words that fit, of which none can be left out."""

from __future__ import annotations

import re
import shlex

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import BLOCK_CUDA, Hardware
from fp8cfg.cli import check, launch_run
from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.recipe_arguments import command_lines, resolve_recipe
from fp8cfg.planning import preflight
from fp8cfg.planning.fit_search import SMOKE, Fit, Search
from fp8cfg.planning.peak_memory import plan_memory
from fp8cfg.schema.recipe_registry import recipes
from fp8cfg.schema.tables import size
from tests.support.small import small


def offered_lines(err: str, where: str = "there") -> list[list[str]]:
    """The arguments of each line that an error offers."""
    offers = f"; runs {where}: |; as a smoke run: | · "
    lines = re.split(offers, err.splitlines()[-1])[1:]
    return [shlex.split(line)[1:] for line in lines]


RECOMPUTE = "model.recompute_granularity"


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "write"),
    [
        (
            f"recipe=llama_70b precision=bf16 {RECOMPUTE}=none",
            "h100",
            32,
            [f"{RECOMPUTE}=selective"],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 trainer.strategy.context_parallel_size=1",
            "h100",
            8,
            [f"{RECOMPUTE}=full"],
        ),
        (
            "recipe=llama_8b precision=bf16 trainer.strategy.tensor_model_parallel_size=2",
            "l40s",
            4,
            [f"{RECOMPUTE}=full", "storage.shard=zero2"],
        ),
        (
            f"recipe=llama_8b precision=bf16 {RECOMPUTE}=full",
            "rtx4090",
            8,
            ["storage.shard=fsdp"],
        ),
        (
            f"recipe=llama_1b precision=bf16_fp8 trainer.micro_batch_size=16 {RECOMPUTE}=full",
            "l4",
            8,
            ["storage.shard=fsdp", "trainer.micro_batch_size=4"],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 trainer.strategy.tensor_model_parallel_size=16 trainer.num_nodes=4",
            "h100",
            32,
            ["trainer.strategy.tensor_model_parallel_size=8"],
        ),
    ],
)
def test_remedies_are_added_in_order_of_cost_until_a_recipe_fits(
    words: str, gpu: str, gpus: int, write: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    (line,) = offered_lines(capsys.readouterr().err)
    changes = [word for word in line if word not in words.split()]
    assert changes[: len(write)] == write
    plan = fp8cfg.plan(fp8cfg.compose(line), gpu, gpus)
    assert not plan.problems and plan.gpu and plan.widest.total <= plan.gpu.memory
    if gpus == 8:
        fewer = fp8cfg.compose([*words.split(), *write[:-1]])
        assert fp8cfg.plan(fewer, gpu, gpus).problems, "the last remedy is needed"


def test_more_gpus_are_offered_if_no_other_remedy_fits(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8"]
    assert main(["plan", *words, "--gpu", "rtx4090", "--gpus", "2"]) == 2
    out, err = capsys.readouterr()
    assert f"\nruns on 8 GPUs with: {RECOMPUTE}=full storage.shard=fsdp\n" in out
    (line,) = offered_lines(err, "on 8 GPUs")
    assert main(["plan", *line, "--gpu", "rtx4090"]) == 0


def test_nothing_that_fits_is_said_with_the_smallest_peak(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8", "model.seq_length=524288"]
    assert main(["plan", *words, "--gpu", "h100", "--gpus", "32"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    text, _, remedies = line.partition("; the whole model needs at least ")[2].partition(", with ")
    changes = remedies.partition(";")[0].split()
    ranks = 8 * int(changes[-1].removeprefix("trainer.num_nodes="))
    plan = fp8cfg.plan(fp8cfg.compose([*words, *changes]), "h100", ranks)
    assert text == size(plan.widest.total) and line.endswith(" trainer.smoke=true")


CONTEXT = "trainer.strategy.context_parallel_size"
BLANKS = "data=jsonl data.path=PATH data.tokenizer=FOLDER"


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "where", "offered"),
    [
        (
            "recipe=llama_8b precision=bf16_fp8",
            "h200",
            1,
            "there",
            f"{RECOMPUTE}=full {CONTEXT}=1 trainer.devices=1",
        ),
        (
            "recipe=llama_8b precision=bf16_fp8",
            "h100",
            1,
            "on 2 GPUs",
            f"{RECOMPUTE}=full storage.shard=zero2 trainer.devices=2",
        ),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "h200",
            16,
            "there",
            f"{CONTEXT}=1 trainer.num_nodes=2",
        ),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "b200",
            8,
            "there",
            f"{RECOMPUTE}=full trainer.strategy.pipeline_model_parallel_size=2 {CONTEXT}=1 trainer.num_nodes=1",
        ),
        (
            "recipe=llama_405b precision=bf16_fp8",
            "h200",
            64,
            "there",
            f"{RECOMPUTE}=full {CONTEXT}=1 trainer.num_nodes=8",
        ),
        ("recipe=olmo2_32b precision=bf16_adamw_fp8", "h200", 4, "there", SMOKE),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "h200",
            8,
            "on 16 GPUs",
            f"{CONTEXT}=1 trainer.num_nodes=2",
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 lora.enabled=true",
            "rtx4090",
            1,
            "there",
            f"{RECOMPUTE}=full {CONTEXT}=1 trainer.devices=1",
        ),
    ],
)
def test_fewer_gpus_than_a_replica_are_offered_a_layout_and_memory_together(
    words: str,
    gpu: str,
    gpus: int,
    where: str,
    offered: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The offered line is accepted, and fits, as it is printed."""
    there = ["--gpu", gpu, "--gpus", str(gpus)]
    assert main(["plan", *words.split(), *there]) == 2
    out, err = capsys.readouterr()
    replica = fp8cfg.compose(words.split()).trainer.strategy.size
    assert out == "" and err.startswith(
        f"error: {gpus} GPU{'s' * (gpus > 1)}: must be a multiple of tensor x pipeline x context parallel size = {replica}; "
    )
    label = f"runs {where}"
    more_words = f" {BLANKS}"
    if offered == SMOKE:
        label = "as a smoke run"
        more_words = ""
    assert err.endswith(f"; {label}: fp8cfg {words} {offered}{more_words}\n")
    (line,) = offered_lines(err, where)
    more = there if where == "there" else there[:2]
    assert main(["plan", *line, *more]) == 0
    assert f"\nfits {gpu}, " in capsys.readouterr().out
    with pytest.raises(fp8cfg.ConfigError, match=f"; {label}: {offered}$"):
        fp8cfg.plan(fp8cfg.compose(words.split()), gpu, gpus)


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "offered"),
    [
        ("recipe=llama_8b precision=bf16_fp8", "b200", 7, "trainer.devices=4"),
        (
            "recipe=llama_8b precision=bf16_fp8 trainer.micro_batch_size=2",
            "h100",
            6,
            "model.recompute_granularity=full trainer.devices=4",
        ),  # with memory together
        ("recipe=llama_70b precision=bf16 trainer.num_nodes=6", "h100", 48, "trainer.num_nodes=4"),
    ],
)
def test_gpus_over_which_nothing_divides_are_offered_as_many_as_a_launch_starts(
    words: str, gpu: str, gpus: int, offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    line = capsys.readouterr().err.splitlines()[-1].partition("; runs there: ")[2]
    kept = [word for word in words.split() if not word.startswith("trainer.num_nodes")]
    assert line == f"fp8cfg {' '.join(kept)} {offered} {BLANKS}"
    assert main(["plan", *shlex.split(line)[1:], "--gpu", gpu]) == 0
    if gpus < 8:  # of one machine
        assert launch_run.count_ranks(fp8cfg.compose(kept), gpus) == 4


@pytest.mark.parametrize(
    ("way", "refused"),
    [
        ("tensor", ["model.num_query_groups=1"]),
        ("pipeline", ["lora.enabled=true", "lora.targets=[layers.0.*]"]),
    ],
)
def test_a_layout_that_gains_ranks_keeps_its_own_sharding(way: str, refused: list[str]) -> None:
    """storage.shard=auto is none over one rank that shares state and zero1 over two, and no word for either is needed."""
    words = [
        "recipe=llama_tiny",
        *refused,
        f"trainer.strategy.{way}_model_parallel_size=2",
        "trainer.devices=2",
    ]
    plan = fp8cfg.plan(fp8cfg.compose(words), "h100")
    assert plan.write == (
        f"trainer.strategy.{way}_model_parallel_size=1",
        "trainer.micro_batch_size=8",
    )


def test_a_layout_that_a_recipe_in_python_does_not_have_is_answered_with_what_runs() -> None:
    recipe = fp8cfg.compose(["recipe=llama_8b"])
    recipe.trainer.devices = 1
    for gpus in (None, 1):
        with pytest.raises(
            fp8cfg.ConfigError, match=r"; runs there: trainer\.strategy\.context_parallel_size=1$"
        ):
            fp8cfg.plan(recipe, "b200", gpus)
    recipe.model.num_attention_heads = 3
    with pytest.raises(fp8cfg.ConfigError, match="not a multiple of") as e:
        fp8cfg.plan(recipe, "b200")
    assert "runs there" not in str(e.value)


def test_the_words_of_a_plan_have_the_machines_that_it_is_for() -> None:
    plan = fp8cfg.plan(
        fp8cfg.compose(
            ["recipe=llama_8b", "precision=bf16_fp8", "trainer.strategy.context_parallel_size=1"]
        ),
        "h200",
        1,
    )
    assert plan.write == ("model.recompute_granularity=full", "trainer.devices=1")
    assert plan.data()["lines"] == [" ".join(plan.write)]


def refused_here(
    words: list[str], gpus: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The lines that a start on a machine with so many free H100s offers."""
    monkeypatch.setattr(preflight, "count_gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "free_memory", lambda device, ranks: gib << 30)
    with pytest.raises(fp8cfg.ConfigError) as e:
        preflight.check_run(
            fp8cfg.compose(words),
            Hardware("cuda", (9, 0), BLOCK_CUDA),
            command_lines(Arguments(words), resolve_recipe),
        )
    return re.split("; runs here: |; as a smoke run: | · ", e.value.problems[-1])[1:]


def test_a_start_on_fewer_gpus_than_a_replica_offers_what_runs_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8", "data.tokenizer=bytes"]
    one = refused_here(words, 1, 139, monkeypatch)
    assert [line.split()[4:] for line in one] == [
        ["model.recompute_granularity=full", "trainer.strategy.context_parallel_size=1"],
        [SMOKE],
    ]
    eight = [
        *words,
        "trainer.strategy.tensor_model_parallel_size=8",
        "trainer.strategy.context_parallel_size=1",
    ]
    for gpus, ranks in ((4, 4), (3, 2)):  # 512 sequences are no multiple of 3
        line, *_ = refused_here(eight, gpus, 79, monkeypatch)
        recipe = fp8cfg.compose(line.split()[1:])
        assert (
            line.endswith(f"trainer.strategy.tensor_model_parallel_size={ranks}")
            and launch_run.count_ranks(recipe, gpus) == ranks
        )
        plan = fp8cfg.plan(recipe, "h100", ranks)
        assert not plan.problems
    line, *_ = refused_here(
        ["recipe=llama_70b", *words[1:], "task=lora"], 8, 139, monkeypatch
    )  # of four nodes
    recipe = fp8cfg.compose(line.split()[1:])
    assert (
        recipe.trainer.num_nodes == 1
        and launch_run.count_ranks(recipe, 8) == 8
        and not fp8cfg.plan(recipe, "h200", 8).problems
    )


def test_a_recipe_below_its_own_coverage_is_not_offered() -> None:
    """Only a smoke run is: it has no minimum."""
    words = ["recipe=llama_8b", "precision=bf16_fp8"]
    report = fp8cfg.plan(fp8cfg.compose([*words, "fp8.min_coverage=0.95"]), gpu="l40s")
    assert [problem.partition(":")[0] for problem in report.problems] == [
        "recipe=llama_8b",
        "fp8.min_coverage=0.95",
    ]
    assert list(report.write) == ["trainer.smoke=true"]
    report = fp8cfg.plan(fp8cfg.compose([*words, "fp8.min_coverage=0.8"]), gpu="l40s")
    assert "storage.shard=zero2" in report.write and len(report.problems) == 1


def test_a_recipe_that_runs_on_its_own_gpus_only_is_offered_with_their_number() -> None:
    """64 GPUs are two replicas with two microbatches each, too few for four stages."""
    words = ["recipe=llama_70b", "precision=bf16"]
    words += ["trainer.global_batch_size=12", "trainer.micro_batch_size=3"]
    report = fp8cfg.plan(fp8cfg.compose(words), gpu="b200", gpus=64)
    assert report.problems and report.offered is not None
    assert (report.offered.ranks, report.write) == (32, ())
    assert str(report).partition("global_batch_size=24\n")[2].startswith("runs on 32 GPUs\n")


def test_a_smoke_run_has_no_least_coverage() -> None:
    """`check` plans the whole recipe, the run only a part of it."""
    words = ["recipe=llama_tiny", "precision=bf16_fp8", "fp8.min_coverage=0.99"]
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8.min_coverage=0.99"):
        check.run([*words, "data.tokenizer=bytes"])
    assert check.run([*words, "data.tokenizer=bytes", "trainer.smoke=true"]) == 0


def test_a_plan_without_problems_ends_with_0_and_offers_nothing() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_1b", "precision=bf16_fp8"]), "h100", 8)
    assert plan.problems == [] and plan.write == () and "does not run" not in str(plan)


MEANT = {"llama_8b": (8,), "llama_70b": (32, 64), "llama_405b": (512,)}


@pytest.mark.parametrize("precision", ["bf16", "bf16_fp8"])
@pytest.mark.parametrize(
    ("recipe", "gpus"), [(recipe, n) for recipe, every in MEANT.items() for n in every]
)
def test_large_recipes_run_as_they_stand(
    recipe: str, gpus: int, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "plan",
                f"recipe={recipe}",
                f"precision={precision}",
                "--gpu",
                "h100",
                "--gpus",
                str(gpus),
            ]
        )
        == 0
    )
    assert "\nfits h100, 79.1 GiB: " in capsys.readouterr().out


SIZES = [name for name in recipes() if name != "from_hf" and not name.endswith("_tiny")]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", SIZES)
def test_every_recipe_runs_on_the_gpus_that_it_is_meant_for(recipe: str) -> None:
    for precision in ("bf16", "bf16_fp8"):
        assert (
            fp8cfg.plan(
                fp8cfg.compose([f"recipe={recipe}", f"precision={precision}"]), "h100"
            ).problems
            == []
        )


def nearest(recipe: fp8cfg.Recipe, free: int, world: int) -> Fit | None:
    return Search("cpu", free, lambda _, world: "native").nearest(recipe, world)


def test_a_remedy_that_does_not_lower_the_peak_or_that_is_not_taken_is_skipped() -> None:
    """One rank shards nothing, and a run that is resumed may not take a remedy."""
    recipe = small("precision=bf16")
    need = sum(plan_memory(recipe, "cpu").values())
    assert nearest(recipe, need, 1) == Fit(recipe, (), peak=need)
    fit = nearest(recipe, 0, 1)
    micro = "trainer.micro_batch_size=1"
    assert fit and fit.words == (f"{RECOMPUTE}=full", micro) and 0 < fit.peak < need
    search = Search("cpu", 0, lambda _, world: "native", lambda r: r.trainer.micro_batch_size > 2)
    fit = search.nearest(recipe, 1)
    assert fit and fit.words == (f"{RECOMPUTE}=full", "trainer.micro_batch_size=4")


def test_micro_batches_divide_the_global_batch_over_the_ranks() -> None:
    recipe = small("precision=bf16", "trainer.global_batch_size=12", "trainer.micro_batch_size=12")
    fit = nearest(recipe, 1 << 40, 4)
    assert fit and fit.words == ("trainer.micro_batch_size=3",)
