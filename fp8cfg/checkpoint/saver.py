"""Saves of a run: when one is due, checks before it, and errors after it.

`Saver.save` collects this rank's share (job_state.py) and checks it. Then all ranks write it
(save.py), at once or in a thread (checkpoint.async_save).
"""

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
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory

from fp8cfg.checkpoint import job_state, job_tensors, manifest, save
from fp8cfg.checkpoint.save import CheckpointError, OldCheckpointStays, Share
from fp8cfg.checkpoint.tensor_layout import Groups, TensorBox
from fp8cfg.data import Batches
from fp8cfg.parallel.process_group import World
from fp8cfg.parallel.stalled_ranks import ASYNC_SAVE_GROUP
from fp8cfg.run_folder.file_names import CHECKPOINTS, FP8_STATS, METRICS
from fp8cfg.run_folder.files import RunFiles, RunFolderNotWritable
from fp8cfg.schema.errors import Fp8cfgError
from fp8cfg.schema.tables import size

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder


class Diverged(Fp8cfgError):
    """Gradients, weights, a loss or logits are not finite. Checkpoints are intact. Exit code 7."""

    exit_code = 7


@dataclass(frozen=True)
class SaveResult:
    """The result of a save.

    Attributes:
        step: The step in the name of the checkpoint.
        optimizer_steps: Steps of the optimizer, without skipped steps.
        folder: The checkpoint. Only the first rank has it.
        problem: The error, if there is no checkpoint.
        remark: A message about a harmless problem.
    """

    step: int
    optimizer_steps: int
    folder: Path | None = None
    problem: CheckpointError | None = None
    remark: str = ""


class Saver:
    """Writes the checkpoints of a job. All ranks make the same calls.

    As a context manager it waits for the last save.

    Args:
        job: The job.
        run: The run folder. Only the first rank has it.
        world: All ranks.
        batches: The data of the job.
        say: Prints a message.
        saved: Called on the first rank with the step and the folder of each checkpoint.
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
        self.job = job
        self.run = run
        self.world = world
        self.batches = batches
        self.say = say
        self.saved = saved
        self._has_folder = world.any(run is not None)
        self._saved_step = -1
        self._saved_optimizer_steps = -1
        self._saved_when = time.monotonic()
        self._root: RunFiles | None = None
        self._running: BackgroundWrite | None = None
        self._copies = HostCopies(say)
        self._is_async = job.recipe.checkpoint.async_save and self._has_folder
        self._async_world = world
        if self._is_async and world.size > 1:
            # The thread needs a separate group. Ranks must start the collectives of a group in the
            # same order, and the train step would come in between. gloo keeps the thread off the
            # GPU.
            self._async_world = replace(world, stall_watch=None, group=_create_async_group(job))

    def check_room(self) -> None:
        """Checks before the first step that the disk has space for one checkpoint.

        Raises:
            RunFolderNotWritable: There is not enough space. All ranks raise it.
        """
        needed = job_tensors.checkpoint_bytes(self.job, self.world) + save.RESERVE
        problem = ""
        if self.run:
            free = self.run.files.free_bytes()
            if free < needed:
                problem = (
                    f"{self.run.path}: no room for a checkpoint: needs {size(needed)}, {size(free)} free;"
                    " free some space or set log.dir to another disk"
                )
        if self.world.any(bool(problem)):
            raise RunFolderNotWritable(problem or "the first rank has no room for a checkpoint")

    def is_due(self) -> bool:
        """Returns whether checkpoint.every_minutes asks for a save now.

        False on all ranks except the first, which decides for all.
        """
        minutes = self.job.recipe.checkpoint.every_minutes
        if not minutes or self.run is None:
            return False
        # Clocks differ between ranks, so each rank must not decide for itself.
        return time.monotonic() - self._saved_when >= 60 * minutes

    def save(
        self,
        done: int,
        skipping: bool = False,
        last: bool = False,
        rng: job_state.RandomState | None = None,
    ) -> bool:
        """Saves a checkpoint. Waits for the previous save first.

        If a save fails, older checkpoints stay and the next call tries again. With
        checkpoint.async_save the job continues while a thread writes copies in host memory, and
        `settle` reports the result. The last save never uses the thread.

        Args:
            done: Steps done.
            skipping: Whether steps are being skipped. Older checkpoints then stay, because the run
                may have to go back to one. Nothing is written if the weights are unchanged since
                the previous save.
            last: Whether it is the last save of the run.
            rng: The random state to save. None takes the current one.

        Returns:
            Whether there was anything to save.

        Raises:
            CheckpointError: The last save failed.
            Diverged: Weights are not finite.
            RunFolderDeleted: The run folder is gone.
        """
        self.settle(wait=True)
        self._saved_when = time.monotonic()
        if not self._has_folder or done == self._saved_step:
            return False
        optimizer_steps = self.job.optimizer.steps
        if skipping and not last and optimizer_steps == self._saved_optimizer_steps:
            return False
        share = job_state.collect_share(self.job, self.batches, done, self.world, rng)
        keep = None if skipping else self.job.recipe.checkpoint.keep
        result = SaveResult(done, optimizer_steps)
        problem = self._prepare_folder(share, done)
        if problem:
            self._report(replace(result, problem=problem), last)
        elif self._is_async and not last:
            # The next step changes the weights, so the thread needs copies.
            share = replace(share, boxes=self._copies.copy(share.boxes))
            write = partial(self._write, result, share, keep, self._async_world)
            self._running = BackgroundWrite(write)
        else:
            self._report(self._write(result, share, keep, self.world), last)
        return True

    def restart(self, done: int) -> None:
        """Continues from the checkpoint of step `done`, after a rewind.

        Later checkpoints are saved again: the newest one may be damaged.
        """
        self._saved_step = done
        self._saved_optimizer_steps = self.job.optimizer.steps

    def settle(self, wait: bool = False) -> None:
        """Reports the result of a save in the thread, if it has ended.

        Args:
            wait: Whether to wait for its end.
        """
        running = self._running
        if running and (wait or running.has_ended):
            self._running = None
            self._report(running.result(), last=False)

    def __enter__(self) -> Saver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Waits for the save in the thread."""
        # After another error a rank may be lost, and the save would wait for it forever.
        if error is None or isinstance(error, Fp8cfgError):
            self.settle(wait=True)
            if self._async_world is not self.world:
                dist.destroy_process_group(self._async_world.group)

    def _prepare_folder(self, share: Share, step: int) -> CheckpointError | None:
        """Checks the weights and prepares the folder of checkpoints. All ranks call it.

        Returns:
            A problem that does not stop the run, on all ranks.

        Raises:
            Diverged: Weights are not finite, on all ranks.
            RunFolderDeleted: On the first rank. The others raise CheckpointError.
        """
        problem: Fp8cfgError | None = _find_nonfinite(share, step, self.world, self.run)
        try:
            if self.run and not problem:
                self.run.check_there()
                self._root = self.run.files.folder(CHECKPOINTS, make=True)
                # After a power cut, metrics.jsonl must have all steps of each checkpoint.
                for name in (METRICS, FP8_STATS):
                    self.run.files.sync_file(name)
                self.run.files.sync()
        except OSError as error:
            path = self.run.checkpoints if self.run else ""
            problem = CheckpointError(f"step {step} was not saved in {path}: {error}")
        except Fp8cfgError as error:
            problem = error
        if not self.world.any(problem is not None):
            return None
        is_fatal = problem is not None and not isinstance(problem, CheckpointError)
        is_fatal = self.world.any(is_fatal)
        if problem is None:
            problem = CheckpointError(f"the first rank could not save step {step}")
        if is_fatal or not isinstance(problem, CheckpointError):
            raise problem
        return problem

    def _write(
        self, result: SaveResult, share: Share, keep: int | None, world: World
    ) -> SaveResult:
        """Writes the checkpoint and returns the completed `result`. May run in the thread."""
        self._copies.wait()
        try:
            folder = save.write_checkpoint(self._root, result.step, share, keep, world)
        except OldCheckpointStays as error:
            return replace(result, remark=str(error))
        except CheckpointError as error:
            return replace(result, problem=error)
        return replace(result, folder=folder)

    def _report(self, result: SaveResult, last: bool) -> None:
        """Prints a failed save, or raises its error if it was the last. Records a completed one."""
        if result.remark:
            self.say(result.remark)
        if result.problem:
            if last:
                raise result.problem
            self.say(
                f"warning: {result.problem}; older checkpoints are intact, and the next save tries again"
            )
            return
        self._saved_step = result.step
        self._saved_optimizer_steps = result.optimizer_steps
        if result.folder:
            self.saved(result.step, result.folder)


class BackgroundWrite:
    """Runs `write` in a daemon thread, so that Python can exit meanwhile."""

    def __init__(self, write: Callable[[], SaveResult]) -> None:
        self._write = write
        self._result: SaveResult | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="fp8cfg checkpoint", daemon=True)
        self._thread.start()

    @property
    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def result(self) -> SaveResult:
        """Waits for the result of `write`. Raises its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._result is not None, "the thread has ended without an error"
        return self._result

    def _run(self) -> None:
        """Runs in the thread."""
        try:
            self._result = self._write()
        except BaseException as error:
            # `result` raises it in the main thread.
            self._error = error


def _create_async_group(job: Job) -> dist.ProcessGroup | None:
    """Creates a CPU group of all ranks with the timeout of saves. All ranks call it."""
    timeout = timedelta(seconds=job.recipe.trainer.timeout.start)
    group: dist.ProcessGroup | None = dist.new_group(
        backend="gloo", timeout=timeout, group_desc=ASYNC_SAVE_GROUP
    )
    return group


ALIGNMENT = 64
"""Each copy starts at a multiple of this many bytes: views need the alignment of their dtype."""


class HostCopies:
    """Host memory for the copies of the tensors of one save, reused by the next save.

    Args:
        say: Prints a message if the memory cannot be pinned.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copied: torch.cuda.Event | None = None

    def copy(self, groups: Mapping[str, Sequence[TensorBox]]) -> Groups:
        """Copies the tensors of boxes into host memory, over the copies of the previous call.

        Returns at once. The copies are complete after `wait`. Later steps of the job don't change
        them.

        Args:
            groups: Boxes by group. Boxes may share a tensor.

        Returns:
            The same boxes with the copies.
        """
        tensors = {}
        for boxes in groups.values():
            for box in boxes:
                tensors[id(box.tensor)] = box.tensor.detach()
        starts = {}
        total = 0
        for key, tensor in tensors.items():
            starts[key] = total
            total += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT  # rounded up
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        if len(self._memory) < total:
            # Frees the old memory before it allocates the new one.
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu")
            if on_gpu:
                self._pin_memory()
        copies = {}
        for key, tensor in tensors.items():
            memory = self._memory[starts[key] : starts[key] + tensor.nbytes]
            copy = memory.view(tensor.dtype).view(tensor.shape)
            copies[key] = copy.copy_(tensor, non_blocking=True)
        if on_gpu:
            # Recorded on the compute stream after the copies. The thread waits for it.
            self._copied = torch.cuda.Event()
            self._copied.record()
        return {
            group: [replace(box, tensor=copies[id(box.tensor)]) for box in boxes]
            for group, boxes in groups.items()
        }

    def wait(self) -> None:
        """Waits until the copies are complete."""
        if self._copied is not None:
            self._copied.synchronize()

    def _pin_memory(self) -> None:
        """Pins the memory in place, as DCP's stager does.

        torch's allocator of pinned memory would round up to the next power of two.
        """
        start = self._memory.data_ptr()
        try:
            pin_memory(start, len(self._memory))
        except RuntimeError as error:
            self._say(f"note: saves take longer, because memory could not be pinned: {error}")
            return
        finalizer = weakref.finalize(self._memory, unpin_memory, start)
        # CUDA may be gone when Python ends.
        finalizer.atexit = False


def _find_nonfinite(
    share: Share, step: int, world: World, run: RunFolder | None
) -> Diverged | None:
    """Returns an error if weights or masters of any rank are not finite. All ranks call it.

    A checkpoint with such weights would replace a valid one.
    """
    weights = [*share.boxes["model"]]
    weights += [box for box in share.boxes["optimizer"] if ".master" in box.name]
    nonfinite = []
    for box in weights:
        if box.tensor.is_floating_point() and not _is_finite(box.tensor):
            nonfinite.append(box.name)
    # Count each weight once: by its first box, at offset 0.
    count = sum(not any(box.offsets) for box in weights)
    reports = [json.loads(text) for text in world.texts(json.dumps([count, nonfinite]))]
    names = dict.fromkeys(name for _, rank_names in reports for name in rank_names)
    if not names:
        return None
    total = sum(rank_count for rank_count, _ in reports)
    return Diverged(
        f"step {step}: {len(names)} of {total} weights are not finite,"
        f" the first is {next(iter(names))}; they are not saved; {after_divergence(run)}"
    )


def _is_finite(tensor: Tensor) -> bool:
    """Returns whether all elements are finite."""
    if tensor.itemsize == 1:  # torch.isfinite takes no float8
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def after_divergence(run: RunFolder | None) -> str:
    """Returns advice after a run diverged: resume from an earlier step, or start again."""
    checkpoints = []
    if run:
        checkpoints = manifest.list_steps(run.files.folder(CHECKPOINTS))
    if run is None or not checkpoints:
        return "lower optim.lr and start again"
    steps = sorted({step for step, _ in checkpoints})
    folder = shlex.quote(str(run.path))
    return (
        f"lower optim.lr and resume from an earlier step ({', '.join(map(str, steps))}), as in:"
        f" fp8cfg resume {folder} --step {steps[0]} optim.lr=LR"
    )
