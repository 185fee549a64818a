"""Ranks that stand still: the others say in which collective, who is missing, and end."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import socket
import subprocess
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
from fp8cfg.training.distributed import blocked_call, heartbeat, stalled_ranks
from fp8cfg.training.distributed.world import World
from fp8cfg.training.launched_step import LaunchedStep
from tests.support.ranks import LIMIT, ROOT, ended, launch, ranks_environment, running
from tests.training.test_log_folder import SAVES, steps

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
        _until(lambda: bool(watch.beats.heard), "no beat")
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
        _until(lambda: failing.asked > 1, "no second try")
        beats._beats = store
        beats._reads.delete_key(heartbeat._key(0))
        _until(lambda: beats._reads.check([heartbeat._key(0)]), "no beat")
        beats._beats = Failing(dist.DistNetworkError("Broken pipe"))
        beats._thread.join(100)
        assert not beats._thread.is_alive() and not beats.ended.is_set()
    finally:
        beats.close()


def test_a_connection_that_breaks_is_made_anew_where_the_store_is_there(two: dist.TCPStore, capfd: pytest.CaptureFixture[str]) -> None:
    beats, key = heartbeat.Heartbeat(0.05), heartbeat._key(0)
    try:
        _until(lambda: beats._reads.check([key]), "no beat")
        _cut(two.port)
        beats._reads.delete_key(key)
        _until(lambda: beats._reads.check([key]), "no beat after the fault")
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
            _until(lambda: len(asked) > before + 2, "no third look")
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
    LaunchedStep(1, 0.1, (0, ""), job, HostCopy(torch.ones(3), event), 3, None, World()).settle(SimpleNamespace(made=0, settle=lambda norm: False))  # type: ignore[arg-type]
    assert re.fullmatch(r"fp8cfg/training/launched_step\.py:\d+, settle", said[0])
    assert said[0].split(":")[0] in (guide := (ROOT / "docs/guides/several-gpus.md").read_text()) and ", settle, after" in guide
    fsdp = Path(dist.__file__).parent / "fsdp/_fully_shard/_fsdp_state.py"
    for file, name in ((dist.distributed_c10d.__file__, "all_reduce"), (dist.distributed_c10d.__file__, "new_group"), (fsdp, "pre_backward")):
        exec(compile(f"def {name}(call): return call()", file, "exec"), found := dict[str, Any]())
        said = found[name](lambda: blocked_call.doing(sys._getframe()))
        assert (said == f"the collective {name}") == (name == "all_reduce"), said
    assert blocked_call.doing(None) == "no Python" and heartbeat._ranks([3]) == "rank 3" and heartbeat._ranks(list(range(20))).endswith("15 and 4 more")


def test_not_all_ranks_come() -> None:
    with pytest.raises(RankStalled, match=r"not all ranks came within 1 s \(trainer\.timeout\.start\)"), stalled_ranks.all_started(Timeout(start=1)):
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=2, timeout=stalled_ranks.timedelta(seconds=1))


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


ENDS = """
import json, os, sys, time

from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.config.training_nodes import Trainer
from fp8cfg.training.distributed.world import world

rank, case = int(os.environ["RANK"]), sys.argv[1]
try:
    with world("cpu", Trainer(timeout={"start": 60, "step": 4})) as ranks:
        ranks.limits.timeout.start = 4
        first = ranks.text(str(os.getpid()))
        ranks.waits("step", 3)
        if case == "data" and rank == 0:
            raise RuntimeError("tokens of the data server: Connection refused")
        if case == "data":
            ranks.any(True)
        if case == "late" and rank == 1:
            while os.path.exists(f"/proc/{first}"):
                time.sleep(0.1)
except (RuntimeError, Fp8cfgError) as e:
    print(json.dumps([rank, type(e).__name__, str(e)]), flush=True)
"""


@pytest.mark.parametrize("case", ["data", "late"])
def test_how_ranks_end(case: str, tmp_path: Path) -> None:
    """One with an error of its own that reads like one of gloo's, and one that is late at the end."""
    (tmp_path / "ends.py").write_text(ENDS)
    done = launch(2, case, script=tmp_path / "ends.py", TORCHELASTIC_USE_AGENT_STORE="False")
    said = {rank: (kind, text) for rank, kind, text in map(json.loads, done.stdout.splitlines())}
    if case == "data":
        assert said[0] == ("RuntimeError", "tokens of the data server: Connection refused")
        assert said[1][0] == "RankLost" and re.match(r"another rank has ended; it says why \(\[.*Connection (closed|reset) by peer", said[1][1])
    else:
        assert said[0][0] == "RankStalled" and said[1][0] == "RankLost"  # the store has ended meanwhile
        assert said[0][1].startswith("step 3: barrier over dp_shard was not done in 4 s (trainer.timeout.start): rank 1 is in ends.py:")


def _until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)


LAYOUTS = {  # which ranks stand still, and how the others wait, some of them for those that wait themselves
    "stages of tensor-parallel ranks, the first of the second": (
        2, dict.fromkeys((0, 1, 3), r"((batch_isend_irecv|isend|irecv|all_gather) over pp|all_reduce over (pp|tp|all ranks))"),
        ["trainer.strategy.pipeline_model_parallel_size=2", "model.num_layers=2", "trainer.global_batch_size=4",
         "trainer.strategy.tensor_model_parallel_size=2", "model.num_query_groups=2"]),
    "data-parallel ranks, the first": (0, {1: r"(all_reduce|all_gather\w+|reduce_scatter\w+) over dp_shard"}, ["trainer.micro_batch_size=1"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_that_stands_still_is_named(name: str, tmp_path: Path) -> None:
    """By the others, which end and say in which collective they waited; it is then killed as a launcher does."""
    stopped, waits, layout = LAYOUTS[name]
    run, size = tmp_path / "run", len(waits) + 1
    words = [*SAVES, *layout, f"trainer.devices={size}", f"log.folder={run}", "trainer.max_steps=100000", "trainer.timeout.start=90",
             "trainer.timeout.step=2", "checkpoint.every_n_steps=0"]
    with running(size, *words, TORCHELASTIC_USE_AGENT_STORE="False") as (ranks, said):
        _until(lambda: (run / "metrics.jsonl").exists() and len(steps(run)) > 2, "no third step")
        os.kill(ranks[stopped].pid or 0, signal.SIGSTOP)
        assert not ended([ranks[rank] for rank in waits], 60)
        lines = {rank: Path(said, f"{rank}.err").read_text().strip().splitlines()[-1] for rank in waits}
        assert {ranks[rank].exitcode for rank in waits} == {1}
    holds = ", which holds the store," if stopped == 0 else ""
    for rank, collective in waits.items():
        assert re.fullmatch(rf"{f'rank {rank}: ' if rank else ''}error: step \d+: {collective} was (not done in|broken off by a rank that had waited) "
                            rf"2 s \(trainer\.timeout\.step\): rank {stopped}{holds} is silent: stopped, or gone with the machine"
                            rf"{'' if holds else ', or busy outside of Python'}", lines[rank])


KILLED_ONCE = """
import os
from fp8cfg.__main__ import entry

if (os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]) == ("1", "0"):
    os.environ["FP8CFG_FAILPOINT"] = "shard:10"
entry()
"""
"""`fp8cfg` under torchrun, of which a rank is killed in its third save or a later one."""


@pytest.mark.slow
def test_a_launcher_that_starts_ranks_again_goes_on(tmp_path: Path) -> None:
    """torchrun --max-restarts, after a rank was killed: one run folder, and no step twice."""
    (tmp_path / "killed_once.py").write_text(KILLED_ONCE)
    words = [*SAVES, "trainer.micro_batch_size=1", f"log.folder={tmp_path}/run", "log.resume=auto", "trainer.max_steps=10"]
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1",
                           str(tmp_path / "killed_once.py"), *words], cwd=ROOT, env={**ranks_environment(1), "PYTHONPATH": str(ROOT)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT)
    assert done.returncode == 0 and f"resuming {tmp_path}/run from step-" in done.stdout, done.stdout
    assert steps(tmp_path / "run") == list(range(1, 11))
