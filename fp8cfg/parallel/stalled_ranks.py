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
from typing import Literal, TypeGuard

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8cfg.parallel.blocked_collective import describe_activity, find_collective
from fp8cfg.parallel.heartbeat import Heartbeat, join
from fp8cfg.parallel.mesh import group_axes, neighbors
from fp8cfg.schema.errors import RankStalled
from fp8cfg.schema.training import Strategy, Timeout

Phase = Literal["start", "step"]
# _set_pg_timeout is deprecated in torch 2.15.
_set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
ASYNC_SAVE_GROUP = "checkpoint"
"""Description of the process group of async saves. Phases don't change its timeout."""
_GLOO_TEXTS = ("gloo/transport/", "Application timeout caused pair closure")
"""Text in gloo's errors. They are plain RuntimeErrors (torch 2.13).

Most have the path of their source file. The second text is from one without a path.
"""
_TIMEOUT_TEXTS = ("imed out", "timeout")  # "Timed out" or "timed out"


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
        self.timeout = timeout
        self.strategy = strategy
        self.phase: Phase = "start"
        self.step = 0
        # At least 8 beats within each timeout.
        self.heartbeat = Heartbeat(min(5.0, timeout.start / 8, timeout.step / 8))
        # Start times of this step and the two before it. See `_warn`.
        self._start_times = deque([time.monotonic()], maxlen=3)
        self._warning = threading.Thread(
            target=self._warn, name="fp8cfg stall warning", daemon=True
        )
        # gloo raises an error at the timeout, for `diagnose`. NCCL's watchdog ends the
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
                if not isinstance(group, int) and group.group_desc != ASYNC_SAVE_GROUP:
                    _set_timeout(limit, group)
        self.phase = phase
        self._start_times.append(time.monotonic())

    def diagnose(self, error: RuntimeError) -> RankStalled | None:
        """Returns the error for a collective that timed out, on this rank or on another one.

        Args:
            error: The error of a step.

        Returns:
            An error with the collective, its axis and the state of the other ranks. None if no
            collective timed out.
        """
        cause = find_collective_error(error)
        if cause is None:
            return None
        limit = f"{self._limit:g} s (trainer.timeout.{self.phase})"
        if _is_timeout(cause):
            self.heartbeat.announce_timeout()
            outcome = f"timed out after {limit}"
        elif self.heartbeat.has_peer_timed_out():
            outcome = f"was aborted by a rank after {limit}"
        else:
            # The connection is closed, but no rank timed out: a rank has ended.
            return None
        collective = find_collective(cause)
        description = str(collective)
        if collective.group:
            ranks = dist.get_process_group_ranks(collective.group)
            description += f" over {group_axes(self.strategy, ranks, self.heartbeat.size)}"
        if not collective.name:
            description += f" ({first_line(cause)})"
        peers = self.heartbeat.describe_peers()
        return RankStalled(f"step {max(self.step, 1)}: {description} {outcome}: {peers}")

    def close(self) -> None:
        """Ends the heartbeat and the warnings."""
        self.heartbeat.close()
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
        heartbeat = self.heartbeat
        receivers = neighbors(self.strategy, heartbeat.rank, heartbeat.size)
        # The check takes at most this many seconds.
        check_time = heartbeat.interval + heartbeat.patience
        last_silent: str | None = None
        while not heartbeat.ended.wait(heartbeat.interval):
            # Steps are launched ahead of the GPU, so collectives of earlier steps may still run.
            # Measure from the oldest start.
            oldest_start, step_start = self._start_times[0], self._start_times[-1]
            if time.monotonic() - oldest_start < self._limit - check_time:
                continue
            silent = heartbeat.describe_silent(receivers)
            # If the next step has begun during the check, this one was not stalled.
            has_moved_on = self._start_times[-1] != step_start
            if has_moved_on or silent == last_silent or heartbeat.ended.is_set():
                continue
            last_silent = silent
            if silent:
                elapsed = time.monotonic() - oldest_start
                activity = describe_activity(heartbeat.main_frame())
                print(
                    f"rank {heartbeat.rank}: warning: step {max(self.step, 1)}: {activity}, after"
                    f" {elapsed:.0f} s of {self._limit:g} (trainer.timeout.{self.phase}): {silent}",
                    file=sys.stderr,
                    flush=True,
                )


def find_collective_error(error: BaseException) -> RuntimeError | None:
    """Returns the error of a collective after a timeout or a closed connection.

    Args:
        error: An error. torch's pipelining raises its own error from the one of the collective.

    Returns:
        The innermost such error in the chain of causes, or None.
    """
    innermost = None
    cause: BaseException | None = error
    while cause:
        if _is_collective_error(cause) and (_is_timeout(cause) or "onnection" in str(cause)):
            innermost = cause
        cause = cause.__cause__
    return innermost


def _is_collective_error(error: BaseException) -> TypeGuard[RuntimeError]:
    """Returns whether torch.distributed or gloo raised an error."""
    if isinstance(error, dist.DistError):
        return True
    # Match gloo's own text: errors of a data server or of CUDA mention timeouts and connections
    # too.
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _GLOO_TEXTS)


def _is_timeout(error: BaseException) -> bool:
    """Returns whether an error reports a timeout."""
    return any(text in str(error) for text in _TIMEOUT_TEXTS)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error, shortened to 160 characters."""
    return textwrap.shorten(str(error).partition("\n")[0], 160, placeholder=" ...")


@contextmanager
def report_missing_ranks(
    timeout: Timeout, describe_missing: Callable[[], str | None] = lambda: None
) -> Iterator[None]:
    """Context manager around the start of a process group.

    Args:
        timeout: The timeouts. The start has its own.
        describe_missing: Returns which ranks are missing, or None.

    Raises:
        RankStalled: Some ranks did not start in time.
    """
    try:
        yield
    except RuntimeError as error:  # DistStoreError, DistNetworkError
        if not _is_timeout(error):
            raise
        reason = describe_missing() or first_line(error)
        raise RankStalled(
            f"not all ranks started within {timeout.start:g} s (trainer.timeout.start): {reason}"
        ) from error
