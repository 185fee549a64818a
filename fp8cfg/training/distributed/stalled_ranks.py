"""Stalled ranks: a time limit on collectives, and a heartbeat by which the ranks that wait say who is missing, and where.

Each rank writes a count, and what its main thread does, to the store of the process group. Where a collective is over its limit,
those whose count stands are stopped or gone with their machine, and the others say where they are. With NCCL, whose collectives the
host does not wait for, it is torch's own watchdog that ends the process at this limit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fp8cfg.config.errors import RankStalled
from fp8cfg.config.training_nodes import Timeout

Phase = Literal["start", "step"]
APART = "checkpoint"
"""The group of what runs beside steps, whose limit stays."""
PACKAGE = Path(__file__).parents[2]
_TORCH = f"{Path(dist.__file__).parent}/"
_WRAPPERS = ("wrapper", "wait", "_wait")


class StallWatch:
    """The limits of this rank's collectives, and its heartbeat, from the process group's start to `close`."""

    def __init__(self, timeout: Timeout) -> None:
        self.timeout, self.phase, self.step = timeout, "start", 0
        self.every = min(5.0, timeout.start / 8, timeout.step / 8)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._beats, self._reads = _connection(), _connection()  # a call may block
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fp8cfg heartbeat", daemon=True)
        self._thread.start()

    def waits(self, phase: Phase, step: int) -> None:
        """Set the limit of all groups to that of `phase`; `step`, counted from 1, is what a diagnosis names."""
        self.step = step
        if phase != self.phase or phase == "start":  # groups are made at the start
            limit = timedelta(seconds=getattr(self.timeout, phase))
            for group in list(distributed_c10d._world.pg_map):
                if not isinstance(group, int) and group.group_desc != APART:
                    distributed_c10d._set_pg_timeout(limit, group)
        self.phase = phase

    def stalled(self, error: RuntimeError) -> bool:
        """Whether it is a collective's that was over its limit, here or on a rank that has left for that."""
        return "imed out" in str(error) or ("onnection" in str(error) and self._said())

    def diagnosis(self, error: RuntimeError) -> RankStalled:
        """Which collective of which axis was over its limit, and what the other ranks do."""
        with suppress(RuntimeError):
            self._beats.set("stalled", str(self.rank))
        limit = getattr(self.timeout, self.phase)
        late = f"{_collective(error.__traceback__)} was not done in {limit:g} s (trainer.timeout.{self.phase})"
        return RankStalled(f"step {max(self.step, 1)}: {late}: {self._others()}")

    def close(self) -> None:
        """End the heartbeat."""
        self._ended.set()

    def _said(self) -> bool:
        found = False
        with suppress(RuntimeError):
            found = self._reads.check(["stalled"])
        return found

    def _beat(self) -> None:
        count = 0
        with suppress(RuntimeError):  # the store ends before this rank
            while not self._ended.wait(self.every if count else 0):
                count += 1
                self._beats.set(_key(self.rank), f"{count} {_where(sys._current_frames().get(self._main))}")

    def _others(self) -> str:
        """What the other ranks do, those first that did not come. Within some seconds, whatever the store does."""
        found: list[str] = []
        reading = threading.Thread(target=lambda: found.append(self._told()), daemon=True)
        reading.start()
        reading.join(4 * self.every + 5)
        return found[0] if found else "the store of the group does not answer; the rank, or the launcher, that holds it is silent"

    def _told(self) -> str:
        keys = [_key(rank) for rank in range(self.size)]
        absent = [rank for rank, key in enumerate(keys) if not self._reads.check([key])]
        there = [rank for rank in range(self.size) if rank not in absent and rank != self.rank]
        before = self._read(there)
        self._ended.wait(2.5 * self.every)
        after = self._read(there)
        silent = absent + [rank for rank in there if before[rank] == after[rank]]
        if silent:
            return f"{_ranks(silent)} {'is' if len(silent) == 1 else 'are'} silent: stopped, or gone with the machine"
        doing = {rank: after[rank].partition(" ")[2] for rank in there}
        elsewhere = {rank: what for rank, what in doing.items() if not what.startswith("the collective")}
        return "; ".join(f"rank {rank} is in {what}" for rank, what in list((elsewhere or doing).items())[:8])

    def _read(self, ranks: list[int]) -> dict[int, str]:
        values = self._reads.multi_get([_key(rank) for rank in ranks]) if ranks else []
        return {rank: bytes(value).decode() for rank, value in zip(ranks, values, strict=True)}


@contextmanager
def all_started(timeout: Timeout) -> Iterator[None]:
    """Around the start of a process group: raises RankStalled where not all ranks came."""
    try:
        yield
    except RuntimeError as e:  # DistStoreError, DistNetworkError
        if "imed out" not in str(e):
            raise
        why = str(e).splitlines()[0]
        raise RankStalled(f"not all ranks came within {timeout.start:g} s (trainer.timeout.start): {why:.200}") from None


def _connection() -> Any:
    """The store of the process group, by a connection of its own."""
    store: Any = distributed_c10d._get_default_store()  # clone() stands in no stub of torch 2.13
    return store.clone()


def _key(rank: int) -> str:
    return f"fp8cfg/beat/{rank}"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _collective(at: TracebackType | None) -> str:
    """The collective that a traceback ends in, with the axis of its group: `all_reduce over dp_shard`."""
    frames = list[FrameType]()
    while at:
        frames.append(at.tb_frame)
        at = at.tb_next
    ours = [f for f in frames if f.f_code.co_filename.startswith(_TORCH) and f.f_code.co_name not in _WRAPPERS]
    if not ours:
        return "a collective"
    group = next((g for f in ours if (g := f.f_locals.get("group")) is not None), None)
    axis = str(getattr(group, "group_desc", "")).removeprefix("mesh_")  # as init_device_mesh has it
    return f"{ours[-1].f_code.co_name} over {'all ranks' if axis in ('', 'undefined', 'default_pg') else axis}"


def _where(frame: FrameType | None) -> str:
    """What a thread does: the collective that it is in, or its line of this package, or of the program around it."""
    first = frame
    while frame:
        name = frame.f_code.co_filename
        if name.startswith(_TORCH) and frame.f_code.co_name not in _WRAPPERS:
            return f"the collective {frame.f_code.co_name}"
        if name.startswith(f"{PACKAGE}/"):
            return f"fp8cfg/{Path(name).relative_to(PACKAGE)}:{frame.f_lineno}, {frame.f_code.co_name}"
        frame = frame.f_back
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}" if first else "no Python"
