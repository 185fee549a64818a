"""Blocked calls: the collective that an error comes from, and where a thread is."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fp8cfg.numerics import async_copies
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.parallel import blocked_collective, heartbeat
from fp8cfg.parallel.pipeline import wait_for_p2p
from fp8cfg.training.step import PendingStep
from tests.support.missing_rank import failed, first_of_two
from tests.support.ranks import ROOT


@pytest.fixture
def two() -> Iterator[dist.TCPStore]:
    with first_of_two() as store:
        yield store


def all_reduce(t: torch.Tensor, group: Any) -> torch.Tensor:
    """One that fails where it is waited for."""
    return t


def test_collective_that_an_error_comes_from(
    two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait_tensor(*_: Any) -> NoReturn:
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")

    class Rank:
        group = dist.group.WORLD

        def gathers(self) -> None:
            wait_tensor()

    monkeypatch.setattr(async_copies, "_wait", wait_tensor)
    world = dist.group.WORLD
    assert world is not None
    t = torch.ones(2)
    work = SimpleNamespace(wait=wait_tensor)
    for where, name in {
        lambda: async_copies.run_collective(all_reduce, t, group=world.group_name): "all_reduce",
        lambda: wait_for_p2p([work], world): "batch_isend_irecv",  # type: ignore[list-item]
        lambda: async_copies.wait(work, dist.all_to_all_single, None): "all_to_all_single",  # type: ignore[arg-type]
        Rank().gathers: "a collective",
    }.items():
        assert (str(found := blocked_collective.find_collective(failed(where))), found.group) == (
            name,
            world,
        )
    with pytest.raises(ValueError, match="complex") as e:
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    assert blocked_collective.find_collective(e.value) == ("all_reduce", world)
    assert blocked_collective.find_collective(failed(lambda: wait_tensor())) == (None, None)


def test_collective_of_a_distributed_tensor(
    two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is waited for in an operator of its result."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    norm = torch.linalg.vector_norm(
        DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
    )

    plain = funcol.AsyncCollectiveTensor.trigger_wait

    def trigger_wait(t: Any) -> NoReturn:
        plain(t)
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")

    monkeypatch.setattr(funcol.AsyncCollectiveTensor, "trigger_wait", trigger_wait)
    monkeypatch.setattr(funcol.AsyncCollectiveTensor, "wait", trigger_wait)
    assert blocked_collective.find_collective(failed(norm.full_tensor)) == (
        "all_reduce",
        mesh.get_group("tp"),
    )
    part = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
    assert blocked_collective.find_collective(failed(part.full_tensor)).group == mesh.get_group(
        "tp"
    )


def test_where_a_thread_is() -> None:
    ready, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    assert re.match(
        r"threading\.py:\d+$",
        blocked_collective.describe_activity(sys._current_frames()[thread.ident]),
    )
    go_on.set()
    thread.join()
    said = list[str]()
    event: Any = SimpleNamespace(
        query=lambda: False,
        synchronize=lambda: said.append(blocked_collective.describe_activity(sys._getframe())),
    )
    copy = HostCopy(torch.ones(1), event)
    PendingStep(1, 0.1, {"loss": 1}, copy, None, 1.0, True, 0, "", "").wait()
    assert re.fullmatch(r"fp8cfg/training/step\.py:\d+, wait", said[0])
    assert (
        said[0].split(":")[0] in (guide := (ROOT / "docs/guides/hung-ranks.md").read_text())
        and ", wait, after" in guide
    )
    fsdp = Path(dist.__file__).parent / "fsdp/_fully_shard/_fsdp_state.py"
    for file, name in (
        (dist.distributed_c10d.__file__, "all_reduce"),
        (dist.distributed_c10d.__file__, "new_group"),
        (fsdp, "pre_backward"),
    ):
        exec(compile(f"def {name}(call): return call()", file, "exec"), found := dict[str, Any]())
        said = found[name](lambda: blocked_collective.describe_activity(sys._getframe()))
        assert (said == f"the collective {name}") == (name == "all_reduce"), said
    assert (
        blocked_collective.describe_activity(None) == "no Python"
        and heartbeat._ranks([3]) == "rank 3"
        and heartbeat._ranks(list(range(20))).endswith("15 and 4 more")
    )
