"""Pipeline parallelism: layers on two and four gloo ranks train as on one, in FP8 bit for bit, with the same scales, coverage and state."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8cfg.building.job import Job
from fp8cfg.checkpoint.manifest import read_manifest
from fp8cfg.parallel.process_group import World
from fp8cfg.training import memory_measurement
from tests.support import rank_runs, sharded_checkpoints, whole_checkpoints
from tests.support.pipeline_steps import broken_off, job_of, sent, sharded, sums
from tests.support.ranks import on_ranks
from tools.layout_proof.comparison import wrong_axes

TWO_CHUNKS = "trainer.strategy.virtual_pipeline_model_parallel_size=2"
EXACT = "trainer.gradient_clip_val=0"
CURRENT = "precision=bf16_fp8_current fp8.high_precision_at_start=0 fp8.high_precision_at_end=0"
TIED = "model.share_embeddings_and_output_weights=true"
FEW = "trainer.global_batch_size=4"
"""Two microbatches, not four, of runs that show something else than when each stage has which."""
SMALL = f"{FEW} model.num_layers=2"
"""A layer on each stage as well."""
COMPILED = f"{SMALL} trainer.val_check_interval=0 trainer.compile=on fp8.include=['*linear_qkv','*linear_fc2']"  # a graph for each layer
BITS = {  # name -> words of runs whose losses are those of one rank, bit for bit
    "delayed": f"precision=bf16_fp8 {EXACT} trainer.strategy.pipeline_schedule=1f1b",
    "delayed interleaved": f"precision=bf16_fp8 {EXACT} {TWO_CHUNKS} trainer.strategy.pipeline_schedule=interleaved_1f1b",
    "fp32": f"precision=fp32 {EXACT}",
    "recomputed": f"precision=bf16_fp8 {EXACT} {SMALL} model.recompute_granularity=full",
    "current": f"{CURRENT} {EXACT} {SMALL}",
    "first stage in bf16": f"precision=bf16_fp8_current fp8.high_precision_at_end=0 {EXACT} {SMALL}",
    "mxfp8 interleaved": f"precision=bf16_mxfp8 {EXACT} {FEW} {TWO_CHUNKS}",
    "fp16": f"precision=fp16_fp8 {EXACT} {SMALL} precision.initial_loss_scale=1048576 precision.hysteresis=1",  # the first steps overflow
    "masked": f"precision=fp32 {EXACT} {SMALL} data.eod_mask_loss=true",
    "documents": f"precision=bf16_fp8 {EXACT} {SMALL} data.reset_attention_mask=true data.reset_position_ids=true",
    "zero1": f"precision=bf16_fp8 {EXACT} {SMALL} storage.shard=zero1",
    "torchao": f"{CURRENT} {EXACT} {SMALL} backend=torchao fp8.params=false fp8.output_layer=false",
    "compiled": f"precision=bf16_fp8 {EXACT} {COMPILED}",
    "masters": f"precision=bf16_precision_aware {EXACT} {SMALL} storage.weight_grad=fp8",
    "moments": f"precision=bf16_fp8_te_fused_adam {EXACT} {SMALL}",
    "moments in blocks": f"precision=bf16_fp8_current_coat {EXACT} {FEW} {TWO_CHUNKS} storage.weight_grad=fp8_block",
    "gpt": f"precision=bf16_fp8 {EXACT} {SMALL} model.position_embedding_type=learned_absolute model.max_position_embeddings=32 "
    "model.normalization=LayerNorm model.activation=gelu model.add_bias_linear=true model.sliding_window=9 "
    "model.window_attn_skip_freq=2",
}
CLIPPED = "precision=fp32 trainer.gradient_clip_val=0.1"
NEAR = {  # name -> words, the largest relative difference of a loss, and of a norm
    "clipped": (f"{CLIPPED} {TWO_CHUNKS}", 1e-6, 1e-6),  # the norm is a sum over stages
    "tied": (f"{CLIPPED} {TIED}", 1e-6, 1e-6),  # so is the gradient of the embedding
    "tied delayed": (f"precision=bf16_fp8 {SMALL} {TIED}", 2e-3, 0.05),
    "fsdp compiled": (f"precision=bf16_fp8 storage.shard=fsdp {COMPILED}", 2e-3, 0.05),
}
QUICK = ("delayed", "delayed interleaved", "tied")
SLOW = tuple(name for name in (*BITS, *NEAR) if name not in QUICK)
FOUR = {  # name -> words of runs on four ranks, the axis beside the pipeline, largest relative differences of a loss and a norm
    "tensor": (
        f"{CLIPPED} trainer.strategy.tensor_model_parallel_size=2 trainer.strategy.sequence_parallel=true",
        1e-6,
        1e-5,
    ),
    "tensor nvfp4": (
        f"precision=bf16_nvfp4 {SMALL} fp8.stochastic_rounding=false trainer.strategy.tensor_model_parallel_size=2",
        2e-3,
        0.05,
    ),
    "tensor rows": (
        f"{CURRENT} {SMALL} fp8.granularity=row trainer.strategy.tensor_model_parallel_size=2",
        2e-3,
        0.05,
    ),
    "tensor delayed": (
        f"precision=bf16_fp8 {FEW} {TWO_CHUNKS} {TIED} trainer.strategy.tensor_model_parallel_size=2",
        2e-3,
        0.05,
    ),
    "context": (
        f"{CLIPPED} {FEW} {TWO_CHUNKS} trainer.strategy.context_parallel_size=2",
        1e-6,
        1e-5,
    ),
    "data": (f"{CLIPPED} {TIED} storage.shard=zero1", 1e-6, 1e-5),
    "data zero2": (f"{CLIPPED} {FEW} {TWO_CHUNKS} storage.shard=zero2", 1e-6, 1e-5),
    "data stored": (
        f"precision=bf16_fp8 {SMALL} {TIED} storage.weight_grad=fp8 storage.shard=zero2",
        2e-3,
        0.1,
    ),
    "data delayed": (f"precision=bf16_fp8 {SMALL}", 2e-3, 0.1),
    "data float32 weights": (f"precision=bf16_fp8_amp {FEW} {TIED} {TWO_CHUNKS}", 2e-3, 0.1),
    "data none": (f"{CLIPPED} {TIED} {TWO_CHUNKS} storage.shard=none", 1e-6, 1e-5),
    "data fsdp": (f"{CLIPPED} {TIED} storage.shard=fsdp", 1e-6, 1e-5),
    "data fsdp current": (f"{CURRENT} {FEW} {TWO_CHUNKS} storage.shard=fsdp", 2e-3, 0.1),
}
RESUMED = ("delayed interleaved", "tied")
LONG = ("fp32", "clipped", "tensor")
"""Runs of eight steps: of both schedules, and with split matrices."""
PARTED = ("trainer.strategy", "storage.shard", "model.recompute_granularity", "trainer.compile")
"""Keys of words that are not those of the run on one rank."""
One = Callable[[str], dict[str, Any]]


def words_of(name: str) -> str:
    return BITS[name] if name in BITS else (NEAR | FOUR)[name][0]


def words_of_one(name: str) -> str:
    return " ".join(w for w in words_of(name).split() if not w.startswith(PARTED))


def trained(name: str, world: World, folder: Path | None = None) -> dict[str, Any]:
    """The run of that name, with a checkpoint on the way in `folder`."""
    job, last = (
        job_of(words_of(name), 2, world.size),
        rank_runs.LONG if name in LONG else rank_runs.STEPS,
    )
    return (
        rank_runs.saved(job, world, folder, last)
        if folder
        else rank_runs.trained(job, world, 0, last)
    )


def resumed(words: str, pipeline: int, world: World, folder: Path) -> dict[str, Any]:
    """The rest of a run that goes on from the checkpoint in `folder`."""
    return rank_runs.trained(
        rank_runs.resumed(job_of(words, pipeline, world.size), folder), world, rank_runs.SAVED
    )


def quick_on_two(folder: Path, world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {
        name: trained(name, world, folder / name if name in RESUMED else None) for name in QUICK
    }
    found |= {
        f"{name} from one": resumed(words_of(name), 2, world, folder / f"one {name}")
        for name in RESUMED
    }
    found["sent"] = sent(job_of(words_of("delayed interleaved"), 2, 2), world)
    found["whole"] = said(job_of(words_of("tied"), 2, 2))
    return found


def said(job: Job) -> list[str]:
    """What a job says of itself, and what its parts refuse that are not whole."""
    lines = [str(job)]
    for refuses in (
        job.optimizer.state_dict,
        lambda: job.model(torch.zeros(1, 32, dtype=torch.long)),
    ):
        with pytest.raises(RuntimeError) as e:
            refuses()
        lines.append(str(e.value))
    return lines


def on_two(world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "2"
    found: dict[str, Any] = {name: trained(name, world) for name in SLOW}
    found["memory"] = {
        words: memory_measurement.measure_memory(job_of(words, 2, 2).recipe) for words in MEASURED
    }
    return found


def on_four(folder: Path, world: World) -> dict[str, Any]:
    os.environ["WORLD_SIZE"] = "4"
    found = {name: trained(name, world) for name in FOUR}
    found["sums"] = {name: sums(words_of(name), world) for name in ("data none", "data fsdp")}
    found["broken off"] = broken_off(words_of("data"), world)
    words = f"{words_of('tied')} trainer.strategy.tensor_model_parallel_size=2"
    found["sharded"] = {
        shard: sharded(f"precision=bf16 storage.shard={shard}", world) for shard in SUMS
    }
    for how, its in (("again", words), ("fsdp", words_of("data fsdp"))):
        job = rank_runs.resumed(job_of(its, 2, 4), folder / "tied")
        sharded_checkpoints.saved(job, world, folder / f"tied {how}", rank_runs.SAVED)
        found[f"tied {how}"] = rank_runs.trained(job, world, rank_runs.SAVED)
    return found


SUMS = {"zero1": (3, 3), "zero2": (3, 3 * 4), "fsdp": (1 + 2 * 2 * 4, 3 * 4)}
"""Gathers and sums of two layers and the rest of a stage in a step of four microbatches: fsdp gathers layers for each pass."""


MEASURED = (
    "precision=fp32",
    "precision=bf16",
    "precision=bf16 trainer.global_batch_size=32 model.seq_length=128",
    f"precision=bf16_fp8 model.recompute_granularity=full {TWO_CHUNKS}",
    f"precision=bf16_fp8 {TIED} storage.weight_grad=fp8",
)


@pytest.fixture(scope="module")
def one(folder: Path) -> One:
    """Runs on one rank, one for all layouts of the same words; those that go on elsewhere leave checkpoints in `folder`."""

    @functools.cache
    def run(words: str) -> dict[str, Any]:
        job, last = (
            job_of(words, 1, 1),
            rank_runs.LONG if words in map(words_of_one, LONG) else rank_runs.STEPS,
        )
        for name in RESUMED:
            if words == words_of_one(name):
                return rank_runs.saved(job, World(), folder / f"one {name}", last)
        return rank_runs.trained(job, World(), 0, last)

    return lambda name: run(words_of_one(name))


@pytest.fixture(scope="module")
def quick(one: One, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    for name in RESUMED:
        one(name)
    return on_ranks(2, functools.partial(quick_on_two, folder), tmp_path_factory.mktemp("quick"))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(
    folder: Path, quick: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    return on_ranks(4, functools.partial(on_four, folder), tmp_path_factory.mktemp("four"))


def same_run(name: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """All ranks log one loss and one norm, those of one rank alone, and its coverage; each has the scales of its layers."""
    assert all(
        repr(rank[name][key]) == repr(ranks[0][name][key])
        for rank in ranks
        for key in ("losses", "norms", "val", "stepped")
    )
    found = ranks[0][name]
    want = alone | {key: alone[key][: len(found[key])] for key in ("losses", "norms", "stepped")}
    if name in BITS:
        assert (found["losses"], found["val"]) == (want["losses"], want["val"])
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-6, nan_ok=True)
    else:
        loss, norm = (NEAR | FOUR)[name][1:]
        assert [*found["losses"], *found["val"]] == pytest.approx(
            [*want["losses"], *want["val"]], rel=loss
        )
        assert found["norms"] == pytest.approx(want["norms"], rel=norm)
    assert found["stepped"] == want["stepped"]
    assert all(rank[name].get("coverage") == want.get("coverage") for rank in ranks)
    if "scales" in want:
        assert {key for rank in ranks for key in rank[name]["scales"]} == want["scales"].keys()
        if name in BITS:
            assert all(
                torch.equal(scale, want["scales"][key])
                for rank in ranks
                for key, scale in rank[name]["scales"].items()
            )


@pytest.mark.parametrize("name", QUICK)
def test_two_stages_train_as_one_rank(name: str, quick: list[dict[str, Any]], one: One) -> None:
    same_run(name, quick, one(name))


@pytest.mark.parametrize("name", RESUMED)
def test_runs_resume_on_other_layouts(
    name: str, folder: Path, one: One, quick: list[dict[str, Any]]
) -> None:
    """One rank and two stages go on from one another's checkpoints, which have the same names and numbers."""
    rest, near = slice(rank_runs.SAVED, rank_runs.STEPS), 0.0 if name in BITS else 1e-6
    assert quick[0][f"{name} from one"]["losses"] == pytest.approx(
        one(name)["losses"][rest], rel=near
    )
    alone = resumed(words_of_one(name), 1, World(), folder / name)
    assert alone["losses"] == pytest.approx(quick[0][name]["losses"][rest], rel=near)
    (tensors, state), (theirs, their_state) = (
        whole_checkpoints.load(folder / of / "step-00000001") for of in (name, f"one {name}")
    )
    names, wanted = (
        {group: {*named} for group, named in each.items() if named} for each in (tensors, theirs)
    )
    assert names == wanted
    assert state["optimizer"]["state"] == their_state["optimizer"]["state"]
    size, one_size = (
        sum(file.size for file in read_manifest(folder / of / "step-00000001").files.values())
        for of in (name, f"one {name}")
    )
    assert size < 1.1 * one_size, "nothing is written twice"
    if name in BITS:
        assert all(
            torch.equal(bits(t), bits(theirs[group][k]))
            for group, named in tensors.items()
            if group != "rng"
            for k, t in named.items()
        )
    else:
        assert (
            tensors["model"]["output_layer.weight"].data_ptr()
            == tensors["model"]["embedding.weight"].data_ptr()
        )


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.flatten().view(torch.uint8)


def test_sent_bytes_are_counted(quick: list[dict[str, Any]]) -> None:
    """Two chunks on each of two ranks: three outputs and three gradients, of which the first rank sends two and one."""
    microbatches, samples, tokens, width = 4, 2, 32, 64
    assert [rank["sent"] for rank in quick] == [
        [microbatches * 3 * samples * tokens * width * 2] * 2
    ] * 2


def test_what_is_no_whole_state_is_refused_and_counts_are_those_of_the_whole(
    quick: list[dict[str, Any]],
) -> None:
    summary, state, passes = quick[1]["whole"]
    assert (
        summary.partition(" parameters")[0]
        == str(job_of(words_of_one("tied"), 1, 1)).partition(" parameters")[0]
    )
    assert "that of this rank's layers (pipeline_model_parallel_size)" in state
    assert (
        "pipeline_model_parallel_size: this rank has only some layers of the model" in passes
        and "train with fp8cfg.fit" in passes
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_stages_train_as_one_rank_in_every_precision(
    name: str, two: list[dict[str, Any]], one: One
) -> None:
    same_run(name, two, one(name))
    assert name != "fp16" or (not two[0][name]["stepped"][0] and two[0][name]["stepped"][-1]), (
        "skipped on all stages, and then not"
    )


@pytest.mark.slow
def test_sharded_stages_gather_and_sum_as_they_are_to_and_take_what_is_planned(
    four: list[dict[str, Any]],
) -> None:
    for found in (rank["sharded"] for rank in four):
        for shard, counts in SUMS.items():
            messages = found[shard]["messages"]
            assert (messages["weights"], messages["gradients"]) == counts
            peak, here = found[shard]["memory"].pop("peak")
            assert 0.9 * here <= peak <= 1.15 * here
            for kind, (planned, here) in found[shard]["memory"].items():
                assert here == pytest.approx(planned, rel=0.02, abs=1 << 12), (shard, kind)


@pytest.mark.slow
def test_sums_of_stages_start_in_the_last_backward_pass_of_each(four: list[dict[str, Any]]) -> None:
    """Of the second chunk while the first still goes back. Embedding and output layer are summed with the last layer of their chunk."""
    for number, rank in enumerate(four):
        events = rank["sums"]["data none"]["events"]
        first, second = sorted({name for name in events if name.isdecimal()})
        assert events.count(first) == events.count(second) == 4
        ends = [len(events) - 1 - events[::-1].index(name) for name in (second, first)]
        sums = [
            events[: ends[0]].count("all-reduce"),
            events[ends[0] : ends[1]].count("all-reduce"),
            events[ends[1] :].count("all-reduce"),
        ]
        assert sums == ([0, 1, 2] if number < 2 else [0, 2, 1]), (number, events)
        assert events[ends[0] : ends[1]].count(first) == 1, "its last pass but one follows"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data none", "data fsdp"])
def test_stages_send_what_is_planned(name: str, four: list[dict[str, Any]]) -> None:
    for rank in four:
        sums = rank["sums"][name]
        assert sums["planned"] and not wrong_axes(sums["counted"], sums["planned"])


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_two_times_two_ranks_train_as_one_rank(
    name: str, four: list[dict[str, Any]], one: One
) -> None:
    same_run(name, four, one(name))


@pytest.mark.slow
def test_a_step_goes_as_if_one_that_was_broken_off_had_not_begun(
    four: list[dict[str, Any]],
) -> None:
    assert [rank["broken off"] for rank in four] == [rank["data"]["losses"][:2] for rank in four]


@pytest.mark.slow
def test_other_layouts_go_on_from_stages_and_save_the_same(
    folder: Path, four: list[dict[str, Any]], quick: list[dict[str, Any]]
) -> None:
    for how in ("again", "fsdp"):
        assert four[3][f"tied {how}"]["losses"] == pytest.approx(
            quick[0]["tied"]["losses"][rank_runs.SAVED :], rel=1e-6
        )
    before, *others = (
        whole_checkpoints.load(folder / name / "step-00000001")[0]
        for name in ("tied", "tied again", "tied fsdp")
    )
    assert all(
        torch.equal(t, after[group][k])
        for after in others
        for group in ("model", "optimizer")
        for k, t in before[group].items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_planned_bytes_are_the_measured_ones(words: str, two: list[dict[str, Any]]) -> None:
    for rank in two:
        for kind, (planned, measured) in rank["memory"][words].items():
            if kind in memory_measurement.BOUNDS:
                assert measured == pytest.approx(planned, rel=memory_measurement.BOUNDS[kind]), kind
