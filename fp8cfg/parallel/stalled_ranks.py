"""Stalled ranks: timeouts of collectives, and a report of the missing ranks.

Each rank sends a heartbeat with its current line to the store of the process group. When a
collective times out, the report names the silent ranks or the current lines of other ranks.

With gloo the first rank to time out closes its connections, so the other ranks fail too. It puts
its report into the store, and all ranks raise the same one. With NCCL the host doesn't wait for
collectives, and torch's watchdog ends the process at the timeout. A thread prints the silent ranks
shortly before.
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
"""Prefixes of the public collectives in _FILES. Other waiting functions have other prefixes."""
_TENSOR = f"{Path(dist.__file__).parent}/tensor/"
_DTENSOR = {
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_to_replicate_tensor": "all_gather",
}
"""Collectives of DTensor placements, by method. A method may wait in an operator of its result."""


class Collective(NamedTuple):
    """A collective found on the stack.

    Attributes:
        name: Its name, None if no frame shows it.
        group: Its process group, None if no frame shows it.
    """

    name: str | None
    group: dist.ProcessGroup | None

    def __str__(self) -> str:
        return self.name or "a collective"


def raised_in(error: BaseException) -> Collective:
    """Returns the collective that raised `error`, from the frames of its traceback."""
    # A traceback begins at the outermost frame.
    return _collective(reversed(list(_traced(error.__traceback__))))


def doing(frame: FrameType | None) -> str:
    """Returns the current activity of a thread, as text for a report.

    Args:
        frame: The thread's innermost frame, None if it runs no Python.

    Returns:
        Its collective. Otherwise its innermost line in fp8cfg, or the innermost line
        if no frame is in fp8cfg.
    """
    first = frame
    for each in _outward(frame):
        if name := _name(each):
            return f"the collective {name}"
        # Every copy to the host waits in async_copies.py. The caller's line says more.
        if (path := each.f_code.co_filename).startswith(
            f"{PACKAGE}/"
        ) and path != async_copies.__file__:
            return (
                f"fp8cfg/{Path(path).relative_to(PACKAGE)}:{each.f_lineno}, {each.f_code.co_name}"
            )
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}" if first else "no Python"


def _collective(frames: Iterator[FrameType]) -> Collective:
    """Returns the collective of `frames`, innermost first, up to the first frame of fp8cfg."""
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
    """Returns the collective that a frame runs, None if it runs none."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    # `waited` and `wait` of async_copies.py get the collective as an argument. A functional
    # collective has returned by then, so no frame has its name.
    if path == async_copies.__file__:
        return getattr(frame.f_locals.get("collective"), "__name__", None)
    if path.startswith(_TENSOR):
        return _DTENSOR.get(name)
    return name if path in _FILES and name.startswith(_PREFIXES) else None


def _group(frame: FrameType, named: bool) -> dist.ProcessGroup | None:
    """Returns the process group that a frame uses, None if its locals don't show one.

    Args:
        frame: The frame.
        named: Whether this frame or one inside it runs a collective. `group=None` then means all
            ranks.
    """
    there: dict[str, Any] = frame.f_locals
    own, axis = there.get("self"), there.get("mesh_dim")
    if named and "group" in there and there["group"] is None:
        return dist.group.WORLD
    for of in (there.get("group"), getattr(own, "group", None)):
        if isinstance(of, dist.ProcessGroup):
            return of
        # Functional collectives take the name of a group.
        if isinstance(of, str) and (
            known := next(
                (g for g, name in distributed_c10d._world.pg_names.items() if name == of), None
            )
        ):
            return known
    # DTensor passes a mesh and the number of one of its dimensions.
    for mesh in (there.get("mesh"), getattr(own, "device_mesh", None)):
        if isinstance(mesh, DeviceMesh) and (axis is not None or mesh.ndim == 1):
            return mesh.get_group(axis)
    return None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields `frame` and its callers."""
    while frame:
        yield frame
        frame = frame.f_back


def _traced(at: TracebackType | None) -> Iterator[FrameType]:
    """Yields the frames of a traceback, outermost first."""
    while at:
        yield at.tb_frame
        at = at.tb_next


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


Phase = Literal["start", "step"]
# _set_pg_timeout is deprecated in torch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
APART = "checkpoint"
"""Description of the process group of async saves. Phases don't change its timeout."""
_MARKS = ("gloo/transport/", "Application timeout caused pair closure")
"""Text in gloo's errors. They are plain RuntimeErrors (torch 2.13).

Most have the path of their source file. The second text is from one without a path.
"""
_LATE = ("imed out", "timeout")


class StallWatch:
    """Timeouts of this rank's collectives, and its heartbeat. Ends with `close`.

    Args:
        timeout: The timeout of each phase, in seconds.
        strategy: The parallel layout. Reports name its axes.

    Attributes:
        phase: The current phase.
        step: The current step, counted from 1. 0 before the first one.
    """

    def __init__(self, timeout: Timeout, strategy: Strategy) -> None:
        self.timeout, self.strategy, self.phase, self.step = timeout, strategy, "start", 0
        # At least 8 beats within each timeout.
        self.beats = Heartbeat(min(5.0, timeout.start / 8, timeout.step / 8))
        # Start times of this step and the two before it. See `_warn`.
        self._began = deque([time.monotonic()], maxlen=3)
        self._warning = threading.Thread(
            target=self._warn, name="fp8cfg stall warning", daemon=True
        )
        # gloo raises an error at the timeout, for `diagnosis`. NCCL's watchdog ends the
        # process instead, so the warning must come before.
        if dist.get_backend() == dist.Backend.NCCL:
            self._warning.start()

    def waits(self, phase: Phase, step: int) -> None:
        """Applies the timeout of a phase to all process groups.

        Args:
            phase: The new phase.
            step: The step for reports, counted from 1.
        """
        self.step = step
        # Groups are created during "start", so it applies to new ones in each call.
        if phase != self.phase or phase == "start":
            limit = timedelta(seconds=getattr(self.timeout, phase))
            for group in list(distributed_c10d._world.pg_map):
                # An int is torch's placeholder for a group without this rank.
                if not isinstance(group, int) and group.group_desc != APART:
                    _set_timeout(limit, group)
        self.phase = phase
        self._began.append(time.monotonic())

    def diagnosis(self, error: RuntimeError) -> RankStalled | None:
        """Returns the error for a collective that timed out, on this rank or on another one.

        Args:
            error: The error of a step.

        Returns:
            An error with the collective, its axis and the state of the other ranks. None if no
            collective timed out.
        """
        of = broken(error)
        if of is None:
            return None
        if late := _late(of):
            self.beats.waited_in_vain()
        # The connection is closed, but no rank timed out: a rank has ended.
        elif not self.beats.another_waited():
            return None
        limit = f"{self._limit:g} s (trainer.timeout.{self.phase})"
        how = f"timed out after {limit}" if late else f"was aborted by a rank after {limit}"
        where, others = raised_in(of), self.beats.others()
        axes = where.group and group_axes(
            self.strategy, dist.get_process_group_ranks(where.group), self.beats.size
        )
        over = f" over {axes}" if axes else ""
        what = f"{where}{over}{'' if where.name else f' ({first_line(of)})'}"
        return RankStalled(f"step {max(self.step, 1)}: {what} {how}: {others}")

    def close(self) -> None:
        """Ends the heartbeat and the warnings."""
        self.beats.close()
        if self._warning.ident is not None:
            join(self._warning)

    @property
    def _limit(self) -> float:
        """The timeout of the current phase, in seconds."""
        return float(getattr(self.timeout, self.phase))

    def _warn(self) -> None:
        """Prints a warning shortly before a step, an evaluation or a save reaches the timeout.

        The warning names the silent ranks among this rank's receivers, once for the same ranks. If
        none is silent, the step is just slow, and nothing is printed.
        """
        asked, said = neighbors(self.strategy, self.beats.rank, self.beats.size), None
        # The check takes at most this many seconds.
        early = self.beats.every + self.beats.patience
        while not self.beats.ended.wait(self.beats.every):
            # Steps are launched ahead of the GPU, so collectives of earlier steps may still run.
            # Measure from the oldest start.
            first, began = self._began[0], self._began[-1]
            if time.monotonic() - first < self._limit - early:
                continue
            silent = self.beats.silent(asked)
            # The next step has begun during the check, so this one was not stalled.
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
    """Returns the error of a collective after a timeout or a closed connection.

    Args:
        error: An error. torch's pipelining raises its own error from the one of the collective.

    Returns:
        The innermost such error in the chain of causes, or None.
    """
    found, each = None, cast("BaseException | None", error)
    while each:
        # Match gloo's own text: errors of a data server or of CUDA mention timeouts and connections
        # too.
        if isinstance(each, RuntimeError) and (
            isinstance(each, dist.DistError) or any(mark in str(each) for mark in _MARKS)
        ):
            found = each if _late(each) or "onnection" in str(each) else found
        each = each.__cause__
    return found


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, shortened to 160 characters."""
    return textwrap.shorten(str(error).partition("\n")[0], 160, placeholder=" ...")


def _late(error: BaseException) -> bool:
    """Returns whether an error reports a timeout."""
    return any(word in str(error) for word in _LATE)


@contextmanager
def all_started(
    timeout: Timeout, not_arrived: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Context manager around the start of a process group.

    Args:
        timeout: The timeouts. The start has its own.
        not_arrived: Returns which ranks are missing, or None.

    Raises:
        RankStalled: Some ranks did not start in time.
    """
    try:
        yield
    except RuntimeError as e:  # DistStoreError, DistNetworkError
        if not _late(e):
            raise
        why = not_arrived() or first_line(e)
        raise RankStalled(
            f"not all ranks started within {timeout.start:g} s (trainer.timeout.start): {why}"
        ) from e
