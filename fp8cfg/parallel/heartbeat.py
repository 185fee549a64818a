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

from fp8cfg.parallel.blocked_collective import doing

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
        def call(*given: Any) -> Any:
            try:
                return getattr(self._store, name)(*given)
            except dist.DistNetworkError:
                if not _answers(self._store):
                    raise
                self._store = self._store.clone()
                return getattr(self._store, name)(*given)

        return call


def _answers(store: Any) -> bool:
    """Returns whether the host of `store` still accepts connections."""
    # A PrefixStore wraps the store with the address.
    while inner := getattr(store, "underlying_store", None):
        store = inner
    try:
        socket.create_connection((store.host, store.port), PATIENCE).close()
    except (AttributeError, OSError):  # AttributeError: a HashStore has no host
        return False
    return True


_WAITED, _FOUND = "fp8cfg/waited in vain", "fp8cfg/diagnosis"
"""Keys of the store: the rank that timed out, and its report."""
_GONE = "stopped, or its machine is lost"
_UNSAID = 2.0
"""Seconds to wait for _WAITED after a timeout on another rank, and for a thread to end."""
T = TypeVar("T")
U = TypeVar("U")


class Heartbeat:
    """Heartbeat of this rank: a thread that writes a counter and the current line to the store.

    The line is from the thread of the constructor.

    Args:
        every: Seconds between beats.

    Attributes:
        heard: Another rank's report from the store. Empty until one is made.
        ended: Set by `close`.
    """

    def __init__(self, every: float) -> None:
        self.every, self.heard = every, list[str]()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ended, self._main = threading.Event(), threading.get_ident()
        # Two connections: a blocked read must not stop the heartbeat.
        self._beats, self._reads = StoreConnection(), StoreConnection()
        self._thread = threading.Thread(target=self._beat, name="fp8cfg heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the heartbeat."""
        # The store ends with rank 0, unless torchrun's agent runs it. Other ranks need time to read
        # the report.
        if (
            self.rank == 0
            and not _agent_holds_store()
            and _within(1, lambda: self._found(self._beats), None)
        ):
            self.ended.wait(2 * self.every)
        self.ended.set()
        join(self._thread)

    def where(self) -> FrameType | None:
        """Returns the current frame of the thread that created the heartbeat."""
        return sys._current_frames().get(self._main)

    def waited_in_vain(self) -> None:
        """Tells the other ranks that this rank timed out.

        With gloo they only see a closed connection, as after a crash.
        """
        _within(1, lambda: self._reads.set(_WAITED, str(self.rank)), None)

    def another_waited(self) -> bool:
        """Returns whether another rank timed out."""
        # gloo closes the connections before the rank can set the key, so `_said` waits for it.
        return _within(_UNSAID + 1, self._said, False)

    def others(self) -> str:
        """Returns the state of the other ranks, as text for the report.

        The text names silent ranks. If there are none, it has the current line of up to 8 ranks. If
        another rank has made a report already, returns that report. Returns within `patience`
        seconds even if the store does not answer.
        """
        told = (
            _within(self.patience, self._told, None)
            or next(iter(self.heard), None)
            or _silent_store()
        )
        return seen_from(self.rank, told)

    def silent(self, ranks: Sequence[int]) -> str | None:
        """Checks the heartbeats of some ranks.

        Args:
            ranks: The ranks.

        Returns:
            Text with the silent ranks or a problem of the store. None if all ranks beat.
        """

        def asked() -> str | None:
            try:
                return _said_of(self._seen(ranks)[0])
            except dist.DistStoreError:  # no answer in time
                return _silent_store()
            except RuntimeError:
                return _silent_store(gone=True)

        return _within(self.patience, asked, _silent_store())

    @property
    def patience(self) -> float:
        """Seconds to wait for answers of the store at most."""
        # `_seen` waits 2.5 beats between two reads.
        return 4 * self.every + 5

    def _beat(self) -> None:
        """Writes heartbeats until `close`. Runs in the thread."""
        count = 0
        # The store may end before this rank. Stop then: each further call would make torch print a
        # traceback.
        with suppress(RuntimeError):
            while not self.ended.wait(self.every if count else 0):
                count += 1
                # No answer in time: try again at the next beat.
                with suppress(dist.DistStoreError):
                    self._beats.set(_key(self.rank), f"{count} {doing(self.where())}")
                    if not self.heard and (found := self._found(self._beats)):
                        self.heard.append(found)

    def _said(self) -> bool:
        """Returns whether a rank has timed out. Waits up to _UNSAID seconds for its key."""
        end = time.monotonic() + _UNSAID
        while not (said := bool(self._reads.check([_WAITED]))) and time.monotonic() < end:
            self.ended.wait(0.05)
        return said

    def _told(self) -> str | None:
        """Returns another rank's report or makes one, and puts it into the store.

        Returns None if the store has ended and `heard` has a report.
        """
        try:
            told = self._found(self._reads) or self._all()
            # Look again: `_all` takes seconds. Meanwhile another rank may have made its report and
            # ended, and would be reported as silent here.
            self._reads.set(_FOUND, told := self._found(self._reads) or told)
        except RuntimeError:
            return None if self.heard else _silent_store(gone=True)
        return told

    def _all(self) -> str:
        """Returns the silent ranks or, if all beat, what up to 8 of them are doing."""
        silent, there = self._seen([rank for rank in range(self.size) if rank != self.rank])
        # Ranks outside of collectives come first: the others wait for them.
        elsewhere = {
            rank: what for rank, what in there.items() if not what.startswith("the collective")
        }
        return _said_of(silent) or "; ".join(
            f"rank {rank} is in {what}" for rank, what in list((elsewhere or there).items())[:8]
        )

    def _seen(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Reads the heartbeats of some ranks twice. A rank is silent if its heartbeat stays.

        Returns:
            The silent ranks, and the current line of each other rank.
        """
        # One request for all ranks: a run may have thousands. Only if a key is missing, ask for
        # each rank, because a read of a missing key blocks.
        all_came = not ranks or self._reads.check([_key(rank) for rank in ranks])
        there = (
            list(ranks) if all_came else [rank for rank in ranks if self._reads.check([_key(rank)])]
        )
        before = self._read(there)
        # At least two beats: a slow rank must not be reported as silent.
        self.ended.wait(2.5 * self.every)
        after = self._read(there)
        beating = {
            rank: after[rank].partition(" ")[2] for rank in there if before[rank] != after[rank]
        }
        return [rank for rank in ranks if rank not in beating], beating

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        """Returns the heartbeats of `ranks`, which must be in the store."""
        values = self._reads.multi_get([_key(rank) for rank in ranks]) if ranks else []
        return {rank: bytes(value).decode() for rank, value in zip(ranks, values, strict=True)}

    def _found(self, store: Any) -> str | None:
        """Returns the report in the store, None if no rank has made one."""
        return bytes(store.get(_FOUND)).decode() if store.check([_FOUND]) else None


def join(thread: threading.Thread) -> None:
    """Waits up to _UNSAID seconds for a thread that calls the store.

    If a thread returns from torch's C++ code while Python exits, Python unwinds it through C++ and
    the process ends with SIGABRT: "terminate called without an active exception" (before CPython
    3.14). The limit is for a store without answers.
    """
    thread.join(_UNSAID)


def arrive(store: Any, rank: int) -> None:
    """Marks `rank` as started in `store`, before there is a process group."""
    store.set(f"fp8cfg/arrived/{rank}", "")


def not_arrived(store: Any, size: int) -> str | None:
    """Returns which ranks have not called `arrive`, as text for an error.

    Args:
        store: The store in which the ranks meet.
        size: The number of ranks.

    Returns:
        None if all ranks have arrived or the store does not answer.
    """

    def found() -> list[int]:
        return [rank for rank in range(size) if not store.check([f"fp8cfg/arrived/{rank}"])]

    ranks = _within(_UNSAID, found, [])
    return f"{_ranks(ranks)} did not: {_GONE}, or not started" if ranks else None


def _agent_holds_store() -> bool:
    """Returns whether torchrun's agent runs the store instead of rank 0."""
    # torch.distributed.rendezvous reads the same variable.
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _silent_store(gone: bool = False) -> str:
    """Returns the text for a store without answers or, if `gone`, for an ended one."""
    holder = "the launcher's agent" if _agent_holds_store() else "rank 0"
    if gone:
        return f"{holder}, which held the store, has ended"
    return f"{holder}, which holds the store, does not answer: {_GONE}"


def _said_of(silent: Sequence[int]) -> str | None:
    """Returns the text for silent ranks, None if there are none."""
    if not silent:
        return None
    verb = "is" if len(silent) == 1 else "are"
    return f"{_ranks(silent)} {verb} silent: {_GONE}, or busy outside Python"


def seen_from(rank: int, diagnosis: str) -> str:
    """Returns a report from the point of view of `rank`.

    If the report names `rank` as silent, the rank was stopped and has continued. The new text says
    so.
    """
    silent = re.match(r"ranks? (\d+(?:, \d+)*)(?: and \d+ more)? (?:is|are) silent", diagnosis)
    if silent is None or str(rank) not in silent[1].split(", "):
        return diagnosis
    return "the other ranks waited for this one, which was stopped, or busy outside Python"


def _within(seconds: float, call: Callable[[], T], otherwise: U) -> T | U:
    """Calls a function of the store with a time limit.

    Args:
        seconds: The limit.
        call: The function.
        otherwise: Returned if the call takes longer or raises RuntimeError, as for an ended store.
    """
    found: list[T | U] = [otherwise]

    def calls() -> None:
        with suppress(RuntimeError):
            found.append(call())

    # A daemon thread: a blocked call in C++ cannot be interrupted.
    calling = threading.Thread(target=calls, daemon=True)
    calling.start()
    calling.join(seconds)
    return found[-1]


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
