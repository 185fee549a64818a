"""The saves of a run: when one is due, what is not saved, and what a failed one ends."""

from __future__ import annotations

import json
import shlex
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from fp8cfg.building.job import Job
from fp8cfg.checkpoint import job_state, job_tensors, manifest, save
from fp8cfg.checkpoint.save import CheckpointError, OldCheckpointStays, Share
from fp8cfg.checkpoint.tensor_layout import Groups, TensorBox
from fp8cfg.data import Batches
from fp8cfg.parallel.process_group import World
from fp8cfg.parallel.stalled_ranks import APART
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.run_folder import (
    CHECKPOINTS,
    FP8_STATS,
    METRICS,
    RunFolder,
    RunFolderNotWritable,
)
from fp8cfg.schema.errors import Fp8cfgError


@dataclass(frozen=True)
class Written:
    """How a save of step `done`, after so many optimizer `steps`, ended: on the first rank its folder, or why there is none;
    `remark` is what did not go as planned and does not matter to the run."""

    done: int
    steps: int
    folder: Path | None = None
    problem: CheckpointError | None = None
    remark: str = ""


class BackgroundWrite:
    """Runs `write` in a thread, which does not keep the process from ending."""

    def __init__(self, write: Callable[[], Written]) -> None:
        self._write, self._written, self._error = write, list[Written](), list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="fp8cfg checkpoint", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> Written:
        """What `write` returned, once it has; what it raised is raised here."""
        self._thread.join()
        if self._error:
            raise self._error[0]
        return self._written[0]

    def _run(self) -> None:
        try:
            self._written.append(self._write())
        except BaseException as e:
            self._error.append(e)


ALIGNMENT = 64
"""Bytes; of which copies begin at multiples."""


class HostCopies:
    """Memory for copies of the tensors of one save at a time. `say` is told where it cannot be pinned."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: torch.cuda.Event | None = None

    def of(self, groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
        """The same boxes with copies of their tensors, which later steps do not change, over those of the call before. They are
        there after `wait`."""
        tensors = {
            id(box.tensor): box.tensor.detach() for boxes in groups.values() for box in boxes
        }
        begin, total = dict[int, int](), 0
        for key, t in tensors.items():
            begin[key], total = total, total + -(-t.nbytes // ALIGNMENT) * ALIGNMENT
        on_gpu = any(t.is_cuda for t in tensors.values())
        if len(self._memory) < total:
            self._memory = torch.empty(
                0, dtype=torch.uint8, device="cpu"
            )  # first, or both were there
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu")
            if on_gpu:
                self._pin()
        copies = {
            key: (
                self._memory[begin[key] : begin[key] + t.nbytes]
                .view(t.dtype)
                .view(t.shape)
                .copy_(t, non_blocking=True)
            )
            for key, t in tensors.items()
        }
        if on_gpu:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return {
            group: [replace(box, tensor=copies[id(box.tensor)]) for box in boxes]
            for group, boxes in groups.items()
        }

    def wait(self) -> None:
        """Until the copies are made."""
        if self._copied is not None:
            self._copied.synchronize()

    def _pin(self) -> None:
        """Pin the memory, as DCP's stager does: torch's own allocator of pinned memory would take the next power of two."""
        start = self._memory.data_ptr()
        try:
            pin_memory(start, len(self._memory))
        except RuntimeError as error:
            self._say(
                "the memory that saves are copied to is not pinned, and copies take longer:"
                f" {error}"
            )
        else:
            weakref.finalize(
                self._memory, unpin_memory, start
            ).atexit = False  # CUDA may be gone by then


class Diverged(Fp8cfgError):
    """Gradients, weights, a loss or logits are not finite. Checkpoints are intact. Exit code 7."""

    exit_code = 7


class Saver:
    """Writes the checkpoints of `job` to `run`, which the first rank alone has; all ranks make the same calls. `say` gets what did
    not go as planned, `saved` there the step and the folder of each that is whole. As a context manager it waits for the last.
    """

    def __init__(
        self,
        job: Job,
        run: RunFolder | None,
        world: World,
        batches: Batches,
        say: Callable[[str], None],
        saved: Callable[[int, Path], None],
    ) -> None:
        self.job, self.run, self.world, self.batches, self.say, self.saved = (
            job,
            run,
            world,
            batches,
            say,
            saved,
        )
        self._saves = world.any(run is not None)
        self._saved_at = self._steps_saved = -1
        self._saved_when = time.monotonic()
        self._root: RunFiles | None = None
        self._running: BackgroundWrite | None = None
        self._copies = HostCopies(say)
        # The thread that writes beside steps has a group of its own, on the CPU: collectives of one group have one order.
        self._apart = job.recipe.checkpoint.async_save and self._saves
        self._writers = (
            replace(world, limits=None, group=_group(job))
            if self._apart and world.size > 1
            else world
        )

    def check_room(self) -> None:
        """Raise RunFolderNotWritable where the disk has no space for one checkpoint: better before the first step than after."""
        need, problem = job_tensors.checkpoint_bytes(self.job, self.world) + save.RESERVE, ""
        if self.run and (free := self.run.files.free()) < need:
            problem = (
                f"{self.run.path}: not enough space for one checkpoint: needs {need} bytes, {free}"
                " are free"
            )
        if self.world.any(bool(problem)):
            raise RunFolderNotWritable(problem or "the first rank has no space for one checkpoint")

    def is_due(self) -> bool:
        """Whether checkpoint.every_minutes asks for a save now. The clock of the first rank decides."""
        minutes = self.job.recipe.checkpoint.every_minutes
        if not minutes or self.run is None:
            return False
        return time.monotonic() - self._saved_when >= 60 * minutes

    def save(
        self,
        done: int,
        skipping: bool = False,
        last: bool = False,
        rng: job_state.RandomState | None = None,
    ) -> bool:
        """Save step `done`, and return whether there was anything to save. Where that fails the older checkpoints stay and the next call tries again; CheckpointError where this
        is the `last`. Raises Diverged for weights that are not finite, and RunFolderDeleted.

        While steps are `skipping` no older checkpoint is removed, since it may be the one to go back to; and none is written
        where nothing has changed since the one before, but the last. Under checkpoint.async_save a thread writes, from copies in
        the host's memory, all but the last; a save waits for the one before, and `settle` says how it ended. `rng` is the random
        state to save, where it is not the current one.
        """
        self.settle(wait=True)
        self._saved_when = time.monotonic()
        if not self._saves or done == self._saved_at:
            return False
        steps = self.job.optimizer.steps
        if skipping and steps == self._steps_saved and not last:
            return False
        share = job_state.share(self.job, self.batches, done, self.world, rng)
        keep = None if skipping else self.job.recipe.checkpoint.keep
        if problem := self._ready(share, done):
            self._settled(Written(done, steps, problem=problem), last)
        elif self._apart and not last:
            share = replace(share, boxes=self._copies.of(share.boxes))
            self._running = BackgroundWrite(
                partial(self._write, Written(done, steps), share, keep, self._writers)
            )
        else:
            self._settled(self._write(Written(done, steps), share, keep, self.world), last)
        return True

    def settle(self, wait: bool = False) -> None:
        """Say how the save that a thread was writing ended, if it has, or once it has. What is not a CheckpointError is raised."""
        if self._running and (wait or self._running.over):
            running, self._running = self._running, None
            self._settled(running.result(), last=False)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the save under way; not where this rank or another is lost, which would then not end."""
        if error is None or isinstance(error, Fp8cfgError):
            self.settle(wait=True)
            if self._writers is not self.world:
                dist.destroy_process_group(self._writers.group)

    def _settled(self, written: Written, last: bool) -> None:
        if written.remark:
            self.say(written.remark)
        if written.problem:
            if last:
                raise written.problem
            self.say(f"{written.problem}; older checkpoints stay, and the next save tries again")
            return
        self._saved_at, self._steps_saved = written.done, written.steps
        if written.folder:
            self.saved(written.done, written.folder)

    def _ready(self, share: Share, done: int) -> CheckpointError | None:
        """Why there is nowhere to write, on every rank, or None. Raises Diverged for weights that are not finite, and
        RunFolderDeleted, on the first rank, and CheckpointError on the others."""
        problem: Fp8cfgError | None = _not_finite(share, done, self.world, self.run)
        try:
            if self.run and not problem:
                self.run.check_there()
                self._root = self.run.files.folder(CHECKPOINTS, make=True)
                # A power cut must not leave a checkpoint whose steps the metrics do not have.
                for name in (METRICS, FP8_STATS):
                    self.run.files.sync_file(name)
                self.run.files.sync()
        except OSError as e:
            problem = CheckpointError(
                f"cannot save step {done} in {self.run.checkpoints if self.run else ''}: {e}"
            )
        except Fp8cfgError as e:
            problem = e
        if not self.world.any(problem is not None):
            return None
        ends = self.world.any(problem is not None and not isinstance(problem, CheckpointError))
        there = problem or CheckpointError(f"the first rank could not save step {done}")
        if ends or not isinstance(there, CheckpointError):
            raise there
        return there

    def _write(self, of: Written, share: Share, keep: int | None, world: World) -> Written:
        """`of`, with how its save ended."""
        self._copies.wait()
        try:
            folder = save.write_checkpoint(self._root, of.done, share, keep, world)
        except OldCheckpointStays as e:
            return replace(of, remark=str(e))
        except CheckpointError as e:
            return replace(of, problem=e)
        return replace(of, folder=folder)


def _group(job: Job) -> dist.ProcessGroup | None:
    """A process group of all ranks on the CPU, whose limit is that of saves; all of them call it."""
    limit = timedelta(seconds=job.recipe.trainer.timeout.start)
    group: dist.ProcessGroup | None = dist.new_group(
        backend="gloo", timeout=limit, group_desc=APART
    )
    return group


def _not_finite(share: Share, done: int, world: World, run: RunFolder | None) -> Diverged | None:
    """Why `share` and those of the others are not to be saved: a checkpoint of weights that are not finite, or
    whose masters are not, would take the place of a good one."""
    weights = share.boxes["model"] + [
        box for box in share.boxes["optimizer"] if ".master" in box.name
    ]
    bad = [
        box.name for box in weights if box.tensor.is_floating_point() and not _finite(box.tensor)
    ]
    found = [
        json.loads(text)
        for text in world.texts(json.dumps([sum(not any(box.offsets) for box in weights), bad]))
    ]
    names = dict.fromkeys(name for _, bad in found for name in bad)
    if not names:
        return None
    return Diverged(
        f"step {done}: {len(names)} of {sum(count for count, _ in found)} weights are not finite,"
        f" the first is {next(iter(names))}; they are not saved; {after_divergence(run)}"
    )


def after_divergence(run: RunFolder | None) -> str:
    """What to do after a run diverged: how to resume from a step before, if one was saved."""
    saved = manifest.steps(run.files.folder(CHECKPOINTS)) if run else []
    if run is None or not saved:
        return "lower optim.lr and start again"
    steps = sorted({step for step, _ in saved})
    folder = shlex.quote(str(run.path))
    return (
        f"lower optim.lr and resume from an earlier step ({', '.join(map(str, steps))}), as in:"
        f" fp8cfg resume {folder} --step {steps[0]} optim.lr=LR"
    )


def _finite(t: Tensor) -> bool:
    narrow = t.itemsize == 1  # torch.isfinite takes no float8
    return bool(torch.isfinite(t.float() if narrow else t).all())
