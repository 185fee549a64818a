"""Collectives of a step, counted and in their order: those of loops written by hand with torch's FSDP2 and DDP, and under way while layers still go back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step
from tests.support.collective_events import Events
from tests.support.ranks import on_ranks
from tests.support.small import small
from tests.support.whole_tensors import without_fsdp2

LAYERS, MICROBATCHES = 3, 2
SHARDS = ("none", "zero1", "zero2", "fsdp")
SENT = ("gather", "reduce-scatter", "all-reduce", "layers are back")
NUMBERS = 1 << 10
"""Bytes of norms and losses, at most."""


def job_of(*words: str) -> Job:
    return fp8cfg.build(
        small(
            f"model.num_layers={LAYERS}",
            f"trainer.micro_batch_size={4 // MICROBATCHES}",
            "model.share_embeddings_and_output_weights=true",
            *words,
        )
    )


def plain_job() -> Job:
    """One whose model is whole, and which nothing sums gradients of."""
    with without_fsdp2():
        return job_of("precision=fp32", "storage.shard=none")


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
    return sent(events)


def sent(events: Events) -> list[tuple[str, int]]:
    """Weights and gradients."""
    return [event for event in events.of(*SENT) if event[0] != "all-reduce" or event[1] > NUMBERS]


def by_hand(shard: str, world: World) -> list[tuple[str, int]]:
    """Without us: FSDP2, of one shard where each rank is a replica, torch's AdamW, a loop."""
    plain, events = plain_job(), Events()
    model, policy = (
        plain.model,
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
    )
    mesh = init_device_mesh(
        "cpu",
        (world.size, 1) if shard == "none" else (1, world.size),
        mesh_dim_names=("replicas", "shards"),
    )
    for module in (*model.layers, model):
        fully_shard(
            module,
            mesh=mesh if shard == "none" else mesh["shards"],
            mp_policy=policy,
            reshard_after_forward=None if shard == "fsdp" else False,
        )
        module.set_force_sum_reduction_for_comms(True)  # gloo does not average
    optimizer, (batches, _) = (
        torch.optim.AdamW(model.parameters(), fused=True),
        run_data(plain.recipe),
    )

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
    return sent(events)


def by_ddp(world: World) -> list[tuple[str, int]]:
    """The same as none by torch's DistributedDataParallel, with buckets as large as a layer."""
    plain, events = plain_job(), Events()
    layer = sum(p.nbytes for p in plain.model.layers[0].parameters())
    model = nn.parallel.DistributedDataParallel(plain.model, bucket_cap_mb=layer / 2**20)
    (batches, _), found = run_data(plain.recipe), events.found

    def reduced(_, bucket):  # DDP refuses annotations that are text
        found.append(("all-reduce", bucket.buffer().nbytes))
        return (
            dist.all_reduce(bucket.buffer(), async_op=True)
            .get_future()
            .then(lambda done: done.value()[0])
        )

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

    return {
        "ours": each(ours),
        "by hand": each(by_hand),
        "ddp": [list(event) for event in by_ddp(world)],
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_two, tmp_path_factory.mktemp("two"))


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_a_step_has_the_collectives_of_a_loop_written_by_hand(
    shard: str, two: list[dict[str, Any]]
) -> None:
    """As many, of as many bytes, in the same order among the passes."""
    for found in two:
        assert found["ours"][shard] == found["by hand"][shard]
    names = [name for name, _ in two[0]["ours"][shard]]
    gathers = {"none": 0, "fsdp": (2 * LAYERS + 1) * MICROBATCHES}
    assert names.count("gather") == gathers.get(shard, LAYERS + 1)
    sums = {"none": ("all-reduce", 1), "zero1": ("reduce-scatter", 1)}
    how, passes = sums.get(shard, ("reduce-scatter", MICROBATCHES))
    assert (
        names.count(how)
        == (LAYERS + 1) * passes
        == sum(name in ("all-reduce", "reduce-scatter") for name in names)
    )


@pytest.mark.slow
def test_one_shard_is_summed_in_as_many_messages_as_by_ddp(two: list[dict[str, Any]]) -> None:
    """In the last microbatch alone, with buckets as large as a layer."""
    for found in two:
        sums, ddp = (
            [size for name, size in events if name == "all-reduce"]
            for events in (found["ours"]["none"], found["ddp"])
        )
        assert len(sums) == len(ddp) == LAYERS + 1 and sum(sums) == sum(ddp)
        assert [name for name, _ in found["ours"]["none"]] == [name for name, _ in found["ddp"]]


@pytest.mark.slow
@pytest.mark.parametrize("shard", SHARDS)
def test_all_sums_but_the_last_start_before_the_backward_pass_ends(
    shard: str, two: list[dict[str, Any]]
) -> None:
    names = [name.replace(" ", "-") for name, _ in two[0]["ours"][shard] if name != "gather"]
    sums = [len(text.split()) for text in " ".join(names).split("layers-are-back")]
    whole = {
        "none": [0, LAYERS, 1],
        "zero1": [0, LAYERS, 1],
        "zero2": [LAYERS, LAYERS + 1, 1],
        "fsdp": [LAYERS, LAYERS + 1, 1],
    }
    assert sums == whole[shard]
