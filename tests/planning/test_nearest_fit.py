"""What is offered where a recipe does not fit or its layout is not run: words that fit, of which none can be left out."""

from __future__ import annotations

import shlex

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import BLOCK_CUDA, Hardware
from fp8cfg.cli import launch_run
from fp8cfg.cli.argv import Arguments
from fp8cfg.cli.recipe_arguments import settled, whole_lines
from fp8cfg.planning import preflight
from fp8cfg.planning.fit_search import SMOKE, Search, alternatives
from fp8cfg.planning.layout import machines
from fp8cfg.planning.peak_memory import memory
from fp8cfg.schema.recipe_registry import recipes
from tests.support.small import small


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "write"),
    [
        (
            "recipe=llama_8b precision=bf16 model.recompute_granularity=none",
            "h100",
            8,
            ["storage.shard=zero2"],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 trainer.strategy.context_parallel_size=1",
            "h100",
            8,
            ["storage.shard=zero2"],
        ),
        (
            "recipe=llama_8b precision=bf16 trainer.strategy.tensor_model_parallel_size=2",
            "l40s",
            4,
            ["storage.shard=fsdp"],
        ),
        (
            "recipe=llama_1b precision=bf16_fp8 trainer.micro_batch_size=8",
            "h100",
            8,
            ["trainer.micro_batch_size=4"],
        ),
        (
            "recipe=llama_70b precision=bf16 model.recompute_granularity=none",
            "h100",
            32,
            ["model.recompute_granularity=selective"],
        ),
        (
            "recipe=qwen25_72b precision=bf16_fp8 trainer.strategy.sequence_parallel=false",
            "h100",
            32,
            ["trainer.micro_batch_size=1"],
        ),
        ("recipe=llama_70b precision=bf16_fp8 opt_level=O2", "h200", 32, ["opt_level=null"]),
        (
            "recipe=llama_8b precision=bf16_fp8 fp8.keep_transpose_cache=true model.recompute_granularity=full trainer.strategy.context_parallel_size=1",
            "h200",
            1,
            ["fp8.keep_transpose_cache=false"],
        ),
        (
            "recipe=olmo2_32b precision=bf16_adamw_fp8",
            "h200",
            16,
            ["storage.master_weight=auto", "storage.rounding=nearest"],
        ),
        (
            "recipe=gemma2_9b precision=bf16_precision_aware",
            "h100",
            8,
            ["storage.master_weight=auto"],
        ),
        (
            "recipe=llama_70b precision=bf16_fp8 fp8.reduce_amax=false",
            "b200",
            64,
            ["fp8.reduce_amax=true"],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 trainer.strategy.tensor_model_parallel_size=16 trainer.num_nodes=4",
            "h100",
            32,
            ["trainer.strategy.tensor_model_parallel_size=8"],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8 model.seq_length=524288",
            "h100",
            32,  # over more ranks, where nothing else fits
            [
                "model.recompute_granularity=full",
                "storage.shard=zero2",
                "trainer.strategy.context_parallel_size=8",
            ],
        ),
    ],
)
def test_what_is_offered_fits_and_each_word_is_needed(
    words: str, gpu: str, gpus: int, write: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    line = capsys.readouterr().err.splitlines()[-1].partition("; runs there: ")[2]
    verb, *offered = shlex.split(line.partition(" · ")[0])
    assert (
        verb == "fp8cfg"
        and [word for word in offered if word not in words.split()][: len(write)] == write
    )
    plan = fp8cfg.plan(fp8cfg.compose(offered), gpu, gpus)
    assert (
        not plan.problems
        and not plan.refusals
        and plan.gpu
        and plan.widest.total <= plan.gpu.memory
    )
    for word in write if gpus == 8 else []:
        less = (
            fp8cfg.compose([*words.split(), *(w for w in write if w != word)])
            if not word.startswith("fp8.params")
            else None
        )
        assert less is None or fp8cfg.plan(less, gpu, gpus).problems, f"{word} is not needed"


def test_a_fit_of_another_kind_is_offered_beside_the_cheapest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Llama 3.1 8B trains whole on one H200 under O2, which changes the numbers, or recomputing all, which takes time."""
    words = [
        "recipe=llama_8b",
        "precision=bf16_fp8",
        "trainer.devices=1",
        "trainer.strategy.context_parallel_size=1",
    ]
    assert main(["plan", *words, "--gpu", "h200"]) == 2
    out, err = capsys.readouterr()
    assert (
        "\nruns with: model.recompute_granularity=full\nor with: fp8.params=false opt_level=O2\n"
        in out
    )
    lines = [
        shlex.split(line)
        for line in err.splitlines()[-1].partition("; runs there: ")[2].split(" · ")
    ]
    spare = []
    for verb, *offered in lines:
        assert verb == "fp8cfg" and main(["plan", *offered, "--gpu", "h200"]) == 0
        spare += [
            line
            for line in capsys.readouterr().out.splitlines()
            if line.startswith("fits h200, 139.7 GiB: ")
        ]
    assert len(spare) == len(lines) == 2 and "opt_level=O2" in lines[1]
    plan = fp8cfg.plan(fp8cfg.compose(words), "h200")
    assert (plan.write, plan.alternative) == (
        ("model.recompute_granularity=full",),
        ("fp8.params=false", "opt_level=O2"),
    )


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "offered"),
    [
        (
            "recipe=llama_8b precision=bf16_fp8",
            "h200",
            1,
            [
                "model.recompute_granularity=full trainer.strategy.context_parallel_size=1",
                "fp8.params=false opt_level=O2 trainer.strategy.context_parallel_size=1",
            ],
        ),
        (
            "recipe=llama_8b precision=bf16_fp8",
            "h100",
            1,
            [
                "model.recompute_granularity=full fp8.params=false opt_level=O2 trainer.strategy.context_parallel_size=1"
            ],
        ),
        ("recipe=llama_8b precision=bf16_fp8", "rtx4090", 1, ["trainer.smoke=true"]),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "h200",
            16,
            ["trainer.strategy.context_parallel_size=1"],
        ),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "b200",
            8,
            [
                "model.recompute_granularity=full trainer.strategy.pipeline_model_parallel_size=2 trainer.strategy.context_parallel_size=1",
                "storage.shard=zero2 trainer.strategy.pipeline_model_parallel_size=1 trainer.strategy.virtual_pipeline_model_parallel_size=null",
            ],
        ),
        (
            "recipe=llama_405b precision=bf16_fp8",
            "h200",
            64,
            [
                "model.recompute_granularity=full trainer.strategy.context_parallel_size=1",
                "storage.shard=fsdp trainer.strategy.pipeline_model_parallel_size=1 trainer.strategy.virtual_pipeline_model_parallel_size=null",
            ],
        ),
        (
            "recipe=olmo2_32b precision=bf16_adamw_fp8",
            "h200",
            4,
            [
                "storage.master_weight=auto storage.rounding=nearest trainer.strategy.tensor_model_parallel_size=4 "
                "trainer.strategy.pipeline_model_parallel_size=1",
                "model.recompute_granularity=selective storage.weight_grad=auto storage.rounding=nearest storage.shard=fsdp "
                "trainer.strategy.tensor_model_parallel_size=1 trainer.strategy.pipeline_model_parallel_size=1",
            ],
        ),
        (
            "recipe=llama_70b precision=bf16_fp8",
            "h200",
            8,  # shards that are not in FP8, where nothing else fits
            [
                "model.recompute_granularity=full fp8.params=false storage.shard=fsdp trainer.strategy.pipeline_model_parallel_size=1 "
                "trainer.strategy.virtual_pipeline_model_parallel_size=null"
            ],
        ),
        (
            "recipe=llama_70b precision=bf16_fp8 model.seq_length=32768",
            "h200",
            8,  # and moments in fewer bits
            [
                "model.recompute_granularity=full storage.exp_avg=bf16 storage.exp_avg_sq=bf16 trainer.strategy.pipeline_model_parallel_size=2 "
                "trainer.strategy.context_parallel_size=1"
            ],
        ),
        ("recipe=llama_70b precision=bf16_fp8", "h200", 2, ["trainer.smoke=true"]),
        (
            "recipe=llama_8b precision=bf16_fp8 lora.enabled=true",
            "rtx4090",
            1,
            ["model.recompute_granularity=full trainer.strategy.context_parallel_size=1"],
        ),
    ],
)
def test_fewer_gpus_than_a_replica_are_offered_a_layout_and_memory_together(
    words: str, gpu: str, gpus: int, offered: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each offered line is accepted there, and fits, as it is printed."""
    there = ["--gpu", gpu, "--gpus", str(gpus)]
    assert main(["plan", *words.split(), *there]) == 2
    out, err = capsys.readouterr()
    trainer = fp8cfg.compose(words.split()).trainer
    size = trainer.strategy.size
    assert out == "" and err.startswith(
        f"error: {gpus} GPU{'s' * (gpus > 1)}: not a multiple of tensor x pipeline x context parallel = {size}; "
    )
    lines = err.removesuffix("\n").partition("; runs there: ")[2].split(" · ")
    nodes, devices = machines(gpus)
    meant = f" trainer.num_nodes={nodes}" * (
        nodes != trainer.num_nodes
    ) + f" trainer.devices={devices}" * (devices != trainer.devices)
    assert lines == [f"fp8cfg {words} {more}{meant * (more != SMOKE)}" for more in offered]
    for line in lines:
        assert main(["plan", *shlex.split(line)[1:], *there]) == 0
        assert f"\nfits {gpu}, " in capsys.readouterr().out
    alone = " · ".join(more + meant * (more != SMOKE) for more in offered)
    with pytest.raises(fp8cfg.ConfigError, match=f"; runs there: {alone}$"):
        fp8cfg.plan(fp8cfg.compose(words.split()), gpu, gpus)


@pytest.mark.parametrize(
    ("words", "gpu", "gpus", "offered"),
    [
        ("recipe=llama_8b precision=bf16_fp8", "b200", 7, "trainer.devices=4"),
        (
            "recipe=llama_8b precision=bf16_fp8",
            "h100",
            6,
            "storage.shard=zero2 trainer.devices=4",
        ),  # with memory together
        ("recipe=llama_70b precision=bf16 trainer.num_nodes=6", "h100", 48, "trainer.num_nodes=4"),
    ],
)
def test_gpus_over_which_nothing_divides_are_offered_as_many_as_a_launch_starts(
    words: str, gpu: str, gpus: int, offered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *words.split(), "--gpu", gpu, "--gpus", str(gpus)]) == 2
    line, *_ = capsys.readouterr().err.splitlines()[-1].partition("; runs there: ")[2].split(" · ")
    kept = [word for word in words.split() if not word.startswith("trainer.num_nodes")]
    assert line == f"fp8cfg {' '.join(kept)} {offered}"
    assert main(["plan", *shlex.split(line)[1:], "--gpu", gpu]) == 0
    if gpus < 8:  # of one machine
        assert launch_run.count(fp8cfg.compose(kept), gpus) == 4


@pytest.mark.parametrize("way", ["tensor", "pipeline"])
def test_a_layout_that_gains_ranks_keeps_its_own_sharding(way: str) -> None:
    """storage.shard=auto is none over one rank that shares state and zero1 over two, and no word for either is needed."""
    words = [
        "recipe=llama_tiny",
        "lora.enabled=true",
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


def test_shards_in_fp8_are_given_up_before_moments_of_float32() -> None:
    """They are 7.3 GiB of 139.4 on each rank, for 0.7 GiB of layers that are gathered in FP8."""
    recipe = fp8cfg.compose(
        [
            "recipe=olmo2_32b",
            "precision=bf16_fp8",
            "trainer.devices=4",
            "trainer.num_nodes=1",
            *(f"trainer.strategy.{way}_model_parallel_size=1" for way in ("tensor", "pipeline")),
        ]
    )
    words = [
        [fit.words for fit in Search(recipe, "cuda", gib << 30, 4, lambda _: "native").fits()]
        for gib in (140, 136, 110)
    ]
    fsdp = ("model.recompute_granularity=full", "storage.shard=fsdp")
    assert words[0] == [fsdp] and words[1] == [
        ("model.recompute_granularity=full", "fp8.params=false", "storage.shard=fsdp")
    ]
    assert {"storage.exp_avg=bf16", "storage.exp_avg_sq=bf16"} < set(words[2][0])


def test_the_words_of_a_plan_have_the_machines_that_it_is_for() -> None:
    plan = fp8cfg.plan(
        fp8cfg.compose(
            ["recipe=llama_8b", "precision=bf16_fp8", "trainer.strategy.context_parallel_size=1"]
        ),
        "h200",
        1,
    )
    assert plan.write == ("model.recompute_granularity=full", "trainer.devices=1")
    assert (
        plan.data()["lines"] == [" ".join(plan.write), " ".join(plan.alternative)]
        and plan.alternative[-1] == "trainer.devices=1"
    )


def refused_here(
    words: list[str], gpus: int, gib: int, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """The lines that a start on a machine with so many free H100s offers."""
    monkeypatch.setattr(preflight, "gpus", lambda: gpus)
    monkeypatch.setattr(preflight, "free_memory", lambda device, ranks: gib << 30)
    with pytest.raises(fp8cfg.ConfigError) as e:
        preflight.refuse(
            fp8cfg.compose(words),
            Hardware("cuda", (9, 0), BLOCK_CUDA),
            whole_lines(Arguments(words), settled),
        )
    return e.value.problems[-1].partition("; runs here: ")[2].split(" · ")


def test_a_start_on_fewer_gpus_than_a_replica_offers_what_runs_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["recipe=llama_8b", "precision=bf16_fp8"]
    one = refused_here(words, 1, 139, monkeypatch)
    assert [line.split()[3:] for line in one] == [
        ["model.recompute_granularity=full", "trainer.strategy.context_parallel_size=1"],
        ["fp8.params=false", "opt_level=O2", "trainer.strategy.context_parallel_size=1"],
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
            and launch_run.count(recipe, gpus) == ranks
        )
        plan = fp8cfg.plan(recipe, "h100", ranks)
        assert not plan.problems
    line, *_ = refused_here(
        ["recipe=llama_70b", "precision=bf16_fp8", "task=lora"], 8, 139, monkeypatch
    )  # of four nodes
    recipe = fp8cfg.compose(line.split()[1:])
    assert (
        recipe.trainer.num_nodes == 1
        and launch_run.count(recipe, 8) == 8
        and not fp8cfg.plan(recipe, "h200", 8).problems
    )


def test_a_plan_without_problems_ends_with_0_and_offers_nothing() -> None:
    plan = fp8cfg.plan(fp8cfg.compose(["recipe=llama_1b", "precision=bf16_fp8"]), "h100", 8)
    assert (
        plan.problems == []
        and plan.write == plan.alternative == ()
        and "does not run" not in str(plan)
    )


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


def test_levels_change_numbers_and_go_last() -> None:
    recipe = small(
        "precision=bf16_fp8",
        "model.hidden_size=512",
        "trainer.micro_batch_size=1",
        "trainer.global_batch_size=1",
        "model.recompute_granularity=full",
    )
    need = sum(memory(recipe, "cpu").values())
    fit = alternatives(recipe, "cpu", need - 1, 1, lambda _: "native")[0]
    assert [word for word in fit.words if word.startswith("opt_level=")] and fit.spare >= 0
    assert alternatives(recipe, "cpu", need, 1, lambda _: "native")[0].words == ()


def test_nothing_is_offered_where_nothing_fits() -> None:
    assert alternatives(small("precision=bf16"), "cpu", 1 << 10, 8, lambda _: "native") == []


def test_micro_batches_divide_the_global_batch_over_the_ranks() -> None:
    recipe = small("precision=bf16", "trainer.global_batch_size=12", "trainer.micro_batch_size=12")
    fit = alternatives(recipe, "cpu", 1 << 40, 4, lambda _: "native")[0]
    assert "trainer.micro_batch_size=3" in fit.words
