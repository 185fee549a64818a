"""Ranks that stand still: the others say in which collective and who is missing."""

from __future__ import annotations

import itertools
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.testing._internal.distributed.fake_pg  # the backend "fake"
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fp8cfg import __main__
from fp8cfg.config.errors import RankStalled
from fp8cfg.config.training_nodes import Strategy, Timeout
from fp8cfg.numerics import waited_collective
from fp8cfg.numerics.host_copy import HostCopy
from fp8cfg.parallel.point_to_point import wait_for
from fp8cfg.training.distributed import blocked_call, heartbeat, stalled_ranks, world
from fp8cfg.training.distributed.world import World
from fp8cfg.training.launched_step import LaunchedStep
from tests.support.ranks import ROOT

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
CLOSED = f"{GLOO} Connection closed by peer [127.0.0.1]:58050. This is typically caused by a remote worker crashing. Check the logs of the remote worker"
SILENT = "is silent: stopped, or gone with the machine, or busy outside of Python"


class Failing:
    """A store of which every call fails."""

    def __init__(self, error: RuntimeError) -> None:
        self.error, self.asked = error, 0

    def check(self, *_: Any) -> NoReturn:
        self.asked += 1
        raise self.error

    set = check


@pytest.fixture
def two() -> Iterator[dist.TCPStore]:
    """The store of a process group of which this process is the first of two ranks, and the other one is none."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def all_reduce(t: torch.Tensor, group: Any) -> torch.Tensor:
    """One that fails where it is waited for."""
    return t


def failed(call: Callable[[], Any]) -> RuntimeError:
    with pytest.raises(RuntimeError) as e:
        call()
    return e.value


def test_collective_that_an_error_comes_from(two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def wait_tensor(*_: Any) -> NoReturn:
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")

    class Rank:
        group = dist.group.WORLD

        def gathers(self) -> None:
            wait_tensor()

    monkeypatch.setattr(waited_collective, "_wait", wait_tensor)
    world = dist.group.WORLD
    assert world is not None
    t = torch.ones(2)
    work = SimpleNamespace(wait=wait_tensor)
    for where, name in {
        lambda: waited_collective.waited(all_reduce, t, group=world.group_name): "all_reduce",
        lambda: wait_for([work], world): "batch_isend_irecv",  # type: ignore[list-item]
        lambda: waited_collective.wait(work, dist.all_to_all_single, None): "all_to_all_single",  # type: ignore[arg-type]
        Rank().gathers: "a collective",
    }.items():
        assert (str(found := blocked_call.raised_in(failed(where))), found.group) == (name, world)
    with pytest.raises(ValueError, match="complex") as e:
        dist.all_reduce(torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX)
    assert blocked_call.raised_in(e.value) == ("all_reduce", world)
    assert blocked_call.raised_in(failed(lambda: wait_tensor())) == (None, None)


def test_collective_of_a_distributed_tensor(two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is waited for in an operator of its result."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    norm = torch.linalg.vector_norm(DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False))

    plain = funcol.AsyncCollectiveTensor.trigger_wait

    def trigger_wait(t: Any) -> NoReturn:
        plain(t)
        raise RuntimeError("Timed out waiting 3000ms for recv operation to complete")

    monkeypatch.setattr(funcol.AsyncCollectiveTensor, "trigger_wait", trigger_wait)
    monkeypatch.setattr(funcol.AsyncCollectiveTensor, "wait", trigger_wait)
    assert blocked_call.raised_in(failed(norm.full_tensor)) == ("all_reduce", mesh.get_group("tp"))
    part = DTensor.from_local(torch.ones(2), mesh["tp"], [Shard(0)], run_check=False)
    assert blocked_call.raised_in(failed(part.full_tensor)).group == mesh.get_group("tp")


def test_error_that_another_one_was_raised_from() -> None:
    def stage(why: str) -> None:
        try:
            raise RuntimeError(why)
        except RuntimeError as e:
            raise RuntimeError("[Stage 1] failed to run forward") from e

    for why in (f"{GLOO} Timed out waiting 3000ms for send operation to complete", CLOSED, "Application timeout caused pair closure"):
        assert str(stalled_ranks.broken(failed(lambda why=why: stage(why)))) == why  # type: ignore[misc]
    for why in ("a matrix of 3 rows", "tokens of the data server: Connection refused", "CUDA error: the launch timed out and was terminated"):
        assert stalled_ranks.broken(failed(lambda why=why: stage(why))) is None  # type: ignore[misc]


def test_error_that_was_raised_while_another_one_was_handled(two: dist.TCPStore) -> None:
    """Is itself; torch's own classes are known without the words of gloo."""
    def handles() -> None:
        try:
            raise RuntimeError(CLOSED)
        except RuntimeError:
            raise RuntimeError("a matrix of 3 rows")  # noqa: B904

    assert stalled_ranks.broken(failed(handles)) is None
    late = failed(lambda: two.wait(["nobody writes it"], stalled_ranks.timedelta(seconds=0.1)))
    assert type(late) is dist.DistStoreError and stalled_ranks.broken(late) is late


def test_what_the_store_says(two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that never came, of one that another rank has named, and where the store is silent itself."""
    late, closed = RuntimeError(f"{GLOO} Timed out waiting 400ms"), RuntimeError(CLOSED)
    watch = stalled_ranks.StallWatch(Timeout(start=0.4, step=0.4), Strategy())
    try:
        assert watch.diagnosis(RuntimeError("a matrix of 3 rows")) is None
        assert watch.diagnosis(RuntimeError("CUDA error: the launch timed out and was terminated")) is None
        assert not watch.beats._reads.check([heartbeat._WAITED])
        assert str(watch.diagnosis(late)) == (f"step 1: a collective ({GLOO} Timed out waiting 400ms) was not done in 0.4 s (trainer.timeout.start): "
                                              f"rank 1 {SILENT}")
        until(lambda: bool(watch.beats.heard), "no beat")
        store = watch.beats._reads
        assert watch.beats._found(store) == f"rank 1 {SILENT}"
        store.set(heartbeat._FOUND, "rank 3 is silent")
        assert re.fullmatch(r"step 1: a collective \(.* Connection closed by peer .* \.\.\.\) was broken off by a rank that had waited 0\.4 s "
                            r"\(trainer\.timeout\.start\): rank 3 is silent", str(watch.diagnosis(closed)))
        store.delete_key(heartbeat._WAITED)
        monkeypatch.setattr(heartbeat, "_UNSAID", 0.1)
        assert watch.diagnosis(closed) is None  # another rank has ended for a reason of its own
        watch.close()
        watch.beats._thread.join()
        monkeypatch.setattr(watch.beats, "_told", lambda: threading.Event().wait(10))
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 0.1)
        assert watch.beats.others() == f"rank 1 {SILENT}"  # heard by the heartbeat
        watch.beats.heard.clear()
        assert watch.beats.others() == "rank 0, which holds the store, is silent: stopped, or gone with the machine"
        monkeypatch.setattr(watch.beats, "_reads", Failing(dist.DistNetworkError("Broken pipe")))
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 60)
        assert watch.beats.silent([1]) == "rank 0, which held the store, has ended"
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 0.1)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert watch.beats.others() == "the launcher's agent, which holds the store, is silent: stopped, or gone with the machine"
    finally:
        watch.close()


def test_a_store_that_was_late_once_does_not_end_the_heartbeat(two: dist.TCPStore) -> None:
    beats = heartbeat.Heartbeat(0.05)
    try:
        store = beats._beats
        beats._beats = failing = Failing(dist.DistStoreError("wait timeout after 50ms, keys: /a"))
        until(lambda: failing.asked > 1, "no second try")
        beats._beats = store
        beats._reads.delete_key(heartbeat._key(0))
        until(lambda: beats._reads.check([heartbeat._key(0)]), "no beat")
        beats._beats = Failing(dist.DistNetworkError("Broken pipe"))
        beats._thread.join(100)
        assert not beats._thread.is_alive() and not beats.ended.is_set()
    finally:
        beats.close()


def test_a_connection_that_breaks_is_made_anew_where_the_store_is_there(two: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    beats, key = heartbeat.Heartbeat(0.05), heartbeat._key(0)
    try:
        until(lambda: beats._reads.check([key]), "no beat")
        _cut(two.port)
        beats._reads.delete_key(key)
        until(lambda: beats._reads.check([key]), "no beat after the fault")
        assert beats._thread.is_alive() and "sendBytes failed" in capfd.readouterr().err
    finally:
        beats.close()
    ended = dist.TCPStore("127.0.0.1", 0, is_master=True)
    beats._reads._store = dist.TCPStore("127.0.0.1", ended.port, is_master=False)
    del ended
    assert beats.silent([1]) == "rank 0, which held the store, has ended"


def _cut(port: int) -> None:
    """Shut every connection of this process to that port."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            if one.getpeername()[1] == port:
                one.shutdown(socket.SHUT_RDWR)


def test_silent_ranks_are_named_before_the_watchdog_of_nccl_ends_the_process(
    two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once of the same ranks, however late in a step, and not where all beat, as far as they do between two looks."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(stalled_ranks.distributed_c10d, "_set_pg_timeout", lambda *_: None)
    watch = stalled_ranks.StallWatch(Timeout(start=60, step=0.8), Strategy())
    try:
        other, count, beating, asked = watch.beats._reads.clone(), itertools.count(), threading.Event(), list[int]()
        read, silent = watch.beats._read, watch.beats.silent

        def beats_and_read(ranks: Any) -> dict[int, str]:
            if beating.is_set():
                other.set(heartbeat._key(1), f"{next(count)} somewhere")
            return read(ranks)

        def counted(ranks: Any) -> str | None:
            asked.append(1)
            return silent(ranks)

        monkeypatch.setattr(watch.beats, "_read", beats_and_read)
        monkeypatch.setattr(watch.beats, "silent", counted)

        def said(beats: bool) -> str:
            """Until it has looked once from the beginning to the end."""
            (beating.set if beats else beating.clear)()
            before = len(asked)
            until(lambda: len(asked) > before + 2, "no third look")
            return capsys.readouterr().err

        other.set(heartbeat._key(1), "first somewhere")
        beating.set()
        watch.waits("step", 7)
        assert said(beats=True) == ""
        warning = rf"rank 0: warning: step \d: test_stalled_ranks\.py:\d+, after \d+ s of 0\.8 \(trainer\.timeout\.step\): rank 1 {SILENT}\n"
        assert re.fullmatch(warning, said(beats=False))
        watch.waits("step", 8)
        assert said(beats=False) == ""
        watch._began[0] -= 100  # the oldest step that may be under way
        assert said(beats=True) == "" and re.fullmatch(warning.replace(r"\d+ s", r"1\d\d s"), said(beats=False))
    finally:
        watch.close()


def test_where_a_thread_is() -> None:
    ready, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        go_on.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    assert thread.ident is not None
    assert re.match(r"threading\.py:\d+$", blocked_call.doing(sys._current_frames()[thread.ident]))
    go_on.set()
    thread.join()
    said = list[str]()
    event: Any = SimpleNamespace(query=lambda: False, synchronize=lambda: said.append(blocked_call.doing(sys._getframe())))
    job: Any = None  # which a step with targets does not read
    LaunchedStep(1, 0.1, (0, ""), job, HostCopy(torch.ones(3), event), 3, 0, None, World()).settle(SimpleNamespace(made=0, settle=lambda norm: False))  # type: ignore[arg-type]
    assert re.fullmatch(r"fp8cfg/training/launched_step\.py:\d+, settle", said[0])
    assert said[0].split(":")[0] in (guide := (ROOT / "docs/guides/several-gpus.md").read_text()) and ", settle, after" in guide
    fsdp = Path(dist.__file__).parent / "fsdp/_fully_shard/_fsdp_state.py"
    for file, name in ((dist.distributed_c10d.__file__, "all_reduce"), (dist.distributed_c10d.__file__, "new_group"), (fsdp, "pre_backward")):
        exec(compile(f"def {name}(call): return call()", file, "exec"), found := dict[str, Any]())
        said = found[name](lambda: blocked_call.doing(sys._getframe()))
        assert (said == f"the collective {name}") == (name == "all_reduce"), said
    assert blocked_call.doing(None) == "no Python" and heartbeat._ranks([3]) == "rank 3" and heartbeat._ranks(list(range(20))).endswith("15 and 4 more")


def test_not_all_ranks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(world, "_MEETING", [(dist.TCPStore("127.0.0.1", 0, is_master=True), 0, 2)])
    said = r"^not all ranks came within 1 s \(trainer\.timeout\.start\): rank 1 did not: stopped, or gone with the machine, or not started$"
    with pytest.raises(RankStalled, match=said):
        world._start_group("gloo", Timeout(start=1))


def test_ranks_that_waited_in_vain_say_so_before_a_launcher_ends_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each at once, before any of them ends: torchrun ends all others then."""
    lines: list[tuple[float, str]] = []

    def stalled(*_: Any) -> NoReturn:
        raise RankStalled("rank 2 is silent")

    monkeypatch.setattr(__main__, "_run", stalled)
    monkeypatch.setattr(time, "sleep", lambda seconds: lines.append((seconds, capsys.readouterr().err)))
    for rank, said in {"0": "error: rank 2 is silent\n", "3": "rank 3: error: rank 2 is silent\n"}.items():
        monkeypatch.setenv("RANK", rank)
        assert __main__.main([]) == 1 and [line for line in lines if line[0]] == [(5, said)]
        lines.clear()


def until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)
