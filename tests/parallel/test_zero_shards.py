"""ZeRO and one shard by FSDP2 on two ranks: the bits of a run that sums whole gradients after its passes, in losses, state and checkpoints, and what a rank keeps."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.job_tensors import checkpoint_bytes
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate, validation_batches
from fp8cfg.training.step import train_step
from tests.support import rank_runs, sharded_checkpoints
from tests.support.measured_memory import measured, over_plan
from tests.support.ranks import on_ranks
from tests.support.small import small
from tests.support.traced import trace_model
from tests.support.whole_tensors import WHOLE, shard_word, without_fsdp2

ROWS = {
    "fp32": "precision=fp32",
    "bf16": "precision=bf16",
    "fp16": "precision=fp16 precision.initial_loss_scale=65536 storage.weight_grad=fp32 storage.comm=fp32",
    "FP8 weights": "precision=bf16_fp8 model.share_embeddings_and_output_weights=true fp8.output_layer=true",
    "current": "precision=bf16_fp8_current fp8.params=true fp8.keep_transpose_cache=true fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "blocks": "precision=bf16_fp8_block fp8.params=true fp8.keep_transpose_cache=true fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "MX": "precision=bf16_mxfp8 fp8.params=true fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "rows": "precision=bf16_fp8_current fp8.granularity=row fp8.params=true fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "nvfp4": "precision=bf16_nvfp4 fp8.params=true fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "moments by tensor": "precision=bf16_fp8_te_fused_adam",
    "moments in blocks": "precision=bf16 storage.exp_avg=fp8_expand storage.exp_avg_sq=fp8_block model.hidden_size=256",
    "cut blocks": "precision=bf16_fp8_current_coat",
    "bf16 sums": "precision=bf16 storage.comm=bf16",
    "bf16 gradients": "precision=bf16 storage.weight_grad=bf16",
    "gradients by tensor": "precision=bf16_fp8 storage.weight_grad=fp8 model.share_embeddings_and_output_weights=true fp8.output_layer=true",
    "gradients in blocks": "precision=fp32 storage.weight_grad=fp8_block model.hidden_size=256",
    "weights in FP8": "precision=bf16 storage.weight=fp8 model.share_embeddings_and_output_weights=true",
    "weights in fp16": "precision=bf16 storage.weight=fp16 storage.weight_grad=bf16",
    "fp16 beside FP8": "precision=bf16_mxfp8 fp8.params=false storage.weight=fp16_scaled fp8.high_precision_at_start=0 fp8.high_precision_at_end=0",
    "momentum": "precision=bf16 optim.name=sgd optim.momentum=0.9 optim.lr=0.1",
    "float32 weights": "precision=bf16_fp8_amp model.share_embeddings_and_output_weights=true",
    "fp16 AMP": "precision=fp16_amp precision.initial_loss_scale=65536",
}
CUT, NORMS = "cut blocks", 3 * 64
"""A row whose shards of norms are parts of blocks, and the elements of these."""
SHARDS = ("none", "zero1", "zero2")
ONE = (
    "fp32",
    "bf16",
    "FP8 weights",
    "blocks",
    "MX",
    "moments in blocks",
    "cut blocks",
    "bf16 sums",
    "bf16 gradients",
    "gradients by tensor",
    "weights in FP8",
    "momentum",
    "float32 weights",
)
"""Rows with a run of none."""
ONCE = ("fp16 beside FP8", "current", "rows", "nvfp4", "moments by tensor", "momentum", "fp16 AMP")
"""Rows without a run of zero2, which is zero1 but for when gradients are summed: their weights and moments see nothing of that."""
RUNS = [
    (row, shard)
    for row in ROWS
    for shard in (WHOLE, *SHARDS)
    if (shard != "zero2" or row not in ONCE) and (shard != "none" or row in ONE)
]
RESUMED = [
    ("fp32", "zero1", "none"),
    ("FP8 weights", "none", "zero1"),
    ("FP8 weights", "zero2", "none"),
    ("momentum", "zero1", "zero2"),
    ("bf16", "none", "zero2"),
    ("current", "zero1", "zero1"),
    ("MX", "none", "zero1"),
    ("blocks", "zero2", "none"),
    ("moments by tensor", "zero1", "none"),
    ("moments in blocks", "none", "zero2"),
    ("cut blocks", "none", "zero1"),
    ("cut blocks", "zero1", "none"),
    ("gradients in blocks", "zero2", "none"),
    ("weights in FP8", "none", "zero1"),
    ("weights in FP8", "zero2", "none"),
    ("weights in fp16", "zero1", "none"),
    ("fp16 beside FP8", WHOLE, "zero1"),
    ("float32 weights", "zero1", "none"),
    ("float32 weights", "none", "zero2"),
]
MEASURED = (
    "precision=bf16 storage.shard=none model.seq_length=128 trainer.global_batch_size=4",
    "precision=bf16 storage.shard=none storage.comm=bf16 model.seq_length=32",
    "precision=bf16 storage.shard=none storage.weight_grad=fp8 storage.comm=fp8 storage.accumulate=stored model.seq_length=32",
    "precision=fp16 precision.initial_loss_scale=128 storage.shard=zero1 model.num_layers=2 model.seq_length=32",
    "precision=bf16 storage.comm=bf16 storage.shard=zero1",
    "precision=bf16 storage.weight_grad=bf16 storage.shard=zero1",
    "precision=bf16_fp8_te_fused_adam storage.shard=zero1",
    "precision=bf16_fp8_current_coat storage.shard=zero2",
    "precision=bf16_mxfp8 fp8.params=true storage.shard=zero1",
    "precision=bf16 storage.weight=fp8 storage.shard=zero1 trainer.micro_batch_size=8",
    "precision=bf16_fp8 storage.weight_grad=fp8 storage.shard=zero2",
    "precision=bf16 storage.weight_grad=fp8_block storage.shard=zero1",
    "precision=bf16_fp8 fp8.keep_transpose_cache=true storage.shard=zero1",
    "precision=bf16 storage.shard=zero2",
    "precision=fp32 storage.shard=zero1",
    "precision=fp16_amp precision.initial_loss_scale=128 storage.shard=zero1",
    "precision=bf16 storage.weight=fp16 storage.shard=zero1 model.num_layers=1 model.seq_length=256 trainer.global_batch_size=4",
    "precision=bf16 storage.shard=zero2 trainer.global_batch_size=8",
    "precision=bf16 storage.shard=zero2 storage.comm=bf16 model.seq_length=32",
    "precision=bf16 storage.shard=zero1 model.num_layers=2 model.seq_length=64 trainer.micro_batch_size=1 trainer.global_batch_size=4",
)
"""The last four are of one pass, whose peak is in the forward pass; of two; and of few tokens, where the sum of a layer's gradients is
the peak."""
SAVED, STEPS = 1, 3
"""Steps of a run before it is saved, and in all."""
NOT_CLIPPED = (
    "trainer.gradient_clip_val=0"  # norms are added up in another order, and nothing else is
)


def job_of(*words: str) -> Job:
    return fp8cfg.build(
        small(
            *" ".join(words).split(),
            "model.num_layers=1",
            "model.ffn_hidden_size=112",
            "optim.warmup_steps=0",
            NOT_CLIPPED,
        )
    )


def sharded(row: str, shard: str) -> Job:
    with without_fsdp2(shard == WHOLE):
        return job_of(
            ROWS[row], shard_word(shard), "trainer.micro_batch_size=2"
        )  # two microbatches


def tiny(words: str) -> Recipe:
    """llama_tiny with `words`; of half its layers and fewer tokens, where the peak is that of its state."""
    less = ("model.num_layers=2", "model.seq_length=128", "trainer.micro_batch_size=2")
    return fp8cfg.compose(
        [
            "recipe=llama_tiny",
            "data=tiny",
            *(w for w in less if w.split("=")[0] not in words),
            *words.split(),
        ]
    )


def broken_off(shard: str, world: World) -> list[list[float]]:
    """Two steps after errors in the first: before all passes, in the midst of the first, and in the second microbatch; and one of a
    loop written by hand after another in the second microbatch, and after the last one, beside those of a job without errors."""
    job = job_of("precision=fp32", f"storage.shard={shard}", "trainer.micro_batch_size=2")
    for module, passes in (
        (job.model, 0),
        (job.model.final_layernorm, 0),
        (job.model.final_layernorm, 1),
    ):
        breaks_off(job, world, module, passes)
    losses, unbroken = (
        run(job, world, 0, 2),
        job_of("precision=fp32", f"storage.shard={shard}", "trainer.micro_batch_size=2"),
    )
    breaks_off(job, world, job.model.final_layernorm, 1)
    run(unbroken, world, 0, 2)
    losses += [by_hand(job, world), by_hand(unbroken, world)]
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(ZeroDivisionError),
    ):  # when all passes are done
        patch.setattr("fp8cfg.training.step.sum_gradients", lambda *_: 1 // 0)
        run(job, world, 0, 1)
    return [*losses, by_hand(job, world), by_hand(unbroken, world)]


def breaks_off(job: Job, world: World, module: torch.nn.Module, passes: int) -> None:
    """A step that ends with an error after so many `passes` through `module`."""
    left = iter(range(passes))

    def breaks(module: torch.nn.Module, args: Any) -> None:
        if next(left, None) is None:
            raise ZeroDivisionError

    handle = module.register_forward_pre_hook(breaks, prepend=True)
    with pytest.raises(ZeroDivisionError):
        run(job, world, 0, 1)
    handle.remove()


def by_hand(job: Job, world: World) -> list[float]:
    """The loss on this rank and the gradient norm of a step of one microbatch."""
    job.optimizer.zero_grad()
    loss = job.model(*run_data(job.recipe)[0].batch(0, world.rank, world.size, 0, 2))
    job.backward(loss, world.size)
    job.sum_gradients()
    job.optimizer.step()
    return [loss.item(), job.optimizer.grad_norm]


def run(job: Job, world: World, first: int, last: int) -> list[list[float]]:
    batches, _ = run_data(job.recipe)
    return [
        [s.loss, s.grad_norm]
        for s in (train_step(job, batches, step, world).wait() for step in range(first, last))
    ]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(local(t).nbytes for t in tensors)


def on_two(folder: Path, world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row, shard in RUNS:
        job = sharded(row, shard)
        losses = run(job, world, 0, SAVED)
        if (row, shard) in {(its, before) for its, before, _ in RESUMED}:
            sharded_checkpoints.saved(job, world, folder / f"{row} {shard}", SAVED)
        world.traffic.clear()
        losses += run(job, world, SAVED, SAVED + 1)
        sent = dict(world.traffic.messages)
        validation = evaluate(
            job, validation_batches(job.recipe, run_data(job.recipe)[1], world), world
        )
        losses += run(job, world, SAVED + 1, STEPS)
        if job.recipe.fp8.enabled:
            job.prove()
        kept = {
            kind: nbytes(tensors)
            for kind, tensors in (
                *memory_measurement.persistent_tensors(job).items(),
                ("gradients", memory_measurement.gradient_tensors(job)),
            )
        }
        found[f"{row} {shard}"] = {
            "losses": losses,
            "validation": validation,
            "kept": kept,
            "state": sharded_checkpoints.whole(job, world),
            "messages": sent,
            "json": job.optimizer.state_json(),
            "fsdp2": job.prepared.fsdp2,
            "bytes": checkpoint_bytes(job, world),
            "elements": sum(p.numel() for p in job.model.parameters()),
        }
    for row, before, now in RESUMED:
        job = rank_runs.resumed(
            job_of(ROWS[row], f"storage.shard={now}", "trainer.micro_batch_size=2"),
            folder / f"{row} {before}",
            SAVED,
        )
        found[f"{row} {before} {now}"] = run(job, world, SAVED, STEPS)
    eager, compiled = (
        job_of(
            "precision=bf16_fp8 fp8.include=['*linear_fc2'] storage.shard=zero1 trainer.micro_batch_size=2"
        )
        for _ in range(2)
    )
    trace_model(compiled)
    found["compiled"] = [run(job, world, 0, 2) for job in (eager, compiled)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")  # torchrun's, for the plan
        found["memory"] = {words: measured(tiny(words), world, 0.03) for words in MEASURED}
    for shard in SHARDS:
        found[f"broken off {shard}"] = broken_off(shard, world)
    for grad in ("auto", "fp8"):
        job = job_of(
            f"precision=fp16 precision.initial_loss_scale=1e30 precision.hysteresis=1 storage.weight_grad={grad}",
            "trainer.micro_batch_size=2",
            "storage.shard=zero1",
        )
        before = local(job.model.final_layernorm.weight).clone()
        skipped = train_step(job, run_data(job.recipe)[0], 0, world).wait()
        found[f"skipped {grad}"] = [
            skipped.stepped,
            torch.equal(before, local(job.model.final_layernorm.weight)),
            job.loss_scaler.scale,
        ]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


def same(a: dict[str, dict[str, Tensor]], b: dict[str, dict[str, Tensor]]) -> list[str]:
    """Names of what differs."""
    names = {(group, name) for found in (a, b) for group in found for name in found[group]}
    return [
        f"{group} {name}"
        for group, name in sorted(names)
        if name not in a[group]
        or name not in b[group]
        or a[group][name].dtype != b[group][name].dtype
        or not torch.equal(sharded_bits(a[group][name]), sharded_bits(b[group][name]))
    ]


def sharded_bits(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "shard"), [run for run in RUNS if run[1] != WHOLE])
def test_a_sharded_run_has_the_bits_of_the_unsharded_one(
    row: str, shard: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole = two[1][0][f"{row} {WHOLE}"]
    for found in (rank[f"{row} {shard}"] for rank in two[1]):
        assert found["fsdp2"] and not whole["fsdp2"]
        if (
            row == CUT and shard != "none"
        ):  # moments of norms, whose shards are no whole blocks, are float32
            assert [loss for loss, _ in found["losses"]] == pytest.approx(
                [loss for loss, _ in whole["losses"]], rel=1e-5
            )
            assert {
                name: t["codecs"]["exp_avg"] == "fp32" for name, t in found["json"]["state"].items()
            } == {name: "norm" in name for name in found["json"]["state"]}
            continue
        if shard != "zero2":  # which sums over ranks before it does over microbatches
            assert [loss for loss, _ in found["losses"]] == [
                loss for loss, _ in whole["losses"]
            ] and found["validation"] == whole["validation"]
            assert same(found["state"], whole["state"]) == [], (
                "a checkpoint of the sharded run is that of the unsharded one"
            )
        assert [x for both in found["losses"] for x in both] == pytest.approx(
            [x for both in whole["losses"] for x in both],
            rel=1e-3
            if shard == "zero2" and row in ("bf16 sums", "bf16 gradients", "weights in fp16")
            else 2e-5
            if shard == "zero2"
            else 1e-6,
        )
        assert found["json"] == whole["json"] and found["bytes"] == whole["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(("row", "shard"), [run for run in RUNS if run[1] in ("zero1", "zero2")])
def test_a_rank_keeps_half_of_masters_moments_and_gradients(
    row: str, shard: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole = two[1][0][f"{row} {WHOLE}"]
    first, second = (found[f"{row} {shard}"]["kept"] for found in two[1])
    assert (
        first["masters"] + first["weights"] + second["masters"] + second["weights"]
        == 4 * whole["elements"]
    )
    wide = NORMS * (8 - 2 * (1 + 8 / 128)) if row == CUT else 0
    assert first["moments"] + second["moments"] == pytest.approx(
        whole["kept"]["moments"] + wide, abs=256
    )  # both have the scales of whole tensors
    if row.startswith("gradients"):
        assert (
            first["gradients"] + second["gradients"]
            == pytest.approx(whole["kept"]["gradients"], abs=256)
            and whole["kept"]["gradients"] < 2.5 * whole["elements"]
        )
    else:
        assert first["gradients"] + second["gradients"] == 4 * whole["elements"]
    assert abs(first["moments"] - second["moments"]) < 0.02 * first["moments"]


@pytest.mark.slow
@pytest.mark.parametrize("row", ONE)
def test_one_shard_is_kept_whole(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    whole, *every = (
        two[1][0][f"{row} {WHOLE}"]["kept"],
        *(found[f"{row} none"]["kept"] for found in two[1]),
    )
    for kept in every:
        assert kept["masters"] == 4 * two[1][0][f"{row} none"]["elements"] and not kept["weights"]
        assert [kept["moments"], kept["gradients"]] == [
            whole["moments"],
            kept["masters"] if row == "bf16 gradients" else whole["gradients"],
        ]


@pytest.mark.slow
def test_compiled_layers_give_the_eager_bits(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """Gradients of gathered weights among them, which are float32 either way."""
    for found in two[1]:
        assert found["compiled"][0] == found["compiled"][1]


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_drops_what_one_before_it_left_that_was_broken_off(
    shard: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    for found in two[1]:
        *losses, second, unbroken, last, whole = found[f"broken off {shard}"]
        assert losses == found[f"fp32 {shard}"]["losses"][:2] and [second, last] == [
            unbroken,
            whole,
        ]


@pytest.mark.slow
@pytest.mark.parametrize("words", MEASURED)
def test_the_plan_is_what_is_measured(words: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in (dict(rank["memory"][words]) for rank in two[1]):
        peak, here = found.pop("peak")
        assert not over_plan(peak, here, 0.03) and peak <= 1.03 * here
        if any(word in words for word in ("coat", "fused", "weight_grad=fp8", "weight=fp16")):
            planned, here = found.pop("optimizer step")  # pieces, of which codecs need more or less
            assert 0.75 * here <= planned <= 1.6 * here
        for kind, (planned, here) in found.items():
            assert here == pytest.approx(planned, rel=0.01, abs=1 << 12), kind


@pytest.mark.slow
@pytest.mark.parametrize(("row", "before", "now"), RESUMED)
def test_two_ranks_resume_sharded_like_before_or_not(
    row: str, before: str, now: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    whole, resumed = two[1][0][f"{row} {before}"], two[1][0][f"{row} {before} {now}"]
    assert resumed == two[1][1][f"{row} {before} {now}"]
    assert [loss for loss, _ in resumed] == pytest.approx(
        [loss for loss, _ in whole["losses"][SAVED:]], rel=2e-5
    )


@pytest.mark.slow
def test_weights_are_gathered_once_a_step(two: tuple[Path, list[dict[str, Any]]]) -> None:
    """Of two groups, a layer and the rest; gradients under zero2 once for each microbatch."""
    for found in two[1]:
        assert found["bf16 none"]["messages"] == {"gradients": 2}
        assert found["bf16 zero1"]["messages"] == {"weights": 2, "gradients": 2}
        assert found["bf16 zero2"]["messages"] == {"weights": 2, "gradients": 4}


@pytest.mark.slow
@pytest.mark.parametrize("grad", ["auto", "fp8"])
def test_a_gradient_that_is_not_finite_skips_the_step(
    grad: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    for found in two[1]:
        stepped, unchanged, scale = found[f"skipped {grad}"]
        assert not stepped and unchanged and scale < 1e30
