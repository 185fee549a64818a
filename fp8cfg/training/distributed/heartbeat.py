"""Heartbeat of a rank: a count, and what its main thread does, which it writes to the store of the process group every few seconds.

A rank whose count stands is stopped, gone with its machine, or in a call that holds Python's lock. Whoever finds out leaves that in
the store, and the others hear it with their next beat: it may be the last that the store says.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, TypeVar

import torch.distributed as dist

from fp8cfg.training.distributed.blocked_call import doing
from fp8cfg.training.distributed.store_connection import StoreConnection

_WAITED, _FOUND = "fp8cfg/waited in vain", "fp8cfg/diagnosis"
"""In the store: whether a rank was over its limit, and what it then found."""
_GONE = "stopped, or gone with the machine"
_UNSAID = 2.0
"""Seconds within which a rank that was over its limit says so."""
T = TypeVar("T")
U = TypeVar("U")


class Heartbeat:
    """That of this rank, `every` so many seconds, until `close`. The thread that makes it is the one that it tells of."""

    def __init__(self, every: float) -> None:
        self.every, self.heard = every, list[str]()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ended, self._main = threading.Event(), threading.get_ident()
        self._beats, self._reads = StoreConnection(), StoreConnection()  # a call may block
        self._thread = threading.Thread(target=self._beat, name="fp8cfg heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End it. Where this rank holds the store, the others may first hear what it has found."""
        if (
            self.rank == 0
            and not _agent_holds_store()
            and _within(1, lambda: self._found(self._beats), None)
        ):
            self.ended.wait(2 * self.every)
        self.ended.set()
        join(self._thread)

    def where(self) -> FrameType | None:
        """The frame of the thread that made it."""
        return sys._current_frames().get(self._main)

    def waited_in_vain(self) -> None:
        """Let the others know that this rank was over its limit: gloo closes its connections then."""
        _within(1, lambda: self._reads.set(_WAITED, str(self.rank)), None)

    def another_waited(self) -> bool:
        """Whether a rank was over its limit, whose connections are closed before it can say so."""
        return _within(_UNSAID + 1, self._said, False)

    def others(self) -> str:
        """What the other ranks do, those first that do not beat; what another rank has found of that, where one has. Within some
        seconds, whatever the store does."""
        return (
            _within(self.patience, self._told, None)
            or next(iter(self.heard), None)
            or _silent_store()
        )

    def silent(self, ranks: Sequence[int]) -> str | None:
        """Which of `ranks` do not beat, or that the store is silent or has ended; None where all of them do."""

        def asked() -> str | None:
            try:
                return _said_of(self._seen(ranks)[0])
            except dist.DistStoreError:  # late
                return _silent_store()
            except RuntimeError:
                return _silent_store(gone=True)

        return _within(self.patience, asked, _silent_store())

    @property
    def patience(self) -> float:
        """Seconds for which the store is waited for at most."""
        return 4 * self.every + 5

    def _beat(self) -> None:
        count = 0
        with suppress(
            RuntimeError
            # the store has ended before this rank: each call to it would print a traceback of torch's
        ):
            while not self.ended.wait(self.every if count else 0):
                count += 1
                with suppress(dist.DistStoreError):  # it was late
                    self._beats.set(_key(self.rank), f"{count} {doing(self.where())}")
                    if not self.heard and (found := self._found(self._beats)):
                        self.heard.append(found)

    def _said(self) -> bool:
        end = time.monotonic() + _UNSAID
        while not (said := bool(self._reads.check([_WAITED]))) and time.monotonic() < end:
            self.ended.wait(0.05)
        return said

    def _told(self) -> str | None:
        try:
            told = self._found(self._reads) or self._all()
            self._reads.set(
                _FOUND, told := self._found(self._reads) or told
            )  # ranks that have found it meanwhile may have left
        except RuntimeError:
            return None if self.heard else _silent_store(gone=True)
        return told

    def _all(self) -> str:
        silent, there = self._seen([rank for rank in range(self.size) if rank != self.rank])
        elsewhere = {
            rank: what for rank, what in there.items() if not what.startswith("the collective")
        }
        return _said_of(silent) or "; ".join(
            f"rank {rank} is in {what}" for rank, what in list((elsewhere or there).items())[:8]
        )

    def _seen(self, ranks: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Those of `ranks` that do not beat, and what the others do."""
        all_came = not ranks or self._reads.check(
            [_key(rank) for rank in ranks]
        )  # one request, of thousands of ranks too
        there = (
            list(ranks) if all_came else [rank for rank in ranks if self._reads.check([_key(rank)])]
        )
        before = self._read(there)
        self.ended.wait(2.5 * self.every)
        after = self._read(there)
        beating = {
            rank: after[rank].partition(" ")[2] for rank in there if before[rank] != after[rank]
        }
        return [rank for rank in ranks if rank not in beating], beating

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        values = self._reads.multi_get([_key(rank) for rank in ranks]) if ranks else []
        return {rank: bytes(value).decode() for rank, value in zip(ranks, values, strict=True)}

    def _found(self, store: Any) -> str | None:
        return bytes(store.get(_FOUND)).decode() if store.check([_FOUND]) else None


def join(thread: threading.Thread) -> None:
    """Wait for a thread that calls the store, unless that is silent. One that comes back from torch's C++ while Python ends is
    unwound through it, and C++ ends the process: "terminate called without an active exception", SIGABRT (until CPython 3.14).
    """
    thread.join(_UNSAID)


def arrive(store: Any, rank: int) -> None:
    """Let the others know in `store` that `rank` is here, before there is a process group."""
    store.set(f"fp8cfg/arrived/{rank}", "")


def not_arrived(store: Any, size: int) -> str | None:
    """Which of `size` ranks have not arrived in `store`; None where all have, and where it is silent."""

    def found() -> list[int]:
        return [rank for rank in range(size) if not store.check([f"fp8cfg/arrived/{rank}"])]

    ranks = _within(_UNSAID, found, [])
    return f"{_ranks(ranks)} did not: {_GONE}, or not started" if ranks else None


def _agent_holds_store() -> bool:
    """Whether the store is that of torchrun's agent, not the first rank's (torch.distributed.rendezvous)."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _silent_store(gone: bool = False) -> str:
    holder = "the launcher's agent" if _agent_holds_store() else "rank 0"
    return (
        f"{holder}, which held the store, has ended"
        if gone
        else f"{holder}, which holds the store, is silent: {_GONE}"
    )


def _said_of(silent: Sequence[int]) -> str | None:
    return (
        f"{_ranks(silent)} {'is' if len(silent) == 1 else 'are'} silent: {_GONE}, or busy outside"
        " of Python"
        if silent
        else None
    )


def _within(seconds: float, call: Callable[[], T], otherwise: U) -> T | U:
    """What `call` returns; `otherwise` where it blocks on a store that does not answer, or fails on one that has ended."""
    found: list[T | U] = [otherwise]

    def calls() -> None:
        with suppress(RuntimeError):
            found.append(call())

    calling = threading.Thread(target=calls, daemon=True)
    calling.start()
    calling.join(seconds)
    return found[-1]


def _key(rank: int) -> str:
    return f"fp8cfg/beat/{rank}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (
        f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    )
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"
