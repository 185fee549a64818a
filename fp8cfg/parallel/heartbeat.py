"""Heartbeats of ranks: a counter and the current line of each rank, in the store of the group.

A rank that timed out reads them to name the silent ranks, or the lines of the others.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8cfg.parallel.blocked_collective import describe_activity

PATIENCE = 5.0
"""Seconds to wait for a connection to the store."""


class StoreConnection:
    """A second connection to the default store, with all methods of torch's Store.

    A blocked call on one connection does not block calls on another. If the connection breaks
    but the store still runs, it connects again, once per call.

    Methods raise DistNetworkError if the store has ended and DistStoreError if it does not answer
    in time.
    """

    def __init__(self) -> None:
        default: Any = distributed_c10d._get_default_store()
        self._store = default.clone()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return getattr(self._store, name)(*arguments)
            except dist.DistNetworkError:
                if not _is_reachable(self._store):
                    raise
                self._store = self._store.clone()
                return getattr(self._store, name)(*arguments)

        return call


def _is_reachable(store: Any) -> bool:
    """Returns whether the host of `store` still accepts connections."""
    # A PrefixStore wraps the store with the address.
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        socket.create_connection((store.host, store.port), PATIENCE).close()
    except (AttributeError, OSError):  # AttributeError: a HashStore has no host
        return False
    return True


_TIMEOUT_KEY = "fp8cfg/waited in vain"
"""Key of the store with the rank that timed out."""
_REPORT_KEY = "fp8cfg/diagnosis"
"""Key of the store with the report on the silent ranks."""
_GONE = "stopped, or its machine is lost"
_SHORT_WAIT = 2.0
"""Seconds to wait for _TIMEOUT_KEY after a timeout on another rank, and for a thread to end."""
T = TypeVar("T")
U = TypeVar("U")


class Heartbeat:
    """Heartbeat of this rank: a thread that writes a counter and the current line to the store.

    The line is from the thread of the constructor.

    Args:
        interval: Seconds between beats.

    Attributes:
        peer_report: Another rank's report from the store. None until one is made.
        ended: Set by `close`.
    """

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self.peer_report: str | None = None
        self.ended = threading.Event()
        self._main_thread = threading.get_ident()
        # Two connections: a blocked read must not stop the heartbeat.
        self._beat_store = StoreConnection()
        self._read_store = StoreConnection()
        self._thread = threading.Thread(target=self._beat, name="fp8cfg heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the heartbeat."""
        # The store ends with rank 0, unless torchrun's agent runs it. Other ranks need time to read
        # the report.
        if self.rank == 0 and not _agent_runs_store():
            report = _call_with_limit(1, lambda: self._read_report(self._beat_store), None)
            if report:
                self.ended.wait(2 * self.interval)
        self.ended.set()
        join(self._thread)

    def main_frame(self) -> FrameType | None:
        """Returns the current frame of the thread that created the heartbeat."""
        return sys._current_frames().get(self._main_thread)

    def announce_timeout(self) -> None:
        """Tells the other ranks that this rank timed out.

        With gloo they only see a closed connection, as after a crash.
        """
        _call_with_limit(1, lambda: self._read_store.set(_TIMEOUT_KEY, str(self.rank)), None)

    def has_peer_timed_out(self) -> bool:
        """Returns whether another rank timed out."""
        # gloo closes the connections before the rank can set the key, so wait for it.
        return _call_with_limit(_SHORT_WAIT + 1, self._wait_for_timeout_key, False)

    def describe_peers(self) -> str:
        """Returns the state of the other ranks, as text for the report.

        The text names silent ranks. If there are none, it has the current line of up to 8 ranks. If
        another rank has made a report already, returns that report. Returns within `patience`
        seconds even if the store does not answer.
        """
        report = (
            _call_with_limit(self.patience, self._share_report, None)
            or self.peer_report
            or _describe_silent_store()
        )
        return report_for_rank(self.rank, report)

    def describe_silent(self, ranks: Sequence[int]) -> str | None:
        """Checks the heartbeats of some ranks.

        Args:
            ranks: The ranks.

        Returns:
            Text with the silent ranks or a problem of the store. None if all ranks beat.
        """

        def check() -> str | None:
            try:
                silent, _ = self._check_heartbeats(ranks)
            except dist.DistStoreError:  # no answer in time
                return _describe_silent_store()
            except RuntimeError:
                return _describe_ended_store()
            return _describe_silent_ranks(silent) if silent else None

        return _call_with_limit(self.patience, check, _describe_silent_store())

    @property
    def patience(self) -> float:
        """Seconds to wait for answers of the store at most."""
        # `_check_heartbeats` waits 2.5 beats between two reads.
        return 4 * self.interval + 5

    def _beat(self) -> None:
        """Writes heartbeats until `close`. Runs in the thread."""
        count = 0
        delay = 0.0
        # The store may end before this rank. Stop then: each further call would make torch print a
        # traceback.
        with suppress(RuntimeError):
            while not self.ended.wait(delay):
                delay = self.interval
                count += 1
                # No answer in time: try again at the next beat.
                with suppress(dist.DistStoreError):
                    activity = describe_activity(self.main_frame())
                    self._beat_store.set(_key(self.rank), f"{count} {activity}")
                    if self.peer_report is None:
                        self.peer_report = self._read_report(self._beat_store)

    def _wait_for_timeout_key(self) -> bool:
        """Returns whether a rank has timed out. Waits up to _SHORT_WAIT seconds for its key."""
        end = time.monotonic() + _SHORT_WAIT
        while True:
            if self._read_store.check([_TIMEOUT_KEY]):
                return True
            if time.monotonic() >= end:
                return False
            self.ended.wait(0.05)

    def _share_report(self) -> str | None:
        """Returns another rank's report or makes one, and puts it into the store.

        Returns None if the store has ended and `peer_report` has a report.
        """
        try:
            report = self._read_report(self._read_store) or self._make_report()
            # Look again: `_make_report` takes seconds. Meanwhile another rank may have made its
            # report and ended, and would be reported as silent here.
            report = self._read_report(self._read_store) or report
            self._read_store.set(_REPORT_KEY, report)
        except RuntimeError:
            if self.peer_report:
                return None
            return _describe_ended_store()
        return report

    def _make_report(self) -> str:
        """Returns the silent ranks or, if all beat, what up to 8 of them are doing."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        silent, activities = self._check_heartbeats(peers)
        if silent:
            return _describe_silent_ranks(silent)
        # If some ranks are outside of collectives, the others wait for them.
        outside = {
            rank: activity
            for rank, activity in activities.items()
            if not activity.startswith("the collective")
        }
        items = list((outside or activities).items())
        return "; ".join(f"rank {rank} is in {activity}" for rank, activity in items[:8])

    def _check_heartbeats(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Reads the heartbeats of some ranks twice. A rank is silent if its heartbeat stays.

        Returns:
            The silent ranks, and the current line of each other rank.
        """
        # A read of a missing key blocks, so ask first. One request for all ranks: a run may have
        # thousands. Only if a key is missing, ask for each rank.
        started = list(ranks)
        if ranks and not self._read_store.check([_key(rank) for rank in ranks]):
            started = [rank for rank in ranks if self._read_store.check([_key(rank)])]
        first_beats = self._read_heartbeats(started)
        # At least two beats: a slow rank must not be reported as silent.
        self.ended.wait(2.5 * self.interval)
        second_beats = self._read_heartbeats(started)
        activities = {}
        for rank in started:
            if first_beats[rank] != second_beats[rank]:
                _, _, activities[rank] = second_beats[rank].partition(" ")
        return [rank for rank in ranks if rank not in activities], activities

    def _read_heartbeats(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the heartbeats of `ranks`, which must be in the store."""
        if not ranks:
            return {}
        values = self._read_store.multi_get([_key(rank) for rank in ranks])
        return {rank: bytes(value).decode() for rank, value in zip(ranks, values, strict=True)}

    def _read_report(self, store: Any) -> str | None:
        """Returns the report in the store, None if no rank has made one."""
        if not store.check([_REPORT_KEY]):
            return None
        return bytes(store.get(_REPORT_KEY)).decode()


def join(thread: threading.Thread) -> None:
    """Waits up to _SHORT_WAIT seconds for a thread that calls the store.

    If a thread returns from torch's C++ code while Python exits, Python unwinds it through C++ and
    the process ends with SIGABRT: "terminate called without an active exception" (before CPython
    3.14). The limit is for a store without answers.
    """
    thread.join(_SHORT_WAIT)


def arrive(store: Any, rank: int) -> None:
    """Marks `rank` as started in `store`, before there is a process group."""
    store.set(_arrival_key(rank), "")


def describe_missing(store: Any, size: int) -> str | None:
    """Returns which ranks have not called `arrive`, as text for an error.

    Args:
        store: The store in which the ranks meet.
        size: The number of ranks.

    Returns:
        None if all ranks have arrived or the store does not answer.
    """

    def list_missing() -> list[int]:
        return [rank for rank in range(size) if not store.check([_arrival_key(rank)])]

    missing = _call_with_limit(_SHORT_WAIT, list_missing, [])
    if not missing:
        return None
    return f"{_ranks(missing)} did not: {_GONE}, or not started"


def _arrival_key(rank: int) -> str:
    return f"fp8cfg/arrived/{rank}"


def _agent_runs_store() -> bool:
    """Returns whether torchrun's agent runs the store instead of rank 0."""
    # torch.distributed.rendezvous reads the same variable.
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _store_host() -> str:
    """Returns the process that runs the store, as text."""
    return "the launcher's agent" if _agent_runs_store() else "rank 0"


def _describe_ended_store() -> str:
    return f"{_store_host()}, which held the store, has ended"


def _describe_silent_store() -> str:
    return f"{_store_host()}, which holds the store, does not answer: {_GONE}"


def _describe_silent_ranks(silent: Sequence[int]) -> str:
    """Returns the text for one or more silent ranks."""
    verb = "is" if len(silent) == 1 else "are"
    return f"{_ranks(silent)} {verb} silent: {_GONE}, or busy outside Python"


def report_for_rank(rank: int, report: str) -> str:
    """Returns a report from the point of view of `rank`.

    If the report names `rank` as silent, the rank was stopped and has continued. The new text says
    so.
    """
    silent = re.match(r"ranks? (\d+(?:, \d+)*)(?: and \d+ more)? (?:is|are) silent", report)
    if silent is None or str(rank) not in silent[1].split(", "):
        return report
    return "the other ranks waited for this one, which was stopped, or busy outside Python"


def _call_with_limit(seconds: float, call: Callable[[], T], default: U) -> T | U:
    """Calls a function of the store with a time limit.

    Args:
        seconds: The limit.
        call: The function.
        default: Returned if the call takes longer or raises RuntimeError, as for an ended store.
    """
    results: list[T | U] = [default]

    def run() -> None:
        with suppress(RuntimeError):
            results.append(call())

    # A daemon thread: a blocked call in C++ cannot be interrupted.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[-1]


def _key(rank: int) -> str:
    """Returns the key of a rank's heartbeat in the store."""
    return f"fp8cfg/beat/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    """Returns up to 16 ranks as text, such as `ranks 1, 2 and 5 more`."""
    text = "rank " if len(ranks) == 1 else "ranks "
    text += ", ".join(map(str, ranks[:16]))
    if len(ranks) > 16:
        text += f" and {len(ranks) - 16} more"
    return text
