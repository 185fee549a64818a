"""Collectives of a step, counted and in their order: those of loops written by hand with torch's FSDP2 and DDP, and under way while layers still go back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8cfg
from fp8cfg.job import Job
from fp8cfg.training.data import run_data
from fp8cfg.training.distributed import overlapped_sums
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import train_step
from tests.support.collective_events import Events
from tests.support.ranks import on_ranks
from tests.support.small import small

LAYERS, MICROBATCHES = 3, 2
SHARDS = ("zero1", "zero2", "fsdp")


def job_of(*words: str) -> Job:
    return fp8cfg.build(small(f"model.num_layers={LAYERS}", f"trainer.micro_batch_size={4 // MICROBATCHES}", *words))


def say_embedded(model: nn.Module, events: Events) -> None:
    """Let `events` have the end of each backward pass through the layers, which the embedding's own follows."""
    def embedded(module: nn.Module, args: Any, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda gradient: events.found.append(("layers are back", 0)))

    model.embedding.register_forward_hook(embedded)


def ours(shard: str, world: World) -> list[tuple[str, int]]:
    job, events = job_of("precision=bf16", f"storage.shard={shard}"), Events()
    batches, _ = run_data(job.recipe)
    train_step(job, batches, 0, world)
    say_embedded(job.model, events)
    with events:
        train_step(job, batches, 1, world)
    return events.of("gather", "reduce-scatter", "layers are back")


def by_hand(shard: str, world: World) -> list[tuple[str, int]]:
    """Without us: FSDP2, torch's AdamW, a loop."""
    plain, events = job_of("precision=fp32", "storage.shard=none"), Events()
    model, policy = plain.model, MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for module in (*model.layers, model):
        fully_shard(module, mp_policy=policy, reshard_after_forward=None if shard == "fsdp" else False)
        module.set_force_sum_reduction_for_comms(True)  # gloo does not average
    optimizer, (batches, _) = torch.optim.AdamW(model.parameters(), fused=True), run_data(plain.recipe)

    def step(number: int) -> None:
        for i in range(MICROBATCHES):
            if shard != "fsdp":
                model.set_requires_gradient_sync(shard == "zero2" or i + 1 == MICROBATCHES)
                model.set_reshard_after_backward(i + 1 == MICROBATCHES)
            model(*batches.batch(number, world.rank, world.size, i, MICROBATCHES)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    say_embedded(model, events)
    with events:
        step(1)
    return events.of("gather", "reduce-scatter", "layers are back")


WIDE = ("storage.shard=none", "model.hidden_size=256", "model.ffn_hidden_size=512", "trainer.gradient_clip_val=0")  # six buckets


def whole(world: World) -> list[tuple[str, int]]:
    """A step of ours where every rank has all gradients, in buckets of 1 MiB."""
    job, events = job_of(*WIDE, "precision=fp32"), Events()
    batches, _ = run_data(job.recipe)
    train_step(job, batches, 0, world)
    say_embedded(job.model, events)
    with events:
        train_step(job, batches, 1, world)
    return [event for event in events.of("all-reduce", "layers are back") if event[1] != 4]  # but of the loss, a number


def by_ddp(world: World) -> list[tuple[str, int]]:
    """The same by torch's DistributedDataParallel."""
    plain, events = job_of(*WIDE, "precision=fp32"), Events()
    model = nn.parallel.DistributedDataParallel(plain.model, bucket_cap_mb=1)
    (batches, _), found = run_data(plain.recipe), events.found

    def reduced(_, bucket):  # DDP refuses annotations that are text
        found.append(("all-reduce", bucket.buffer().nbytes))
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    model.register_comm_hook(None, reduced)
    say_embedded(plain.model, events)
    for number in range(2):
        found.clear()
        for i in range(MICROBATCHES):
            with model.no_sync() if i + 1 < MICROBATCHES else nullcontext():
                model(*batches.batch(number, world.rank, world.size, i, MICROBATCHES)).backward()
    return found


def on_two(world: World) -> dict[str, Any]:
    def each(run: Callable[[str, World], list[tuple[str, int]]]) -> dict[str, list[list[Any]]]:
        return {shard: [list(event) for event in run(shard, world)] for shard in SHARDS}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlapped_sums, "LATER", 1 << 20)
        found = {"none": [list(event) for event in whole(world)]}
    return found | {"ours": each(ours), "by hand": each(by_hand), "ddp": [list(event) for event in by_ddp(world)]}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_has_the_collectives_of_a_loop_written_by_hand(shard: str, two: list[dict[str, Any]]) -> None:
    """As many, of as many bytes, in the same order among the passes."""
    for found in two:
        assert found["ours"][shard] == found["by hand"][shard]
    names = [name for name, _ in two[0]["ours"][shard]]
    assert names.count("gather") == (LAYERS + 1) * (1 if shard != "fsdp" else MICROBATCHES) + (LAYERS * MICROBATCHES if shard == "fsdp" else 0)
    assert names.count("reduce-scatter") == (LAYERS + 1) * (1 if shard == "zero1" else MICROBATCHES)


@pytest.mark.slow
def test_whole_gradients_are_summed_in_as_many_buckets_as_by_ddp(two: list[dict[str, Any]]) -> None:
    """All but the last are under way before the layers are back, in the last microbatch alone."""
    for found in two:
        sums, ddp = ([size for name, size in found[whose] if name == "all-reduce"] for whose in ("none", "ddp"))
        assert len(sums) == len(ddp) > 4 and sum(sums) == sum(ddp)
        names = [name for name, _ in found["none"]]
        assert names == ["layers are back", *["all-reduce"] * (len(sums) - 1), "layers are back", "all-reduce"]


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_all_sums_but_the_last_start_before_the_backward_pass_ends(shard: str, two: list[dict[str, Any]]) -> None:
    names = [name for name, _ in two[0]["ours"][shard] if name != "gather"]
    passes = " ".join(names).split("layers are back")
    sums = [text.split().count("reduce-scatter") for text in passes]
    whole = {"zero1": [0, LAYERS, 1], "zero2": [LAYERS, LAYERS + 1, 1], "fsdp": [LAYERS, LAYERS + 1, 1]}
    assert sums == whole[shard]
