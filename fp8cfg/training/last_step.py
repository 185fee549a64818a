"""Emergency checkpoint: saves the last complete step if an error ends the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fp8cfg.backends import registry
from fp8cfg.checkpoint.job_state import RandomState, capture_rng
from fp8cfg.checkpoint.saver import Saver
from fp8cfg.data import DataError
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable
from fp8cfg.training.microbatches import NoTargets

if TYPE_CHECKING:
    from fp8cfg.building.job import Job


class LastStep:
    """Tracks the step of the job's state, and saves this state if an error ends the run.

    The state is complete unless the optimizer step itself failed. Then only some parameters are
    updated.

    Args:
        job: The job.
        saver: Writes the checkpoint.
        world: Ranks of the run.
        first: Optimizer steps done before this run starts.
        say: Prints a message.
    """

    def __init__(
        self, job: Job, saver: Saver, world: World, first: int, say: Callable[[str], None]
    ) -> None:
        self._job = job
        self._saver = saver
        self._world = world
        self._say = say
        self.restart(first)

    def restart(self, done: int) -> None:
        """Records that the job has the state of `done` steps, after a load or a skipped step."""
        self._step = done
        self._recorded = done
        # `steps_begun` counts the calls of this job's optimizer only. In a resumed run it differs
        # from the steps of the run by a constant.
        self._steps_before = self._job.steps_begun - done
        # Of the steps that are not recorded, and of the last recorded one.
        self._rng: dict[int, RandomState] = {}

    def begin(self, step: int) -> None:
        """Records that a step begins, counted from 0."""
        self._step = step
        # A resumed run repeats the step. Dropout must draw the same numbers again.
        self._rng[step] = capture_rng()
        for old_step in list(self._rng):
            if old_step < self._recorded:
                del self._rng[old_step]

    def random_state(self, step: int) -> RandomState:
        """Returns the random state before a step, counted from 0: the last recorded or later."""
        return self._rng[step]

    def record(self, done: int) -> None:
        """Records that the host knows the results of `done` steps."""
        self._recorded = done

    def save(self, error: Exception, skipping: bool) -> None:
        """Saves the last complete step, if the run can be resumed from it.

        Raises nothing: the caller raises `error` afterwards.

        Args:
            error: The error that ends the run.
            skipping: Whether the last steps were skipped, as in `Saver.save`.
        """
        if not self._is_resumable(error) or not self._recorded:
            return
        # More calls than recorded steps: the optimizer step began, but did not end.
        steps_begun = self._job.steps_begun - self._steps_before
        if steps_begun != self._recorded:
            self._say("the error came from the optimizer step, so no checkpoint is saved")
            return
        try:
            self._save_checkpoint(skipping)
        except Exception as problem:
            self._say(f"step {self._recorded} could not be saved either: {printable(str(problem))}")

    def _is_resumable(self, error: Exception) -> bool:
        """Whether a resumed run could continue after `error`."""
        if self._world.size > 1:
            # Saving is a collective. Only this error is sure to be raised on all ranks at once.
            return isinstance(error, NoTargets)
        # Our other errors, such as Diverged or NotFP8Error, would only come again.
        return isinstance(error, ConfigError | DataError) or not isinstance(error, Fp8cfgError)

    def _save_checkpoint(self, skipping: bool) -> None:
        self._world.apply_timeout("start", self._step + 1)
        rng = None
        # The error came in the middle of a step. RNG state and amaxes are of this unfinished step.
        if self._recorded == self._step:
            rng = self._rng.get(self._step)
            self._forget_amaxes()
        if self._saver.save(self._recorded, skipping, last=True, rng=rng):
            self._say(
                f"step {self._recorded}, the last complete one, is saved; you can resume from it"
            )

    def _forget_amaxes(self) -> None:
        """Discards the amaxes of the failed step, as after a skipped step."""
        if self._job.recipe.fp8.enabled:
            registry.backend(self._job.choice.backend).after_skip(self._job.model)
