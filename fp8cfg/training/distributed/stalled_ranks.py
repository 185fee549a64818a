"""Stalled ranks: a time limit on collectives, over which the ranks that wait say who is missing, by its heartbeat, and where.

The first rank that has waited in vain takes others with it, for gloo closes its connections; what it finds holds for all. With
NCCL, whose collectives the host does not wait for, it is torch's own watchdog that ends the process at this limit; before, a thread
says which ranks are silent.
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

from fp8cfg.config.errors import RankStalled
from fp8cfg.config.training_nodes import Strategy, Timeout
from fp8cfg.parallel.mesh import group_axes, neighbours
from fp8cfg.training.distributed.blocked_call import doing, raised_in
from fp8cfg.training.distributed.heartbeat import Heartbeat, join

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
        asked, said = neighbours(self.strategy, self.beats.rank, self.beats.size), None
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
