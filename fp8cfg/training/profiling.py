"""Profile of chosen steps (log.profile) and snapshots of GPU memory (log.memory_snapshot).

Both record on the first rank, into RUN_FOLDER/profile. Other ranks make the same calls, so that all
finish the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from fp8cfg.run_folder.file_names import PROFILE
from fp8cfg.schema.errors import ConfigError, out_of_memory, printable
from fp8cfg.schema.tables import wrapped

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.schema.recipe import Recipe

Say = Callable[[str], None]
SNAPSHOT_STEPS = 3
"""Steps of a process before a snapshot: by then, the first step and its compilation are over."""
MAX_EVENTS = 100_000
"""Newest allocations that a snapshot has."""


def refuse_snapshot_on_cpu(recipe: Recipe, device_type: str) -> None:
    """Raises ConfigError for log.memory_snapshot on a CPU: torch records GPU memory only."""
    if recipe.log.memory_snapshot and device_type != "cuda":
        raise ConfigError(
            "log.memory_snapshot=true: records GPU memory, but this run is on a CPU; drop it, or"
            " run fp8cfg plan --measure for the memory on a CPU"
        )


class StepProfiler:
    """Records the steps START to END of log.profile with torch.profiler. A context manager.

    Args:
        job: The job.
        run: Run folder, None on ranks that write nothing.
        say: Prints a message.
    """

    def __init__(self, job: Job, run: RunFolder | None, say: Say) -> None:
        # Without log.profile no step is in the range.
        self._first, self._last = job.recipe.log.profile or (0, 0)
        self._device = job.device
        self._run = run
        self._say = say
        self._profiler: Any = None

    def must_finish(self, step: int) -> bool:
        """Whether `step` must finish before the next one, so that the profile has whole steps."""
        return step in (self._first - 1, self._last)

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Records the launch of a step, counted from 1, if it is in the range."""
        if self._run is None or not self._first <= step <= self._last:
            yield
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profiler = profile(activities=activities, record_shapes=True)
            self._profiler.start()
        with record_function(f"step {step}"):
            yield

    def finish(self, step: int) -> None:
        """Writes the profile if `step` is the last one in it."""
        if step >= self._last:
            self._write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A run that ends early writes the steps until then.
        self._write()

    def _write(self) -> None:
        if self._profiler is None or self._run is None:
            return
        profiler, self._profiler = self._profiler, None
        self._last = 0  # a run that goes back to a checkpoint is profiled once
        profiler.stop()
        try:
            folder = self._run.files.folder(PROFILE, make=True).path
            # TensorBoard's plugin and Perfetto read this name and format.
            path = folder / f"from-step-{self._first}.pt.trace.json.gz"
            profiler.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self._say(wrapped(f"warning: log.profile: not written: {error}"))
            return
        self._say(f"profile: {printable(str(path))}; open it in https://ui.perfetto.dev")


class MemorySnapshots:
    """Records GPU memory for log.memory_snapshot. A context manager.

    Writes a snapshot after three steps, and another one if the run runs out of memory.

    Args:
        recipe: The recipe.
        run: Run folder, None on ranks that write nothing.
        say: Prints a message.
    """

    def __init__(self, recipe: Recipe, run: RunFolder | None, say: Say) -> None:
        self._run = run if recipe.log.memory_snapshot else None
        self._say = say
        self._steps_left = SNAPSHOT_STEPS

    def __enter__(self) -> Self:
        if self._run:
            # C++ frames would take most of the time.
            torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_EVENTS)
        return self

    def finish(self, step: int) -> None:
        """Writes a snapshot if `step` is the third one of this process."""
        self._steps_left -= 1
        if self._steps_left == 0:
            self._write(f"memory-step-{step}.pickle")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error and out_of_memory(error):
            self._write("memory-at-error.pickle")
        if self._run:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write(self, name: str) -> None:
        if self._run is None:
            return
        try:
            path = self._run.files.folder(PROFILE, make=True).path / name
            torch.cuda.memory._dump_snapshot(str(path))
        except (OSError, RuntimeError) as error:
            self._say(wrapped(f"warning: log.memory_snapshot: not written: {error}"))
            return
        self._say(f"memory: {printable(str(path))}; open it in https://pytorch.org/memory_viz")
