"""Process group of a run: `World`, its start and end under torchrun, and the ranks of each axis.

A single process runs the same code: in a world of one rank collectives send nothing.
"""

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
from fp8cfg.parallel import heartbeat
from fp8cfg.parallel.mesh import SAME_LAYERS, SAME_PARAMETERS, forget_meshes, submesh
from fp8cfg.parallel.sharding import ranks
from fp8cfg.parallel.stalled_ranks import (
    Phase,
    StallWatch,
    find_collective_error,
    first_line,
    report_missing_ranks,
)
from fp8cfg.schema.errors import ConfigError, RankLost
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.tables import size
from fp8cfg.schema.training import Timeout, Trainer

Kind = Literal["gradients", "scales", "weights", "keys and values", "activations", "stage outputs"]


@dataclass
class Traffic:
    """Bytes and messages that this rank has sent since it was created or cleared.

    Counts bytes as on a ring of N ranks: 2 (N - 1) / N of the data of an all-reduce, N - 1 times
    the data of an all-gather, and the data for other ranks of an all-to-all. With in-network
    reduction (NVLink SHARP) a rank sends less.
    """

    bytes: dict[Kind, int] = field(default_factory=dict)
    messages: dict[Kind, int] = field(default_factory=dict)

    def add(self, kind: Kind, sent: int, messages: int = 1) -> None:
        """Adds `sent` bytes of a kind, in `messages` messages."""
        self.bytes[kind] = self.bytes.get(kind, 0) + sent
        self.messages[kind] = self.messages.get(kind, 0) + messages

    def clear(self) -> None:
        """Resets all counts to 0."""
        self.bytes.clear()
        self.messages.clear()

    def __str__(self) -> str:
        """Returns text such as `gradients 1.5 MiB in 2 messages, scales 128 B in 1 message`."""
        parts = []
        for kind, nbytes in self.bytes.items():
            messages = self.messages[kind]
            plural = "" if messages == 1 else "s"
            parts.append(f"{kind} {size(nbytes)} in {messages} message{plural}")
        return ", ".join(parts) or "nothing"


def ring_bytes(data: Tensor, ranks: int) -> int:
    """Returns the bytes that each of `ranks` sends in an all-reduce of `data`."""
    return 2 * (ranks - 1) * data.nbytes // ranks


SENT = Traffic()
"""What this process has sent."""


@dataclass(frozen=True)
class World:
    """The ranks of a run, or a group of them. All of them call each method at the same point.

    Attributes:
        rank: The number of this rank.
        size: The number of ranks.
        traffic: What this rank has sent.
        stall_watch: Timeouts of the collectives, if `world` has started the process group.
        group: The process group, None for all ranks of the run.
    """

    rank: int = 0
    size: int = 1
    traffic: Traffic = field(default_factory=lambda: SENT, compare=False)
    stall_watch: StallWatch | None = field(default=None, compare=False, repr=False)
    group: dist.ProcessGroup | None = None

    @property
    def first(self) -> bool:
        """Whether this rank prints and writes files."""
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        """Device of the tensors in collectives: NCCL takes no CPU tensors."""
        if self.size > 1 and dist.get_backend(self.group) == "nccl":
            return torch.device("cuda")
        return torch.device("cpu")

    def apply_timeout(self, phase: Phase, step: int = 0) -> None:
        """Applies the timeout of `phase` (trainer.timeout) to collectives from here on."""
        if self.stall_watch:
            self.stall_watch.apply_timeout(phase, step)

    def sum(self, value: Tensor) -> Tensor:
        """Sums a tensor over the ranks, in place, and returns it."""
        if self.size > 1:
            dist.all_reduce(value, group=self.group)
        return value

    def largest(self, value: Tensor) -> Tensor:
        """Returns the elementwise maximum over the ranks, NaN if a rank has NaN.

        Args:
            value: Numbers of any float dtype that are not negative, or -1.
        """
        if self.size == 1:
            return value
        # MAX of floats may drop a NaN, as gloo's does. So take the maximum of the bits as integers:
        # they are ordered as positive floats are, with NaN above infinity. That needs a NaN without
        # a sign, and 0 / 0 has one on x86.
        bits = value.float().nan_to_num(math.nan, math.inf, -math.inf)
        dist.all_reduce(bits.view(torch.int32), dist.ReduceOp.MAX, group=self.group)
        return bits.to(value.dtype)

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank."""
        if self.size == 1:
            return flag
        value = torch.tensor(float(flag), dtype=torch.float32, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return bool(value.item())

    def gather(self, value: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks on the first rank, and an empty list on the others.

        Args:
            value: The shape is the same on all ranks.
        """
        if self.size == 1:
            return [value]
        tensors = None
        # Only the destination passes a list.
        if self.first:
            tensors = [torch.empty_like(value) for _ in range(self.size)]
        dist.gather(value.contiguous(), tensors, group=self.group, group_dst=0)
        return tensors or []

    def text(self, value: str) -> str:
        """Returns the first rank's text on every rank."""
        if self.size == 1:
            return value
        length = torch.tensor(len(value.encode()), dtype=torch.int64, device=self.device)
        # The other ranks need the length for the buffer of the second broadcast.
        dist.broadcast(length, group=self.group, group_src=0)
        byte_count = int(length.item())
        data = self._encode_text(value)
        if not self.first:
            data = data.new_empty(max(1, byte_count))
        dist.broadcast(data, group=self.group, group_src=0)
        return bytes(data[:byte_count].tolist()).decode()

    def texts(self, value: str) -> list[str]:
        """Returns the texts of all ranks on every rank."""
        if self.size == 1:
            return [value]
        length = torch.tensor(len(value.encode()), dtype=torch.int64, device=self.device)
        lengths = [int(length) for length in self._all_gather(length)]
        # An all-gather needs equal sizes.
        rows = self._all_gather(self._encode_text(value, max(lengths)))
        texts = []
        for row, byte_count in zip(rows, lengths, strict=True):
            texts.append(row[:byte_count].cpu().numpy().tobytes().decode())
        return texts

    def _all_gather(self, value: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks. Their shapes must be equal."""
        tensors = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(tensors, value, group=self.group)
        return tensors

    def _encode_text(self, value: str, min_size: int = 0) -> Tensor:
        """Returns UTF-8 bytes with spaces up to `min_size`, at least one: frombuffer needs one."""
        padded = value.encode().ljust(max(1, min_size))
        return torch.frombuffer(bytearray(padded), dtype=torch.uint8).to(self.device)


@contextmanager
def world(device: str, trainer: Trainer) -> Iterator[World]:
    """Starts and ends the process group that torchrun's environment describes (RANK, WORLD_SIZE).

    Args:
        device: "cpu" takes gloo, "cuda" takes NCCL.
        trainer: Has the timeouts.

    Yields:
        All ranks of the run, one rank without torchrun.

    Raises:
        RankLost: Another rank ended.
        RankStalled: A rank did not come within the timeout.
    """
    if ranks() == 1:
        try:
            yield World()
        finally:
            if dist.is_available() and dist.is_initialized():  # FSDP2 has started one
                _end_group()
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _start_group("nccl" if device == "cuda" else "gloo", trainer.timeout)
    watch = StallWatch(trainer.timeout, trainer.strategy)
    try:
        yield replace(current(), stall_watch=watch)
        watch.apply_timeout("start", watch.step)
        # If a rank leaves while another still sends to it, gloo's threads abort (torch 2.13).
        device_ids = [torch.cuda.current_device()] if device == "cuda" else None
        dist.barrier(device_ids=device_ids)
    except RuntimeError as error:
        stalled = watch.diagnose(error)
        if stalled:
            raise stalled from error
        lost = find_collective_error(error)
        if lost:
            message = f"another rank has ended; its log has the reason ({first_line(lost)})"
            raise RankLost(message) from error
        raise
    finally:
        watch.close()
        _end_group()


_MEETING: list[tuple[Any, int, int]] = []
"""The store in which the ranks meet, this rank and the number of ranks. Empty before the start."""
_GROUPS = count(1)
"""Numbers of the process groups that this process has started."""


def _start_group(backend: str, timeout: Timeout) -> None:
    """Starts the process group of torchrun's environment.

    Each group uses another prefix in the store. Otherwise ranks that torchrun restarts would find
    the addresses of their predecessors in its store (pytorch/pytorch#167288, torch 2.11 to 2.13 at
    least). So would a second group in one process, after a resume from an older checkpoint.
    """
    # The count of restarts differs between machines. There torchrun needs
    # TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    restarts = "0"
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    limit = timedelta(seconds=timeout.start)
    if not _MEETING:
        # One store for all groups: a second store may meet the end of the first.
        with report_missing_ranks(timeout), _free_port():
            _MEETING.append(next(rendezvous("env://", timeout=limit)))
    store, rank, world_size = _MEETING[0]
    store = PrefixStore(f"restart {restarts}, group {next(_GROUPS)}", store)
    with report_missing_ranks(timeout, partial(heartbeat.describe_missing, store, world_size)):
        heartbeat.arrive(store, rank)
        device = None
        if backend == "nccl":
            # With a device NCCL connects all ranks now, and splits the communicator for each axis.
            device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=limit,
            device_id=device,
        )


@contextmanager
def _free_port() -> Iterator[None]:
    """Raises ConfigError if the port of the store, which rank 0 has, is taken."""
    try:
        yield
    except dist.DistNetworkError as error:
        # torch raises one class for all network errors, without a code.
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"MASTER_PORT={os.environ['MASTER_PORT']}: another program uses this port; set another"
            " one, or let torchrun --standalone choose it"
        ) from None


def _end_group() -> None:
    """Ends the process group of this process."""
    forget_meshes()
    dist.destroy_process_group()
    wait_until_idle()


_GLOO_THREAD = "pt_gloo_runloop"
_IDLE_LOOKS = 3
"""How often in a row all threads must sleep. A thread that waits for Python's lock sleeps once."""


def wait_until_idle(patience: float = 10.0, interval: float = 0.01) -> bool:
    """Waits until gloo's threads are idle and have released their tensors.

    Sleeps, because the threads may need Python's lock. Linux shows their state in /proc. On other
    systems it waits for a few times `interval`.

    Args:
        patience: Seconds to wait at most.
        interval: Seconds between two looks.

    Returns:
        Whether they are idle.
    """
    num_idle = 0
    end = time.monotonic() + patience
    while num_idle < _IDLE_LOOKS and time.monotonic() < end:
        states = _gloo_thread_states()
        if states == []:
            return True
        is_idle = states is None or set(states) == {"S"}
        num_idle = num_idle + 1 if is_idle else 0
        time.sleep(interval)
    return num_idle == _IDLE_LOOKS


def _gloo_thread_states() -> list[str] | None:
    """Returns the state of each of gloo's threads as in proc(5), None without /proc."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    states = []
    for task in tasks.iterdir():
        with suppress(OSError):  # the thread has ended
            # A line of `stat` is `pid (name) state ...`, and the name may have parentheses.
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _GLOO_THREAD:
                states.append(fields.split()[0])
    return states


def current() -> World:
    """Returns the world of the current process group, or a single rank without one.

    Raises:
        ConfigError: torchrun started several ranks, but there is no process group. Each rank would
            train the full batch.
    """
    if dist.is_available() and dist.is_initialized():
        return World(dist.get_rank(), dist.get_world_size())
    if ranks() > 1:
        raise ConfigError(
            f"WORLD_SIZE={ranks()}: torchrun started {ranks()} ranks, but there is no process"
            " group; call torch.distributed.init_process_group() before fp8cfg.build, or train"
            " with python -m fp8cfg"
        )
    return World()


def data_parallel_world(prepared: PreparedModel) -> World:
    """Returns the ranks with the same parameters as this one: data-parallel and context ranks.

    They sum gradients and shard state. With tensor parallelism they have the same part of each
    matrix, with a pipeline the same stage.
    """
    if prepared.mesh is None:
        return current()
    return world_along(prepared.mesh, SAME_PARAMETERS)


def pipeline_world(prepared: PreparedModel) -> World:
    """Returns the ranks with the other layers of this model replica. Without a pipeline, itself."""
    place = prepared.pipeline
    if place is None:
        return World()
    return World(place.rank, place.size, group=place.process_group)


def stage_world(prepared: PreparedModel) -> World:
    """Returns the ranks with the same layers as this one: all ranks without a pipeline."""
    if prepared.pipeline is None:
        return current()
    return world_along(prepared.mesh, SAME_LAYERS)


def world_along(mesh: DeviceMesh, axes: Sequence[str]) -> World:
    """Returns the ranks that differ from this one only along `axes` of `mesh`.

    All ranks call it.
    """
    group_mesh = submesh(mesh, axes)
    if group_mesh is None:
        return World()
    return World(group_mesh.get_local_rank(), group_mesh.size(), group=group_mesh.get_group())


def amax_process_group(prepared: PreparedModel, fp8: FP8) -> dist.ProcessGroup | None:
    """Returns the ranks over which delayed scaling takes the maximum of amaxes.

    Returns the ranks with the same layers, under fp8.tp_only_amax_red only those with the same
    samples too. None if each rank keeps its own amaxes.
    """
    if not (fp8.reduce_amax and dist.is_available() and dist.is_initialized()):
        return None
    if fp8.tp_only_amax_red:
        group: dist.ProcessGroup | None = prepared.same_samples
        return group
    # Stages have different layers, so a maximum over all ranks would mix them.
    if prepared.pipeline is None:
        return dist.group.WORLD
    return stage_world(prepared).group
