"""Ranks that stand still: the others say in which collective and who is missing."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import torch.distributed as dist

from fp8cfg import __main__
from fp8cfg.parallel import heartbeat, process_group, stalled_ranks
from fp8cfg.schema.errors import RankStalled
from fp8cfg.schema.training import Strategy, Timeout
from tests.support.missing_rank import Failing, failed, first_of_two, until

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553]"
CLOSED = f"{GLOO} Connection closed by peer [127.0.0.1]:58050. This is typically caused by a remote worker crashing. Check the logs of the remote worker"
SILENT = "is silent: stopped, or its machine is lost, or busy outside Python"


@pytest.fixture
def two() -> Iterator[dist.TCPStore]:
    with first_of_two() as store:
        yield store


def test_error_that_another_one_was_raised_from() -> None:
    def stage(why: str) -> None:
        try:
            raise RuntimeError(why)
        except RuntimeError as e:
            raise RuntimeError("[Stage 1] failed to run forward") from e

    for why in (
        f"{GLOO} Timed out waiting 3000ms for send operation to complete",
        CLOSED,
        "Application timeout caused pair closure",
    ):
        assert str(stalled_ranks.find_collective_error(failed(lambda why=why: stage(why)))) == why  # type: ignore[misc]
    for why in (
        "a matrix of 3 rows",
        "tokens of the data server: Connection refused",
        "CUDA error: the launch timed out and was terminated",
    ):
        assert stalled_ranks.find_collective_error(failed(lambda why=why: stage(why))) is None  # type: ignore[misc]


def test_error_that_was_raised_while_another_one_was_handled(two: dist.TCPStore) -> None:
    """Is itself; torch's own classes are known without the words of gloo."""

    def handles() -> None:
        try:
            raise RuntimeError(CLOSED)
        except RuntimeError:
            raise RuntimeError("a matrix of 3 rows")  # noqa: B904

    assert stalled_ranks.find_collective_error(failed(handles)) is None
    late = failed(lambda: two.wait(["nobody writes it"], stalled_ranks.timedelta(seconds=0.1)))
    assert type(late) is dist.DistStoreError and stalled_ranks.find_collective_error(late) is late


def test_what_the_store_says(two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rank that never came, of one that another rank has named, and where the store is silent itself."""
    late, closed = RuntimeError(f"{GLOO} Timed out waiting 400ms"), RuntimeError(CLOSED)
    watch = stalled_ranks.StallWatch(Timeout(start=0.4, step=0.4), Strategy())
    try:
        assert watch.diagnose(RuntimeError("a matrix of 3 rows")) is None
        assert (
            watch.diagnose(RuntimeError("CUDA error: the launch timed out and was terminated"))
            is None
        )
        assert not watch.heartbeat._read_store.check([heartbeat._TIMEOUT_KEY])
        assert str(watch.diagnose(late)) == (
            f"step 1: a collective ({GLOO} Timed out waiting 400ms) timed out after 0.4 s (trainer.timeout.start): "
            f"rank 1 {SILENT}"
        )
        until(lambda: bool(watch.heartbeat.peer_report), "no beat")
        store = watch.heartbeat._read_store
        assert watch.heartbeat._read_report(store) == f"rank 1 {SILENT}"
        store.set(heartbeat._REPORT_KEY, "rank 3 is silent")
        assert re.fullmatch(
            r"step 1: a collective \(.* Connection closed by peer .* \.\.\.\) was aborted by a rank after 0\.4 s "
            r"\(trainer\.timeout\.start\): rank 3 is silent",
            str(watch.diagnose(closed)),
        )
        store.delete_key(heartbeat._TIMEOUT_KEY)
        monkeypatch.setattr(heartbeat, "_SHORT_WAIT", 0.1)
        assert watch.diagnose(closed) is None  # another rank has ended for a reason of its own
        watch.close()
        watch.heartbeat._thread.join()
        monkeypatch.setattr(watch.heartbeat, "_share_report", lambda: threading.Event().wait(10))
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 0.1)
        assert watch.heartbeat.describe_peers() == f"rank 1 {SILENT}"  # heard by the heartbeat
        watch.heartbeat.peer_report = None
        assert (
            watch.heartbeat.describe_peers()
            == "rank 0, which holds the store, does not answer: stopped, or its machine is lost"
        )
        monkeypatch.setattr(
            watch.heartbeat, "_read_store", Failing(dist.DistNetworkError("Broken pipe"))
        )
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 60)
        assert watch.heartbeat.describe_silent([1]) == "rank 0, which held the store, has ended"
        monkeypatch.setattr(heartbeat.Heartbeat, "patience", 0.1)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert (
            watch.heartbeat.describe_peers()
            == "the launcher's agent, which holds the store, does not answer: stopped, or its machine is lost"
        )
    finally:
        watch.close()


def test_silent_ranks_are_named_before_the_watchdog_of_nccl_ends_the_process(
    two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once of the same ranks, however late in a step, and not where all beat, as far as they do between two looks."""
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(stalled_ranks, "_set_timeout", lambda *_: None)
    watch = stalled_ranks.StallWatch(Timeout(start=60, step=0.8), Strategy())
    try:
        other, count, beating, asked = (
            watch.heartbeat._read_store.clone(),
            itertools.count(),
            threading.Event(),
            list[int](),
        )
        read, silent = watch.heartbeat._read_heartbeats, watch.heartbeat.describe_silent

        def beats_and_read(ranks: Any) -> dict[int, str]:
            if beating.is_set():
                other.set(heartbeat._key(1), f"{next(count)} somewhere")
            return read(ranks)

        def counted(ranks: Any) -> str | None:
            asked.append(1)
            return silent(ranks)

        monkeypatch.setattr(watch.heartbeat, "_read_heartbeats", beats_and_read)
        monkeypatch.setattr(watch.heartbeat, "describe_silent", counted)

        def said(beats: bool) -> str:
            """Until it has looked once from the beginning to the end."""
            (beating.set if beats else beating.clear)()
            before = len(asked)
            until(lambda: len(asked) > before + 2, "no third look")
            return capsys.readouterr().err

        other.set(heartbeat._key(1), "first somewhere")
        beating.set()
        watch.apply_timeout("step", 7)
        assert said(beats=True) == ""
        warning = rf"rank 0: warning: step \d: missing_rank\.py:\d+, after \d+ s of 0\.8 \(trainer\.timeout\.step\): rank 1 {SILENT}\n"
        assert re.fullmatch(warning, said(beats=False))
        watch.apply_timeout("step", 8)
        assert said(beats=False) == ""
        watch._start_times[0] -= 100  # the oldest step that may be under way
        assert said(beats=True) == "" and re.fullmatch(
            warning.replace(r"\d+ s", r"1\d\d s"), said(beats=False)
        )
    finally:
        watch.close()


def test_not_all_ranks_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(
        process_group, "_MEETING", [(dist.TCPStore("127.0.0.1", 0, is_master=True), 0, 2)]
    )
    said = r"^not all ranks started within 1 s \(trainer\.timeout\.start\): rank 1 did not: stopped, or its machine is lost, or not started$"
    with pytest.raises(RankStalled, match=said):
        process_group._start_group("gloo", Timeout(start=1))


def test_ranks_that_waited_in_vain_say_so_before_a_launcher_ends_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each at once, before any of them ends: torchrun ends all others then."""
    lines: list[tuple[float, str]] = []

    def stalled(*_: Any) -> NoReturn:
        raise RankStalled("rank 2 is silent")

    monkeypatch.setattr(__main__, "_run", stalled)
    monkeypatch.setattr(
        time, "sleep", lambda seconds: lines.append((seconds, capsys.readouterr().err))
    )
    for rank, said in {
        "0": "error: rank 2 is silent\n",
        "3": "rank 3: error: rank 2 is silent\n",
    }.items():
        monkeypatch.setenv("RANK", rank)
        assert __main__.main([]) == RankStalled.exit_code and [
            line for line in lines if line[0]
        ] == [(5, said)]
        lines.clear()


@pytest.mark.parametrize(
    ("diagnosis", "silent"),
    [
        ("rank 1 is silent: stopped, or its machine is lost", {1}),
        ("ranks 1, 3, 12 are silent: stopped, or its machine is lost", {1, 3, 12}),
        ("ranks 1, 2 and 30 more are silent: stopped", {1, 2}),
        ("rank 0, which holds the store, does not answer: stopped", set()),
        ("rank 1 is in the collective all_reduce", set()),
    ],
)
def test_a_rank_that_was_stopped_does_not_name_itself(diagnosis: str, silent: set[int]) -> None:
    for rank in (0, 1, 2, 3, 12):
        said = heartbeat.report_for_rank(rank, diagnosis)
        waited = "the other ranks waited for this one, which was stopped, or busy outside Python"
        assert said == (waited if rank in silent else diagnosis)
