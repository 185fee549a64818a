"""Weights split over two ranks by FSDP2: the bits of runs that are not split, and of a loop written by hand with torchao."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.low_bit.columns import local
from fp8cfg.parallel.process_group import SENT, World
from fp8cfg.run_folder.metrics_file import read_metrics
from fp8cfg.training import memory_measurement
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support import sharded_checkpoints, whole_checkpoints
from tests.support.fsdp_runs import (
    CURRENT,
    EVERYWHERE,
    FSDP,
    HAS_TORCHAO,
    NOT_CLIPPED,
    PLAIN,
    SAVED,
    STEPS,
    TORCHAO,
    WHOLE,
    held_out,
    job_of,
    load,
    run,
    save,
)
from tests.support.ranks import launch, on_ranks
from tests.support.small import SMALL, small
from tests.support.whole_tensors import without_fsdp2

NATIVE = {
    "fp32": "precision=fp32",
    "bf16": "precision=bf16",
    "bf16 sums": "precision=bf16 storage.comm=bf16",
    "fp16": "precision=fp16 precision.initial_loss_scale=1024 storage.weight_grad=fp32 storage.comm=fp32",
    "delayed": f"precision=bf16_fp8 {PLAIN}",
    "current": CURRENT,
    "block": f"precision=bf16_fp8_block {PLAIN}",
    "FP8 weights": "precision=bf16_fp8",
    "FP8 weights, current": f"precision=bf16_fp8_current {EVERYWHERE} fp8.params=true",
    "FP8 weights, block": "precision=bf16_fp8_block fp8.params=true",
    "FP8 weights, mxfp8": "precision=bf16_mxfp8",
    "moments": "precision=bf16 storage.exp_avg=bf16 storage.exp_avg_sq=bf16",
    "stored gradients": "precision=bf16 storage.weight_grad=fp8",
    "sgd": "precision=bf16 optim.name=sgd",
    "adam": "precision=bf16 optim.name=adam",
    "recomputed": f"{CURRENT} model.recompute_granularity=full",
}
WITH_TORCHAO = {
    "torchao, bf16": f"{TORCHAO} storage.gather=bf16",
    "torchao, row": f"{TORCHAO} fp8.granularity=row",
    "torchao, mxfp8": f"precision=bf16_mxfp8 {PLAIN} backend=torchao",
    "torchao, fp8": TORCHAO,
    "torchao, fp8, recomputed": f"{TORCHAO} model.recompute_granularity=full",
    "torchao, fp8, tied": f"{TORCHAO} model.share_embeddings_and_output_weights=true fp8.output_layer=true",
}
ROWS = NATIVE | (WITH_TORCHAO if HAS_TORCHAO else {})
SAME = [row for row in ROWS if not row.startswith(("torchao, fp8", "FP8 weights"))]
"""Rows whose products read the same operands as those of the run that is not split."""
HELD = [row for row in ROWS if row.startswith("FP8 weights")]
"""Rows that gather what the run that is not split holds in FP8; their weight gradients have the dtype of what is gathered, bf16."""
RESUMED = [
    row
    for row in ("fp32", "delayed", "FP8 weights", "sgd", "torchao, fp8", "torchao, fp8, tied")
    if row in ROWS
]


def nbytes(tensors: list[Tensor]) -> int:
    return sum(local(t).nbytes for t in tensors)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes handed to torch's own all-gather and reduce-scatter."""
    found = {"all_gather": 0, "reduce_scatter": 0}
    names = {"all_gather": "all_gather_single", "reduce_scatter": "reduce_scatter_single"}
    if not hasattr(dist, "all_gather_single"):
        names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in names.items():
            patch.setattr(dist, name, functools.partial(_counted, found, kind, getattr(dist, name)))
        yield found


def _counted(found: dict[str, int], kind: str, torchs: Any, *args: Any, **options: Any) -> Any:
    found[kind] += (args[1] if len(args) > 1 else options["input"]).nbytes
    return torchs(*args, **options)


def first_weight(job: Job) -> Tensor:
    """A weight of the first layer as its product reads it."""
    layer = job.model.layers[0]
    layer.unshard()
    weight = layer.mlp.linear_fc1.weight
    layer.reshard()
    return weight


def on_two(folder: Path, world: World) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for row, its in ROWS.items():
        job = job_of(its, FSDP, NOT_CLIPPED)
        losses = run(job, world, 0, SAVED)
        if row in RESUMED:
            save(job, world, folder / row)
        SENT.clear()
        with counted() as handed:
            losses += run(job, world, SAVED, SAVED + 1)
        sent = dict(SENT.bytes)
        if job.recipe.fp8.enabled:
            job.prove()
        validation = held_out(job, world)
        losses += run(job, world, SAVED + 1, STEPS)
        kept = {
            kind: nbytes(tensors)
            for kind, tensors in (
                *memory_measurement.persistent_tensors(job).items(),
                ("gradients", memory_measurement.gradient_tensors(job)),
            )
        }
        whole = (
            job_of(its.partition(" storage.gather")[0], WHOLE, NOT_CLIPPED)
            if row in SAME or row in HELD
            else None
        )
        found[row] = {
            "losses": losses,
            "sent": sent,
            "handed": [handed["all_gather"], handed["reduce_scatter"]],
            "kept": kept,
            "validation": validation,
            "whole": run(whole, world, 0, STEPS) if whole else [],
            "elements": sum(p.numel() for p in job.model.parameters()),
            "weight": type(first_weight(job)).__name__
            + " "
            + str(getattr(first_weight(job), "_data", first_weight(job)).dtype),
        }
    for row in RESUMED:
        job = load(job_of(ROWS[row], FSDP, NOT_CLIPPED), folder / row)
        found[row]["resumed"] = run(job, world, SAVED, STEPS)
    found["unsplit"] = run(
        load(job_of(ROWS["fp32"], WHOLE, NOT_CLIPPED), folder / "fp32"), world, SAVED, STEPS
    )
    job = job_of(ROWS["bf16"], FSDP, NOT_CLIPPED, "trainer.micro_batch_size=2")
    found["microbatches"] = run(job, world, 0, STEPS)
    job = job_of("precision=fp16 precision.initial_loss_scale=1e30 precision.hysteresis=1", FSDP)
    before = local(job.model.final_layernorm.weight).clone()
    skipped = train_step(job, run_data(job.recipe)[0], 0, world).wait()
    found["skipped"] = [
        skipped.stepped,
        torch.equal(before, local(job.model.final_layernorm.weight)),
        job.loss_scaler.scale,
    ]
    if HAS_TORCHAO:
        found["ours"] = [
            [loss for loss, _ in run(job_of(TORCHAO, FSDP, *words.split()), world, 0, STEPS)]
            for words in BY_HAND
        ]
        found["by hand"] = [by_hand(words, world) for words in BY_HAND]
    return found


BY_HAND = (
    "",
    "precision.compute=fp32",
    "fp8.format=e4m3 storage.comm=bf16",
    "fp8.override_linear_precision.wgrad=true",
)


def by_hand(words: str, world: World) -> list[float]:
    """The run without us: torchao's conversion, FSDP2, torch's AdamW, a loop."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )
    from torchao.float8.config import CastConfig, ScalingType

    with without_fsdp2():
        recipe, plain = small(*TORCHAO.split(), *words.split()), job_of("precision=fp32", WHOLE)
    gradient = torch.float8_e4m3fn if recipe.fp8.format == "e4m3" else torch.float8_e5m2
    high = {
        "cast_config_input_for_grad_weight": CastConfig(ScalingType.DISABLED),
        "cast_config_grad_output_for_grad_weight": CastConfig(
            ScalingType.DISABLED, target_dtype=gradient
        ),
    }
    config = Float8LinearConfig(
        enable_fsdp_float8_all_gather=True,
        emulate=True,
        cast_config_grad_output=CastConfig(target_dtype=gradient),
        **(high if recipe.fp8.override_linear_precision.wgrad else {}),
    )
    model = convert_to_float8_training(
        plain.model, module_filter_fn=lambda _, name: name.startswith("layers."), config=config
    )
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "auto": torch.float32}
    policy = MixedPrecisionPolicy(
        dtypes[recipe.precision.compute], dtypes[recipe.storage.comm], cast_forward_inputs=False
    )
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not average
    o, (batches, _) = recipe.optim, run_data(recipe)
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) == wide] for wide in (True, False)
    )
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": o.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=o.lr,
        betas=o.betas,
        eps=o.eps,
        fused=True,
    )
    losses = []
    for step in range(STEPS):
        tokens, targets = batches.batch(step, world.rank, world.size, 0, 1)
        loss = model(tokens, targets)
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), recipe.trainer.gradient_clip_val, norm)
        plain.schedule.apply(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
        precompute_float8_dynamic_scale_for_fsdp(model)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / world.size)
    return losses


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, functools.partial(on_two, folder), folder)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_split_run_has_the_bits_of_one_that_is_not(
    row: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    first, second = (found[row] for found in two[1])
    assert first["losses"] == second["losses"] and first["validation"] == second["validation"]
    losses = [loss for loss, _ in first["losses"]]
    assert losses[-1] < losses[0]
    if row in SAME:
        assert losses == [loss for loss, _ in first["whole"]]
        assert [norm for _, norm in first["losses"]] == pytest.approx(
            [norm for _, norm in first["whole"]], rel=1e-5
        )
    if row in HELD:
        whole = [loss for loss, _ in first["whole"]]
        assert losses == pytest.approx(whole, rel=2e-4) and (
            losses[0] == whole[0] or row.endswith(("mxfp8", "block"))
        )  # gathered in bf16, in part


@pytest.mark.slow
@pytest.mark.skipif(not HAS_TORCHAO, reason="torchao is not installed")
def test_torchaos_fp8_gather_equals_a_loop_written_by_hand(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    first, second = two[1]
    assert first["ours"] == first["by hand"] == second["ours"] == second["by hand"]
    assert len({tuple(losses) for losses in first["ours"]}) == len(BY_HAND)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_a_rank_keeps_half_and_sends_what_is_counted(
    row: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    first, second = (found[row] for found in two[1])
    elements = first["elements"]
    for kind, each in (
        ("weights", 4),
        ("moments", 4 if row in ("sgd", "moments") else 8),
        ("gradients", 4),
        ("masters", 0),
    ):
        if kind == "gradients" and row == "stored gradients":  # of linear layers
            assert elements / 2 < first["kept"][kind] == second["kept"][kind] < elements * 1.5
            continue
        assert first["kept"][kind] == second["kept"][kind] == elements * each / 2
    gathered, reduced = first["handed"]
    assert first["sent"] == second["sent"] == {"weights": gathered, "gradients": reduced / 2}
    assert reduced == elements * (2 if row == "bf16 sums" else 4)


@pytest.mark.slow
def test_weights_are_gathered_in_their_codec(two: tuple[Path, list[dict[str, Any]]]) -> None:
    found = two[1][0]
    fp8 = [row for row in ROWS if row.startswith("torchao, fp8")]
    assert {row: found[row]["weight"] for row in fp8} == dict.fromkeys(
        fp8, "Float8TrainingTensor torch.float8_e4m3fn"
    )
    gathered = [row for row in HELD if not row.endswith("mxfp8")]
    assert {row: found[row]["weight"] for row in gathered} == dict.fromkeys(
        gathered, "GatheredWeight torch.float8_e4m3fn"
    )
    assert (
        found["FP8 weights, mxfp8"]["weight"] == "Parameter torch.bfloat16"
        and found["FP8 weights"]["sent"]["weights"] < found["delayed"]["sent"]["weights"]
    )
    wide = {"fp32": "Parameter torch.float32", "fp16": "Parameter torch.float16"}
    assert {row: found[row]["weight"] for row in SAME} == {
        row: wide.get(row, "Parameter torch.bfloat16") for row in SAME
    }
    if fp8:
        narrow, sent = (
            found["torchao, fp8"]["sent"]["weights"],
            found["torchao, bf16"]["sent"]["weights"],
        )
        layers = (
            2
            * sum(
                p.numel()
                for n, p in fp8cfg.build(small("precision=fp32")).model.named_parameters()
                if "layers" in n and p.dim() > 1
            )
            // 2
        )
        assert sent - narrow == layers, (
            "a byte less for each element of linear layers, forward and backward, from half of them"
        )


@pytest.mark.slow
@pytest.mark.parametrize("row", RESUMED)
def test_two_ranks_resume_bit_for_bit(row: str, two: tuple[Path, list[dict[str, Any]]]) -> None:
    for found in two[1]:
        assert found[row]["resumed"] == found[row]["losses"][SAVED:]


@pytest.mark.slow
@pytest.mark.parametrize("row", RESUMED)
def test_one_rank_goes_on_from_whole_tensors(
    row: str, two: tuple[Path, list[dict[str, Any]]]
) -> None:
    folder, ranks = two
    tensors, _ = whole_checkpoints.load(folder / row / f"step-{SAVED:08d}")
    job = load(job_of(ROWS[row], FSDP, NOT_CLIPPED, "trainer.micro_batch_size=8"), folder / row)
    again, _ = whole_checkpoints.collect(job, run_data(job.recipe)[0], SAVED)
    for group in tensors.keys() - {"rng"}:
        assert again[group].keys() == tensors[group].keys()
        assert all(
            type(t) is Tensor
            and torch.equal(t, tensors[group][name])
            and t.dtype == tensors[group][name].dtype
            for name, t in again[group].items()
        )
    whole = fp8cfg.build(small(*ROWS[row].split(), "storage.weight=fp32"))
    assert {n: t.shape for n, t in stored_state_dict(whole.model).items()} == {
        n: t.shape for n, t in {**tensors["model"], **tensors.get("fp8", {})}.items()
    }
    want = [loss for loss, _ in ranks[0][row]["losses"][SAVED:]]
    assert [loss for loss, _ in run(job, World(), SAVED, STEPS)] == pytest.approx(want, abs=2e-3)


@pytest.mark.slow
def test_a_run_in_float32_goes_on_without_being_split(
    two: tuple[Path, list[dict[str, Any]]],
) -> None:
    first = two[1][0]
    assert [loss for loss, _ in first["unsplit"]] == [
        loss for loss, _ in first["fp32"]["losses"][SAVED:]
    ]


@pytest.mark.slow
def test_microbatches_add_up_in_float32(two: tuple[Path, list[dict[str, Any]]]) -> None:
    first = two[1][0]
    assert [loss for loss, _ in first["microbatches"]] == pytest.approx(
        [loss for loss, _ in first["bf16"]["losses"]], abs=1e-3
    )


@pytest.mark.slow
def test_a_step_is_skipped_on_all_ranks(two: tuple[Path, list[dict[str, Any]]]) -> None:
    assert [found["skipped"] for found in two[1]] == [[False, True, 5e29]] * 2


def on_three(folder: Path, world: World) -> dict[str, Any]:
    three = "trainer.global_batch_size=6 trainer.micro_batch_size=2"
    padded = [
        run(job_of(ROWS["FP8 weights"], shard, NOT_CLIPPED, three), world, 0, 3)
        for shard in (FSDP, "storage.shard=none")
    ]
    split, whole = (
        job_of(
            ROWS["bf16"],
            shard,
            NOT_CLIPPED,
            "trainer.global_batch_size=6 trainer.micro_batch_size=2",
        )
        for shard in (FSDP, WHOLE)
    )
    found = {"split": run(split, world, 0, 2), "whole": run(whole, world, 0, 2)}
    return {
        **found,
        "padded": padded,
        "tensors": sharded_checkpoints.whole(split, world)["model"],
        "want": sharded_checkpoints.whole(whole, world)["model"],
    }


@pytest.mark.slow
def test_parts_of_other_sizes_make_the_same_whole(tmp_path: Path) -> None:
    first = on_ranks(3, functools.partial(on_three, tmp_path), tmp_path)[0]
    assert [loss for loss, _ in first["split"]] == [loss for loss, _ in first["whole"]]
    assert all(
        torch.equal(t.bfloat16(), first["want"][name]) for name, t in first["tensors"].items()
    )
    (one, *more), whole = ([loss for loss, _ in losses] for losses in first["padded"])
    assert one == whole[0] and more == pytest.approx(whole[1:], rel=2e-4)


@pytest.mark.slow
def test_a_run_of_two_ranks_says_what_it_sends_and_goes_on_with_one(tmp_path: Path) -> None:
    words = (
        f"{CURRENT} {FSDP} trainer.max_steps=4 checkpoint.keep=2 trainer.micro_batch_size=4 log.dir={tmp_path} log.level=debug"
    ).split()
    done = launch(2, *SMALL, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "weights are sharded over the ranks and gathered in bf16\n" in done.stdout
    said = " ".join(done.stdout.split())
    assert re.search(
        r"sent in a step by the first rank: weights [\d.]+ KiB in 5 messages, gradients [\d.]+ KiB in 3 messages",
        said,
    )
    (folder,) = tmp_path.iterdir()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert len({line["sent_bytes"] for line in lines}) == 1, "validation in between changes nothing"
    (folder / "checkpoints/step-00000004/MANIFEST.json").unlink()
    one = launch(1, "resume", str(folder))
    assert one.returncode == 0 and "from step-00000002" in one.stdout, one.stderr
    assert [
        line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line
    ] == pytest.approx([line["loss"] for line in lines], abs=2e-3)
