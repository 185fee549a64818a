"""Hybrid sharding (HSDP): state sharded by FSDP2 within groups that replicate it, over four gloo ranks, trains as on one."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.mesh import AXES, axis_sizes, batch_share, coordinates
from fp8cfg.parallel.process_group import SENT, World
from fp8cfg.planning.layout import layout_violations, rank_part, stage_parts
from fp8cfg.planning.peak_memory import plan_memory
from fp8cfg.schema.training import Strategy
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import rank_runs
from tests.support.ranks import on_ranks
from tests.support.small import small
from tools.layout_proof.collective_counter import CollectiveCounter
from tools.layout_proof.comparison import planned_sent, wrong_axes

GROUPS = "trainer.strategy.data_parallel_replicate_size"
CURRENT = "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
RUNS = {  # name -> words, the largest relative difference of a loss from that of one rank, and of a norm
    "fp32": ("precision=fp32 trainer.gradient_clip_val=0.1", 1e-6, 1e-5),
    "context": (
        "precision=fp32 trainer.gradient_clip_val=0.1 trainer.strategy.context_parallel_size=2",
        1e-6,
        1e-5,
    ),
    "delayed": ("precision=bf16_fp8", 2e-3, 0.1),
    "current": (f"{CURRENT} fp8.params=true", 2e-3, 0.1),
    "torchao": (f"{CURRENT} fp8.params=false backend=torchao", 2e-3, 0.1),
    "zero1": (
        "precision=fp32 trainer.gradient_clip_val=0.1 storage.shard=zero1 trainer.micro_batch_size=1",
        1e-6,
        1e-5,
    ),
    "zero2": (
        "precision=fp32 trainer.gradient_clip_val=0.1 storage.shard=zero2 trainer.micro_batch_size=1",
        1e-6,
        1e-5,
    ),
    "delayed zero1": (
        "precision=bf16_fp8 storage.shard=auto trainer.micro_batch_size=1",
        2e-3,
        0.1,
    ),
}
LONG = "fp32"
"""The run of eight steps."""
SAME = {"context": "fp32", "zero1": "fp32", "zero2": "fp32", "delayed zero1": "delayed"}
"""Runs that on one rank are another one."""
MEASURED = (
    "precision=fp32 storage.shard=fsdp",
    "precision=bf16_fp8 storage.shard=zero1",
    "precision=bf16 storage.shard=zero2 model.seq_length=64",
)
COUNTS = {
    "zero1": (3, 3 + 3),
    "zero2": (3, 2 * 3 + 3),
    "fsdp": (2 * (2 * 2 + 1), 2 * 3 + 3),
    "fsdp in bf16": (2 * (2 * 2 + 1), 2 * (3 + 3)),
}
"""Gathers, and sums within and over groups, of two layers and the rest in a step of two microbatches."""


def job_of(name: str, ranks: int, groups: int = 1) -> Job:
    chosen = [w for w in RUNS[name][0].split() if ranks > 1 or not w.startswith("trainer.strategy")]
    words = {
        w.partition("=")[0]: w
        for w in ("storage.shard=fsdp", "trainer.micro_batch_size=2", *chosen)
    }
    return fp8cfg.build(
        small(
            *words.values(),
            f"trainer.devices={ranks}",
            f"trainer.max_steps={rank_runs.LONG}",
            f"trainer.strategy.data_parallel_replicate_size={groups}",
        )
    )


def trained(
    name: str, ranks: int, groups: int, world: World, folder: Path | None = None
) -> dict[str, Any]:
    """The run of that name, with a checkpoint on the way in `folder`."""
    job, last = job_of(name, ranks, groups), rank_runs.LONG if name == LONG else rank_runs.STEPS
    return (
        rank_runs.saved(job, world, folder, last)
        if folder
        else rank_runs.trained(job, world, 0, last)
    )


def counted(shard: str, comm: str, world: World) -> list[list[Any]]:
    """What the second step of two microbatches sends, as counted, as planned, and by messages."""
    job = fp8cfg.build(
        small(
            "precision=bf16",
            f"storage.shard={shard}",
            f"storage.comm={comm}",
            "trainer.devices=4",
            "trainer.micro_batch_size=1",
            f"{GROUPS}=2",
        )
    )
    train_step(job, run_data(job.recipe)[0], 0, world)
    SENT.clear()
    with CollectiveCounter(job.recipe.trainer.strategy) as counter:
        train_step(job, run_data(job.recipe)[0], 1, world)
    plan = planned_sent(
        job.recipe, stage_parts(job.recipe, 4)[0], job.choice.backend, world.rank % 2
    )
    return [dict(counter.sent), plan, [SENT.messages["weights"], SENT.messages["gradients"]]]


def on_four(folder: Path, world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "4"
    found: dict[str, Any] = {
        name: trained(name, 4, 2, world, folder if name == "delayed" else None) for name in RUNS
    }
    for name, groups in (("resumed", 2), ("as one group", 1)):
        found[name] = rank_runs.trained(
            rank_runs.resumed(job_of("delayed", 4, groups), folder), world, rank_runs.SAVED
        )
    found["sent"] = []
    for groups in (1, 2):
        job = job_of("fp32", 4, groups)
        SENT.clear()
        train_step(job, run_data(job.recipe)[0], 0, world)
        found["sent"].append(dict(SENT.bytes))
    for name in COUNTS:
        found[f"{name} counted"] = counted(
            name.split()[0], "bf16" if "bf16" in name else "auto", world
        )
    found["memory"] = {words: rank_runs.measured(4, f"{words} {GROUPS}=2") for words in MEASURED}
    found["kept"] = sum(p.to_local().numel() for p in job.model.parameters())  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(
        4,
        functools.partial(on_four, tmp_path_factory.mktemp("ranks")),
        tmp_path_factory.mktemp("four"),
    )


@functools.cache
def one(name: str) -> dict[str, Any]:
    return trained(name, 1, 1, World())


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_groups_of_two_ranks_train_as_one_rank(name: str, four: list[dict[str, Any]]) -> None:
    want, (_, loss, norm), steps = (
        one(SAME.get(name, name)),
        RUNS[name],
        len(four[0][name]["losses"]),
    )
    assert all(rank[name]["losses"] == four[0][name]["losses"] for rank in four)
    assert [*four[0][name]["losses"], *four[0][name]["val"]] == pytest.approx(
        [*want["losses"][:steps], *want["val"]], rel=loss
    )
    assert four[0][name]["norms"] == pytest.approx(want["norms"][:steps], rel=norm)
    assert all(rank[name].get("coverage") == want.get("coverage") for rank in four)


@pytest.mark.slow
def test_a_run_goes_on_in_groups_and_without(four: list[dict[str, Any]]) -> None:
    rest = four[0]["delayed"]["losses"][rank_runs.SAVED :]
    assert four[0]["resumed"]["losses"] == rest
    assert four[0]["as one group"]["losses"] == pytest.approx(rest, rel=1e-3)


@pytest.mark.slow
def test_each_group_has_all_state_and_sends_less(four: list[dict[str, Any]]) -> None:
    whole = sum(p.numel() for p in fp8cfg.build(small("precision=fp32")).model.parameters())
    assert [rank["kept"] for rank in four] == pytest.approx([whole / 2] * 4, rel=0.01)
    apart, groups = four[0]["sent"]
    assert groups["weights"] == pytest.approx(apart["weights"] * 2 / 3, rel=0.01), (
        "1 of 2 parts of a weight are elsewhere, not 3 of 4"
    )
    assert groups["gradients"] == pytest.approx(
        apart["gradients"] * (1 / 2 + 1 / 2) / (3 / 4), rel=0.01
    ), "to shards, and over groups"


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_planned_bytes_are_the_measured_ones(words: str, four: list[dict[str, Any]]) -> None:
    rank_runs.takes_what_is_planned([rank["memory"][words] for rank in four])


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTS)
def test_groups_sum_once_a_step_what_is_sent_in_float32(
    name: str, four: list[dict[str, Any]]
) -> None:
    for rank in four:
        sent, planned, messages = rank[f"{name} counted"]
        assert planned and not wrong_axes(sent, planned) and messages == [*COUNTS[name]]


def test_groups_are_an_axis_of_their_own() -> None:
    strategy = Strategy(data_parallel_replicate_size=2, context_parallel_size=2)
    assert axis_sizes(strategy, 16) == dict(zip(AXES, (1, 2, 4, 2, 1), strict=True))
    assert coordinates(strategy, 11, 16) == dict(zip(AXES, (0, 1, 1, 1, 0), strict=True))
    assert [batch_share(strategy, rank, 16)[0] for rank in range(0, 16, 2)] == [
        *range(8)
    ] and batch_share(strategy, 15, 16) == (7, 8)
    with pytest.raises(ValueError, match="3 data-parallel ranks: not a multiple of 2 groups"):
        axis_sizes(Strategy(data_parallel_replicate_size=2), 3)


def test_memory_is_that_of_a_group() -> None:
    recipe = small(
        "precision=bf16",
        "storage.shard=fsdp",
        "trainer.devices=4",
        "trainer.micro_batch_size=2",
        f"{GROUPS}=2",
    )
    assert rank_part(recipe, 4).shards == 2 and layout_violations(recipe, 4) == []

    one = small(
        "precision=bf16", "storage.shard=fsdp", "trainer.devices=4", "trainer.micro_batch_size=2"
    )
    assert (
        plan_memory(recipe, "cpu", rank_part(recipe, 4))["moments"]
        == 2 * plan_memory(one, "cpu", rank_part(one, 4))["moments"]
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "trainer.devices=4 storage.shard=none",
            f"{GROUPS}=2: has no effect with storage.shard=none; set storage.shard=zero1, or remove it",
        ),
        (
            "trainer.devices=4 precision=bf16_fp8 fp8.params=false opt_level=O2",
            f"{GROUPS}=2: has no effect with storage.shard=auto, which shards nothing here; remove it",
        ),
        (
            "trainer.devices=4 precision=bf16_fp8 storage.shard=zero1 storage.master_weight=fp16_scaled",
            f"{GROUPS}=2: needs FSDP2, but this recipe shards whole tensors; set it to 1",
        ),
        (
            "trainer.devices=3 trainer.global_batch_size=6 trainer.micro_batch_size=2 storage.shard=fsdp",
            f"{GROUPS}=2: does not divide the data-parallel size 3; nearest is 1",
        ),
        (
            "trainer.devices=2 storage.shard=fsdp",
            f"{GROUPS}=2: leaves one rank per group, so nothing is sharded; set storage.shard=none, or set it to 1",
        ),
    ],
)
def test_groups_that_cannot_be_are_refused(words: str, line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        small(f"{GROUPS}=2", "trainer.micro_batch_size=2", *words.split())
    assert line in e.value.problems


def test_ranks_that_are_no_groups_are_refused_with_those_that_are() -> None:
    recipe = small(
        "storage.shard=fsdp", "trainer.devices=4", "trainer.micro_batch_size=2", f"{GROUPS}=2"
    )
    assert [str(found) for found in layout_violations(recipe, 2)] == [
        f"{GROUPS}=2: 2 ranks do not form 2 groups of several ranks each; launch 4 ranks or set it to 1"
    ]
    with pytest.raises(fp8cfg.ConfigError, match="do not form 2 groups of several ranks"):
        fp8cfg.build(recipe)
    assert "not a custom model; set it to 1" in str(
        layout_violations(recipe, 4, is_custom_model=True)[0]
    )
