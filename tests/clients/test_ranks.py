"""DistributedDataParallel and FSDP2 on two ranks, in one start: converted models, and a job that sums its gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8cfg
from fp8cfg.parallel.process_group import World
from tests.clients.gpt import GPT, batch
from tests.clients.loops import LOOPS, model
from tests.clients.made import Made, adamw, made
from tests.support.ranks import on_ranks

CASES, STEPS = ("DDP converted", "FSDP2 converted", "job"), 20


def ddp() -> Made:
    """Converted before it is wrapped."""
    run = made("converted", model(tied=False))
    run.model = DistributedDataParallel(run.model)
    return run


def fsdp() -> Made:
    """Converted before it is split; the optimizer is made after."""
    run = made("converted", model(tied=False))
    assert isinstance(run.model, GPT)
    for block in run.model.h:
        fully_shard(block)
    fully_shard(run.model)
    run.optimizer = adamw(run.model)
    return run


def trained(run: Made, world: World) -> dict[str, Any]:
    losses = []
    for step in range(STEPS):
        with run.context:
            loss = run.model(*batch(step, world.rank, world.size))[1]
            run.backward(loss / world.size if run.job else loss)
        if run.job:
            run.job.sum_gradients()
        run.clip()
        run.optimizer.step()
        run.step()
        run.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / world.size)
    if proof := run.job or run.conversion:
        proof.prove()
    weights = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
    return {
        "losses": losses,
        "fp8": fp8cfg.coverage(run.model).layers_in_fp8,
        "weights": {
            name.removeprefix("module."): value.detach().clone() for name, value in weights.items()
        },
    }


def on_a_rank(world: World) -> dict[str, Any]:
    scripts: dict[str, Callable[[], Made]] = {
        "DDP converted": ddp,
        "FSDP2 converted": fsdp,
        "job": lambda: made("built", model(tied=False)),
    }
    return {case: trained(scripts[case](), world) for case in CASES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return on_ranks(2, on_a_rank, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """The losses of one process with the whole batch."""
    return LOOPS["minGPT"]("plain").losses


@pytest.mark.parametrize("case", CASES)
def test_losses_are_those_of_one_process_with_the_whole_batch(
    case: str, found: list[dict[str, Any]], alone: list[float]
) -> None:
    losses = found[0][case]["losses"]
    assert losses == found[1][case]["losses"]
    assert (
        max(abs(a - b) for a, b in zip(losses[-5:], alone[STEPS - 5 : STEPS], strict=True)) < 0.01
    )


@pytest.mark.parametrize("case", CASES)
def test_each_rank_ran_in_fp8(case: str, found: list[dict[str, Any]]) -> None:
    assert [rank[case]["fp8"] for rank in found] == [8, 8]


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_same_weights_and_the_plain_model_takes_them(
    case: str, found: list[dict[str, Any]]
) -> None:
    weights: list[dict[str, Tensor]] = [rank[case]["weights"] for rank in found]
    whole = weights[0]
    if "FSDP2" not in case:  # there the first rank alone has the whole
        assert all(torch.equal(value, weights[1][name]) for name, value in whole.items())
    plain = model(tied=False)
    before = copy.deepcopy(plain.state_dict())
    plain.load_state_dict(whole, strict=True)
    assert all(
        torch.equal(value, whole[name].float()) for name, value in plain.state_dict().items()
    )
    assert any(not torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    with torch.no_grad():
        assert plain(*batch(STEPS - 1))[1].item() < found[0][case]["losses"][0] - 1.0
