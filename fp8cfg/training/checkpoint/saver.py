"""The saves of a run: when one is due, what is not saved, and what a failed one ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from fp8cfg.config.errors import Fp8cfgError
from fp8cfg.data import Batches
from fp8cfg.job import Job
from fp8cfg.numerics.stored_form import is_fp8_state
from fp8cfg.training.checkpoint import checkpoint, job_state, job_tensors
from fp8cfg.training.checkpoint.checkpoint import CheckpointError, OldCheckpointStays
from fp8cfg.training.checkpoint.pipeline_stages import whole_json
from fp8cfg.training.distributed.world import World
from fp8cfg.training.run_folder import CHECKPOINTS, RunFolder
from fp8cfg.training.run_folder_errors import RunFolderNotWritable


class Diverged(Fp8cfgError):
    """Gradients or weights are not finite, and nothing in the recipe can make them so. Exit code 1; checkpoints are intact."""


class Saver:
    """Writes the checkpoints of `job` to `run`, which the first rank alone has; all ranks make the same calls. `say` gets what did
    not go as planned, `saved` there the step and the folder of each that is whole."""

    def __init__(
        self, job: Job, run: RunFolder | None, world: World, batches: Batches, say: Callable[[str], None],
        saved: Callable[[int, Path], None],
    ) -> None:
        self.job, self.run, self.world, self.batches, self.say, self.saved = job, run, world, batches, say, saved
        self._saves = world.any(run is not None)
        self._saved_at = self._steps_saved = -1
        self._folder: Path | None = None

    def check_room(self) -> None:
        """Raise RunFolderNotWritable where the disk has no space for one checkpoint: better before the first step than after."""
        need, problem = job_tensors.checkpoint_bytes(self.job, self.world) + checkpoint.RESERVE, ""
        if self.run and (free := self.run.files.free()) < need:
            problem = f"{self.run.path}: not enough space for one checkpoint: needs {need} bytes, {free} are free"
        if self.world.any(bool(problem)):
            raise RunFolderNotWritable(problem or "the first rank has no space for one checkpoint")

    def save(self, done: int, skipping: bool = False, last: bool = False) -> None:
        """Save step `done`. Where that fails the older checkpoints stay and the next call tries again; CheckpointError where this
        is the `last`. Raises Diverged for weights that are not finite, and RunFolderDeleted.

        While steps are `skipping` no older checkpoint is removed, since it may be the one to go back to; and none is written
        where nothing has changed since the one before, but the last.
        """
        if not self._saves or done == self._saved_at:
            return
        steps = self.job.optimizer.steps
        if skipping and steps == self._steps_saved and not last:
            return
        problem = self._try(done, None if skipping else self.job.recipe.checkpoint.keep)
        if self.world.any(problem is not None):
            if self.world.any(last or (problem is not None and not isinstance(problem, CheckpointError))):
                raise problem or CheckpointError(f"the first rank could not save step {done}")
            self.say(f"{problem}; older checkpoints stay, and the next save tries again")
            return
        self._saved_at, self._steps_saved = done, steps
        if self._folder:
            self.saved(done, self._folder)

    def _try(self, done: int, keep: int | None) -> Fp8cfgError | None:
        """Why the checkpoint could not be written, or None."""
        optimizer, model = job_tensors.optimizer_tensors(self.job, self.world), job_tensors.model_tensors(self.job, self.world)
        rest = whole_json(self.job)
        if self.run is None:
            return None
        try:
            self.run.check_there()
            _refuse_not_finite(done, model, optimizer)
            tensors, state = job_state.collect(self.job, self.batches, done, optimizer, model, rest)
            root = self.run.files.folder(CHECKPOINTS, make=True)
            self._folder = checkpoint.save(root, done, tensors, state, keep, self.world.size)
        except OldCheckpointStays as e:
            self.say(str(e))
        except OSError as e:
            return CheckpointError(f"cannot save step {done} in {self.run.checkpoints}: {e}")
        except Fp8cfgError as e:
            return e
        return None


def _refuse_not_finite(done: int, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Raise Diverged where a weight, or its master, is not finite: a checkpoint of it would take the place of a good one."""
    weights = {name: t for name, t in model.items() if not is_fp8_state(name)}
    weights |= {name: t for name, t in optimizer.items() if ".master" in name}
    bad = [name for name, t in weights.items() if t.is_floating_point() and not _finite(t)]
    if bad:
        raise Diverged(f"step {done}: {len(bad)} of {len(weights)} weights are not finite, the first is {bad[0]}; they are not "
                       "saved, lower optim.lr or resume from an earlier checkpoint")


def _finite(t: Tensor) -> bool:
    narrow = t.itemsize == 1  # torch.isfinite takes no float8
    return bool(torch.isfinite(t.float() if narrow else t).all())

