"""Stalled ranks: timeouts of collectives, and a report of the missing ranks.

Each rank sends a heartbeat with its current line to the store of the process group (heartbeat.py).
When a collective times out, the report names the silent ranks or the current lines of other ranks.

With gloo the first rank to time out closes its connections, so the other ranks fail too. It puts
its report into the store, and all ranks raise the same one. With NCCL the host doesn't wait for
collectives, and torch's watchdog ends the process at the timeout. A thread prints the silent ranks
shortly before.
"""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal, cast

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8cfg.parallel.blocked_collective import doing, raised_in
from fp8cfg.parallel.heartbeat import Heartbeat, join
from fp8cfg.parallel.mesh import group_axes, neighbors
from fp8cfg.schema.errors import RankStalled
from fp8cfg.schema.training import Strategy, Timeout

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

    def apply_timeout(self, phase: Phase, step: int) -> None:
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
