"""Save of the last whole step of a run that an error ends between two optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

from fp8cfg.backends import registry
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.job_state import RandomState, capture_rng
from fp8cfg.checkpoint.saver import Saver
from fp8cfg.data import DataError
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError, Fp8cfgError, printable
from fp8cfg.training.step import NoTargets


class LastStep:
    """Knows which step the state of `job` is of, and saves it if an error ends the run.

    The state is whole unless the error came from the optimizer step itself. Then some parameters
    are updated and others are not.
    """

    def __init__(
        self, job: Job, saver: Saver, world: World, first: int, say: Callable[[str], None]
    ) -> None:
        self._job = job
        self._saver = saver
        self._world = world
        self._say = say
        self._step = first
        self._recorded = first
        # Optimizer steps that the job has begun before step 0 of this run.
        self._steps_before = job.steps_begun - first
        self._rng: RandomState | None = None

    def begin(self, step: int) -> None:
        """Step number `step`, the first being 0, begins."""
        self._step = step
        # The passes of a step may draw random numbers (LoRA's dropout), and a resumed run repeats
        # all of them.
        self._rng = capture_rng()

    def record(self, done: int) -> None:
        """`done` steps have ended, and their results are known."""
        self._recorded = done

    def save(self, error: Exception, skipping: bool) -> None:
        """Saves the last whole step if the run can be resumed from it after `error`.

        `skipping` says that the last steps were skipped, as of `Saver.save`. Raises nothing, so that `error` stays the error of the run.
        """
        if not self._is_resumable(error) or not self._recorded:
            return
        is_whole = self._job.steps_begun - self._steps_before == self._recorded
        if not is_whole:
            self._say("the error came from the optimizer step: nothing is saved after it")
            return
        try:
            self._save(skipping)
        except Exception as problem:
            self._say(f"step {self._recorded} could not be saved either: {printable(str(problem))}")

    def _is_resumable(self, error: Exception) -> bool:
        if self._world.size > 1:
            # Any other error may be of one rank alone, while the others wait for it.
            return isinstance(error, NoTargets)
        return isinstance(error, ConfigError | DataError) or not isinstance(error, Fp8cfgError)

    def _save(self, skipping: bool) -> None:
        self._world.waits("start", self._step + 1)
        rng = None
        if self._recorded == self._step:  # the error came while a step was under way
            rng = self._rng
            self._forget_amaxes()
        if self._saver.save(self._recorded, skipping, last=True, rng=rng):
            self._say(
                f"step {self._recorded}, the last whole one, is saved; you can resume from it"
            )

    def _forget_amaxes(self) -> None:
        """Drops the amaxes of the step that failed, as a skipped step does."""
        if self._job.recipe.fp8.enabled:
            registry.backend(self._job.choice.backend).after_skip(self._job.model)
