"""Stalled ranks: a time limit on collectives, over which the ranks that wait say who is missing, by its heartbeat, and where.

The first rank that has waited in vain takes others with it, for gloo closes its connections; what it finds holds for all. With
NCCL, whose collectives the host does not wait for, it is torch's own watchdog that ends the process at this limit; before, a thread
says which ranks are silent.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.numerics import async_copies
from fp8cfg.parallel.mesh import group_axes, neighbors
from fp8cfg.schema.errors import RankStalled
from fp8cfg.schema.training import Strategy, Timeout

PACKAGE = Path(__file__).parents[1]
_FILES = {distributed_c10d.__file__, _functional_collectives.__file__}
_PREFIXES = (
    "all_",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "barrier",
    "monitored_barrier",
)
"""How the names of public collectives in torch's _FILES begin, and those of no other functions there that wait."""
_TENSOR = f"{Path(dist.__file__).parent}/tensor/"
_DTENSOR = {
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_to_replicate_tensor": "all_gather",
}
"""What methods of a DTensor's placements do: they may wait for it in an operator of the result."""


class Collective(NamedTuple):
    """The name of a collective and its process group; None where the frames do not say."""

    name: str | None
    group: dist.ProcessGroup | None

    def __str__(self) -> str:
        return self.name or "a collective"


def raised_in(error: BaseException) -> Collective:
    """The collective that `error` comes from."""
    return _collective(reversed(list(_traced(error.__traceback__))))


def doing(frame: FrameType | None) -> str:
    """What a thread does at `frame`: the collective that it is in, or its line of this package, which says more than that of a copy
    to the host that it waits for, or of the program around it."""
    first = frame
    for each in _outward(frame):
        if name := _name(each):
            return f"the collective {name}"
        if (path := each.f_code.co_filename).startswith(
            f"{PACKAGE}/"
        ) and path != async_copies.__file__:
            return (
                f"fp8cfg/{Path(path).relative_to(PACKAGE)}:{each.f_lineno}, {each.f_code.co_name}"
            )
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}" if first else "no Python"


def _collective(frames: Iterator[FrameType]) -> Collective:
    """That of the innermost frames, up to the first of this package; `frames` go outward."""
    name: str | None = None
    group: dist.ProcessGroup | None = None
    for frame in frames:
        ours = frame.f_code.co_filename.startswith(f"{PACKAGE}/")
        name = name or _name(frame)
        group = group or _group(frame, named=name is not None)
        if ours or (name and group):
            break
    return Collective(name, group)


def _name(frame: FrameType) -> str | None:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == async_copies.__file__:
        return getattr(frame.f_locals.get("collective"), "__name__", None)
    if path.startswith(_TENSOR):
        return _DTENSOR.get(name)
    return name if path in _FILES and name.startswith(_PREFIXES) else None


def _group(frame: FrameType, named: bool) -> dist.ProcessGroup | None:
    """The process group that a frame has as its local or its object's `group`, of which None is all ranks in a collective, or as a
    dimension of a mesh."""
    there: dict[str, Any] = frame.f_locals
    own, axis = there.get("self"), there.get("mesh_dim")
    if named and "group" in there and there["group"] is None:
        return dist.group.WORLD
    for of in (there.get("group"), getattr(own, "group", None)):
        if isinstance(of, dist.ProcessGroup):
            return of
        if isinstance(of, str) and (
            known := next(
                (g for g, name in distributed_c10d._world.pg_names.items() if name == of), None
            )
        ):
            return known
    for mesh in (there.get("mesh"), getattr(own, "device_mesh", None)):
        if isinstance(mesh, DeviceMesh) and (axis is not None or mesh.ndim == 1):
            return mesh.get_group(axis)
    return None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _traced(at: TracebackType | None) -> Iterator[FrameType]:
    while at:
        yield at.tb_frame
        at = at.tb_next


PATIENCE = 5.0
"""Seconds for which a store may take to be connected with."""


class StoreConnection:
    """Another connection to the default store, with all methods of torch's Store. They raise DistNetworkError where the store has
    ended, and DistStoreError where it is late."""

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
    """Whether the host of `store` still takes connections for it."""
    while inner := getattr(store, "underlying_store", None):  # of a prefix
        store = inner
    try:
        socket.create_connection((store.host, store.port), PATIENCE).close()
    except (AttributeError, OSError):  # of a store without a host
        return False
    return True


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
        told = (
            _within(self.patience, self._told, None)
            or next(iter(self.heard), None)
            or _silent_store()
        )
        return seen_from(self.rank, told)

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


def seen_from(rank: int, diagnosis: str) -> str:
    """Returns `diagnosis`, or what it means to `rank` if that is the silent one: it was stopped, and continues."""
    silent = re.match(r"ranks? (\d+(?:, \d+)*)(?: and \d+ more)? (?:is|are) silent", diagnosis)
    if silent is None or str(rank) not in silent[1].split(", "):
        return diagnosis
    return "the other ranks waited for this one, which was stopped, or busy outside of Python"


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


Phase = Literal["start", "step"]
_set_timeout = (
    getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
)  # deprecated in torch 2.15
APART = "checkpoint"
"""The group of what runs beside steps, whose limit stays."""
_MARKS = ("gloo/transport/", "Application timeout caused pair closure")
"""What gloo's errors have, which are of no class of their own (torch 2.13): where it raises them, and the one without."""
_LATE = ("imed out", "timeout")


class StallWatch:
    """The limits of this rank's collectives, in the layout of `strategy`, and its heartbeat, from the process group's start to
    `close`."""

    def __init__(self, timeout: Timeout, strategy: Strategy) -> None:
        self.timeout, self.strategy, self.phase, self.step = timeout, strategy, "start", 0
        self.beats = Heartbeat(min(5.0, timeout.start / 8, timeout.step / 8))
        self._began = deque([time.monotonic()], maxlen=3)
        self._warning = threading.Thread(
            target=self._warn, name="fp8cfg stall warning", daemon=True
        )
        if dist.get_backend() == dist.Backend.NCCL:
            self._warning.start()

    def waits(self, phase: Phase, step: int) -> None:
        """Set the limit of all groups to that of `phase`; `step`, counted from 1, is what a diagnosis names."""
        self.step = step
        if phase != self.phase or phase == "start":  # groups are made at the start
            limit = timedelta(seconds=getattr(self.timeout, phase))
            for group in list(distributed_c10d._world.pg_map):
                if not isinstance(group, int) and group.group_desc != APART:
                    _set_timeout(limit, group)
        self.phase = phase
        self._began.append(time.monotonic())

    def diagnosis(self, error: RuntimeError) -> RankStalled | None:
        """Which collective of which axis was over its limit, here or on a rank that has left for that, and what the other ranks
        do; None where `error` says neither."""
        of = broken(error)
        if of is None:
            return None
        if late := _late(of):
            self.beats.waited_in_vain()
        elif not self.beats.another_waited():
            return None
        limit = f"{self._limit:g} s (trainer.timeout.{self.phase})"
        how = (
            f"was not done in {limit}"
            if late
            else f"was broken off by a rank that had waited {limit}"
        )
        where, others = raised_in(of), self.beats.others()
        axes = where.group and group_axes(
            self.strategy, dist.get_process_group_ranks(where.group), self.beats.size
        )
        over = f" over {axes}" if axes else ""
        what = f"{where}{over}{'' if where.name else f' ({first_line(of)})'}"
        return RankStalled(f"step {max(self.step, 1)}: {what} {how}: {others}")

    def close(self) -> None:
        """End the heartbeat, and what is said of it."""
        self.beats.close()
        if self._warning.ident is not None:
            join(self._warning)

    @property
    def _limit(self) -> float:
        return float(getattr(self.timeout, self.phase))

    def _warn(self) -> None:
        """Say, where a step, evaluation or save takes almost as long as a collective may, or longer, which of the ranks that this
        one sends to are silent, once of the same ones. Where none is, it is long, and fine."""
        asked, said = neighbors(self.strategy, self.beats.rank, self.beats.size), None
        early = self.beats.every + self.beats.patience  # so long it takes at most to find out
        while not self.beats.ended.wait(self.beats.every):
            # Collectives of the step before may still be under way where steps are launched ahead: its time counts.
            first, began = self._began[0], self._began[-1]
            if time.monotonic() - first < self._limit - early:
                continue
            silent = self.beats.silent(asked)
            if self._began[-1] != began or silent == said or self.beats.ended.is_set():
                continue
            if said := silent:
                after = (
                    f"after {time.monotonic() - first:.0f} s of {self._limit:g}"
                    f" (trainer.timeout.{self.phase})"
                )
                print(
                    f"rank {self.beats.rank}: warning: step {max(self.step, 1)}:"
                    f" {doing(self.beats.where())}, {after}: {silent}",
                    file=sys.stderr,
                    flush=True,
                )


def broken(error: BaseException) -> RuntimeError | None:
    """The error of a collective that was over its limit, or whose connection was closed: `error`, or the innermost of those that it
    was raised from (torch's pipelining raises its own); None where there is none. One whose words are alike, of a data server or of
    CUDA, is none."""
    found, each = None, cast("BaseException | None", error)
    while each:
        if isinstance(each, RuntimeError) and (
            isinstance(each, dist.DistError) or any(mark in str(each) for mark in _MARKS)
        ):
            found = each if _late(each) or "onnection" in str(each) else found
        each = each.__cause__
    return found


def first_line(error: BaseException) -> str:
    """The first line of `error`, or most of it."""
    return textwrap.shorten(str(error).partition("\n")[0], 160, placeholder=" ...")


def _late(error: BaseException) -> bool:
    return any(word in str(error) for word in _LATE)


@contextmanager
def all_started(
    timeout: Timeout, not_arrived: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Around the start of a process group: raises RankStalled where not all ranks came, with what `not_arrived` says of those."""
    try:
        yield
    except RuntimeError as e:  # DistStoreError, DistNetworkError
        if not _late(e):
            raise
        why = not_arrived() or first_line(e)
        raise RankStalled(
            f"not all ranks came within {timeout.start:g} s (trainer.timeout.start): {why}"
        ) from e
