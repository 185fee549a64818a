"""Data-parallel world under torchrun, or a single process: the same code, where a group of one sends nothing."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.nn  # its functions keep the group of their import, and so gloo's threads
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.parallel import stalled_ranks
from fp8cfg.parallel.mesh import SAME_LAYERS, SAME_PARAMETERS, forget_meshes, submesh
from fp8cfg.parallel.sharding import ranks
from fp8cfg.parallel.stalled_ranks import Phase, StallWatch, all_started, broken, first_line
from fp8cfg.schema.errors import ConfigError, RankLost
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.tables import size
from fp8cfg.schema.training import Timeout, Trainer

_NAME = "pt_gloo_runloop"
_LOOKS = 3
"""Looks in a row that find all threads asleep: one asleep for the lock alone would have had it in between."""


def wait_until_idle(patience: float = 10.0, every: float = 0.01) -> bool:
    """Wait, without Python's lock, until gloo's threads wait for work, at most `patience` seconds; whether they do. On Linux, whose
    /proc tells; elsewhere for a few times `every` seconds."""
    asleep, end = 0, time.monotonic() + patience
    while (threads := _states()) != [] and asleep < _LOOKS and time.monotonic() < end:
        asleep = asleep + 1 if threads is None or set(threads) == {"S"} else 0
        time.sleep(every)
    return threads == [] or asleep == _LOOKS


def _states() -> list[str] | None:
    """The state of each of gloo's threads, as in proc(5); None where the system does not tell."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    found = []
    for task in tasks.iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME:
                found.append(rest.split()[0])
    return found


Kind = Literal["gradients", "scales", "weights", "keys and values", "activations", "stage outputs"]


@dataclass
class Traffic:
    """Bytes that this rank has sent, and messages, since it was created or cleared.

    Each byte counts once for each rank that needs it, or for its way round a ring: 2 (N - 1) / N of the data of an all-reduce over
    N ranks, N - 1 times the data of an all-gather, and the data for other ranks of an all-to-all. A switch that adds or copies
    sends less.
    """

    bytes: dict[Kind, int] = field(default_factory=dict)
    messages: dict[Kind, int] = field(default_factory=dict)

    def add(self, kind: Kind, sent: int, messages: int = 1) -> None:
        """Add so many bytes of a kind, in so many messages."""
        self.bytes[kind] = self.bytes.get(kind, 0) + sent
        self.messages[kind] = self.messages.get(kind, 0) + messages

    def clear(self) -> None:
        """Start again from 0."""
        self.bytes.clear()
        self.messages.clear()

    def __str__(self) -> str:
        """As in `gradients 1.5 MiB in 2 messages, scales 128 B in 1 message`."""
        parts = []
        for kind, nbytes in self.bytes.items():
            messages = self.messages[kind]
            plural = "" if messages == 1 else "s"
            parts.append(f"{kind} {size(nbytes)} in {messages} message{plural}")
        return ", ".join(parts) or "nothing"


def on_ring(data: Tensor, ranks: int) -> int:
    """The bytes that one of `ranks` sends in an all-reduce of `data`."""
    return 2 * (ranks - 1) * data.nbytes // ranks


SENT = Traffic()
"""What this process has sent of gradients and weights."""


@dataclass(frozen=True)
class World:
    """The ranks of this run, or a group of them, and what this one has sent. Every method is called by all of them at the same
    points."""

    rank: int = 0
    size: int = 1
    traffic: Traffic = field(default_factory=lambda: SENT, compare=False)
    limits: StallWatch | None = field(default=None, compare=False, repr=False)
    group: dist.ProcessGroup | None = None  # None is all ranks of the run

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes."""
        return self.rank == 0

    def waits(self, phase: Phase, step: int = 0) -> None:
        """From here on a rank waits for others as long as trainer.timeout has it for this phase, where the run made its group."""
        if self.limits:
            self.limits.waits(phase, step)

    def sum(self, value: Tensor) -> Tensor:
        """The sum of a tensor over the ranks."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def largest(self, value: Tensor) -> Tensor:
        """The elementwise maximum over the ranks of numbers that are not negative, or -1, in the dtype of `value`; NaN where a rank
        has NaN: by the bits of float32, since a maximum of floats may leave NaN out, as gloo's does.
        """
        if self.size == 1:
            return value
        known = value.float().nan_to_num(
            math.nan, math.inf, -math.inf
        )  # a NaN without a sign: that of 0 / 0 has one on x86
        dist.all_reduce(known.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        return known.to(value.dtype)

    def gather(self, value: Tensor) -> list[Tensor]:
        """On the first rank the tensor of every rank, which all have one shape; nothing on the others."""
        if self.size == 1:
            return [value]
        found = [torch.empty_like(value) for _ in range(self.size)] if self.first else None
        dist.gather(value.contiguous(), found, group=self.group, group_dst=0)
        return found or []

    def text(self, value: str) -> str:
        """The text of the first rank, on every rank."""
        if self.size == 1:
            return value
        data = self._bytes(value)
        length = torch.tensor(data.numel(), dtype=torch.int64, device=self.device)
        dist.broadcast(length, group=self.group, group_src=0)
        sent = data if self.first else data.new_empty(int(length.item()))
        dist.broadcast(sent, group=self.group, group_src=0)
        return bytes(sent.tolist()).decode()

    def texts(self, value: str) -> list[str]:
        """The text of every rank, on every rank."""
        if self.size == 1:
            return [value]
        length = torch.tensor(len(value.encode()), dtype=torch.int64, device=self.device)
        lengths = [int(each) for each in self._every(length)]
        found = self._every(self._bytes(value, max(lengths)))
        return [
            row[:n].cpu().numpy().tobytes().decode() for row, n in zip(found, lengths, strict=True)
        ]

    @property
    def device(self) -> torch.device:
        """Where the tensors are that the ranks send."""
        return torch.device(
            "cuda" if self.size > 1 and dist.get_backend(self.group) == "nccl" else "cpu"
        )

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank."""
        if self.size == 1:
            return flag
        raised = torch.tensor(float(flag), dtype=torch.float32, device=self.device)
        dist.all_reduce(raised, dist.ReduceOp.MAX, group=self.group)
        return bool(raised.item())

    def _every(self, value: Tensor) -> list[Tensor]:
        found = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(found, value, group=self.group)
        return found

    def _bytes(self, value: str, least: int = 0) -> Tensor:
        """The text in at least so many bytes, never in none."""
        return torch.frombuffer(
            bytearray(value.encode().ljust(max(1, least))), dtype=torch.uint8
        ).to(self.device)


@contextmanager
def world(device: str, trainer: Trainer) -> Iterator[World]:
    """The world that torchrun's environment describes (RANK, WORLD_SIZE): gloo for cpu, nccl for cuda, with the limits of
    `trainer`. Raises RankLost where another rank has ended, and RankStalled where one did not come in time.
    """
    if ranks() == 1:
        try:
            yield World()
        finally:
            if dist.is_available() and dist.is_initialized():  # of one rank, which FSDP2 wants too
                _end_group()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _start_group("nccl" if device == "cuda" else "gloo", trainer.timeout)
    watch = StallWatch(trainer.timeout, trainer.strategy)
    try:
        yield replace(current(), limits=watch)
        watch.waits("start", watch.step)
        # A rank that leaves while another still sends to it aborts in gloo's threads (seen with torch 2.13).
        dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)
    except RuntimeError as e:
        if stalled := watch.diagnosis(e):
            raise stalled from e
        if lost := broken(e):
            raise RankLost(f"another rank has ended; it says why ({first_line(lost)})") from e
        raise
    finally:
        watch.close()
        _end_group()


def _end_group() -> None:
    forget_meshes()
    dist.destroy_process_group()
    wait_until_idle()


def _start_group(backend: str, timeout: Timeout) -> None:
    """The process group of torchrun's environment. Ranks that torchrun has started again find the addresses of those before them in
    its store (pytorch/pytorch#167288, in torch 2.11 to 2.13 at least), and so do those that start a group after another, to go on
    from an older checkpoint; all meet under names of their own. On several machines the count of restarts is not one for all: there
    torchrun needs TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if one_machine else "0"
    limit = timedelta(seconds=timeout.start)
    if not _MEETING:
        with all_started(timeout), _free_port():
            _MEETING.append(
                next(rendezvous("env://", timeout=limit))
            )  # one for all: a second may meet the end of the first
    meeting, rank, size = _MEETING[0]
    store = PrefixStore(f"restart {again}, group {next(_GROUPS)}", meeting)
    with all_started(timeout, partial(stalled_ranks.not_arrived, store, size)):
        stalled_ranks.arrive(store, rank)
        # With its device NCCL connects all ranks now, and splits their communicator for each axis.
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=limit, device_id=device
        )


@contextmanager
def _free_port() -> Iterator[None]:
    """Around the start of the store, which rank 0 has: raises ConfigError if its port is taken."""
    try:
        yield
    except dist.DistNetworkError as e:
        if "EADDRINUSE" not in str(e):
            raise
        raise ConfigError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: another program uses this port; set another"
            " one, or let torchrun --standalone choose it"
        ) from None


_MEETING: list[tuple[Any, int, int]] = []
"""The store in which the ranks meet, this rank and their number, once there was a group."""
_GROUPS = count(1)


def current() -> World:
    """The world of the process group that is initialised, or of this process alone. Raises ConfigError where torchrun has started
    several, which would each train the whole batch."""
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if ranks() > 1:
        raise ConfigError(
            f"WORLD_SIZE={ranks()}: torchrun started {ranks()} ranks, and there is no process"
            " group; call torch.distributed.init_process_group() before fp8cfg.build, or train"
            " with python -m fp8cfg"
        )
    return World()


def sharing(prepared: PreparedModel) -> World:
    """The ranks with the same parameters as this one, over which gradients are summed and state is sharded: all, or with tensor
    parallelism those with the same part of each matrix, with a pipeline those of the same stage."""
    if prepared.mesh is None:
        return current()
    return along(prepared.mesh, SAME_PARAMETERS)


def along(mesh: DeviceMesh, axes: Sequence[str]) -> World:
    """The ranks that differ from this one along `axes` of `mesh` only. All ranks call it at the same point."""
    ranks = submesh(mesh, axes)
    if ranks is None:
        return World()
    return World(ranks.get_local_rank(), ranks.size(), group=ranks.get_group())


def stages(prepared: PreparedModel) -> World:
    """The ranks that share the layers of one model replica with this one; this one alone where there is no pipeline."""
    here = prepared.pipeline
    return World() if here is None else World(here.rank, here.size, group=here.process_group)


def same_layers(prepared: PreparedModel) -> World:
    """The ranks with the same layers as this one: all, or those of its pipeline stage."""
    return current() if prepared.pipeline is None else along(prepared.mesh, SAME_LAYERS)


def amax_group(prepared: PreparedModel, fp8: FP8) -> dist.ProcessGroup | None:
    """The process group over whose ranks amaxes of delayed scaling are the largest: of those with the same layers all, or under
    fp8.tp_only_amax_red those with the same samples too; None where each rank is by itself."""
    if not (fp8.reduce_amax and dist.is_available() and dist.is_initialized()):
        return None
    if fp8.tp_only_amax_red:
        group: dist.ProcessGroup | None = prepared.same_samples
        return group
    return dist.group.WORLD if prepared.pipeline is None else same_layers(prepared).group
