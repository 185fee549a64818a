"""All loggers of a run. Each works in its own thread, so training never waits for a library.

A logger that fails or hangs is turned off with one warning. It never ends the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from queue import Full, Queue
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.planning.hardware import gpu_of_device
from fp8cfg.planning.plan_recipe import report_plan
from fp8cfg.planning.plan_report import PlanReport
from fp8cfg.run_folder.file_names import LOGGERS, PLAN, RECIPE, SOURCES
from fp8cfg.run_folder.files import StrangeFile
from fp8cfg.run_folder.metrics_file import Value
from fp8cfg.run_folder.status import State
from fp8cfg.schema.errors import ConfigError, printable
from fp8cfg.schema.keys import short
from fp8cfg.schema.packages import reason
from fp8cfg.schema.tables import wrapped
from fp8cfg.training.loggers.interface import LoggedRun, RunLogger
from fp8cfg.training.run_status import end_state

if TYPE_CHECKING:
    from fp8cfg.building.job import Job
    from fp8cfg.run_folder.run_folder import RunFolder
    from fp8cfg.schema.recipe import Recipe

MAX_WAITING = 10_000
"""Rows that wait for a slow logger. If there are more, it is turned off."""
CLOSE_SECONDS = 60.0
"""Time for all loggers to finish at the end of a run."""

Say = Callable[[str], None]


def refuse_missing(recipe: Recipe) -> None:
    """Raises ConfigError if the library of a logger is not installed."""
    lines = []
    for name in recipe.log.loggers:
        # A folder `wandb` in the working directory, which W&B creates, is no library.
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            lines.append(
                f"log.loggers=[{name}]: {name} is not installed; pip install 'fp8cfg[{name}]'"
            )
    if lines:
        raise ConfigError(lines)


class LoggerThread:
    """Calls one logger in a separate thread.

    Args:
        name: Name in log.loggers.
        logger: The logger.

    Attributes:
        error: What the logger raised. It is not called again then.
    """

    def __init__(self, name: str, logger: RunLogger) -> None:
        self.name = name
        self.logger = logger
        self.error: BaseException | None = None
        self._calls: Queue[Callable[[], None] | None] = Queue(MAX_WAITING)
        # A daemon, so that a logger that hangs does not keep the process alive.
        self._thread = Thread(target=self._work, name=f"fp8cfg-{name}", daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], None] | None) -> None:
        """Adds a call without waiting. None ends the thread after the calls before."""
        try:
            self._calls.put_nowait(call)
        except Full:
            self.error = TimeoutError(f"{MAX_WAITING} rows wait to be written")

    def join(self, seconds: float) -> None:
        """Waits until all calls are done."""
        self._thread.join(seconds)
        if self._thread.is_alive() and self.error is None:
            self.error = TimeoutError("did not finish in time")

    def _work(self) -> None:
        while self.error is None:
            call = self._calls.get()
            if call is None:
                return
            try:
                call()
            # A library may raise anything, and some call sys.exit.
            except (Exception, SystemExit) as error:
                self.error = error


class RunLoggers:
    """Loggers of a run. A context manager. Only the first rank has any.

    Args:
        job: The job.
        run: Run folder, None on ranks that write nothing.
        num_ranks: Number of ranks.
        say: Prints a message.
    """

    def __init__(self, job: Job, run: RunFolder | None, num_ranks: int, say: Say) -> None:
        self._job = job
        self._recipe = job.recipe
        self._run = run
        self._num_ranks = num_ranks
        self._say = say
        self._threads: list[LoggerThread] = []

    def open(self, first_step: int) -> None:
        """Starts the loggers, and logs the recipe, its sources and the plan.

        Args:
            first_step: Optimizer steps done. If there are any, the loggers continue their runs.
        """
        names = self._recipe.log.loggers
        if self._run is None or not names:
            return
        # The ids are kept also of loggers that are off now.
        ids = _read_ids(self._run)
        for name in names:
            try:
                logger = self._create(name, first_step, ids.get(name))
            except (Exception, SystemExit) as error:
                self._warn(name, error)
                continue
            ids[name] = logger.run_id
            self._say(f"{name}: {printable(logger.location)}")
            self._threads.append(LoggerThread(name, logger))
        _write_json(self._run, LOGGERS, ids)
        self.save(RECIPE)
        self.save(SOURCES)
        # The plan describes the recipe's own model.
        if not self._job.foreign:
            _write_json(self._run, PLAN, self._plan().data())
            self.save(PLAN)

    def _create(self, name: str, first_step: int, run_id: str | None) -> RunLogger:
        assert self._run is not None
        run = LoggedRun(
            folder=self._run.path,
            project=self._recipe.log.project,
            values={short(key): value for key, value in flat(self._recipe).items()},
            first_step=first_step,
            run_id=run_id,
        )
        module: Any = import_module(f"fp8cfg.training.loggers.{name}")
        logger: RunLogger = module.Logger(run)
        return logger

    def _plan(self) -> PlanReport:
        """Returns the plan of the run on its device."""
        gpu = None
        if self._job.device.type == "cuda":
            gpu = gpu_of_device(torch.cuda.get_device_name(self._job.device))
        return report_plan(self._recipe, self._num_ranks, gpu)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs the numbers in `values` for optimizer step `step`, counted from 1."""
        if not self._threads:
            return
        numbers = {}
        for name, value in values.items():
            # Loggers add the time themselves.
            if isinstance(value, (int, float)) and name != "time":
                numbers[name] = float(value)
        for thread in self._threads:
            thread.add(partial(thread.logger.write, step, numbers))
        self._drop_failed()

    def save(self, name: str) -> None:
        """Logs the file `name` of the run folder as an artifact."""
        for thread in self._threads:
            assert self._run is not None
            thread.add(partial(thread.logger.save, self._run.path / name))

    def close(self, state: State) -> None:
        """Ends the loggers' runs in the given state."""
        for thread in self._threads:
            thread.add(partial(thread.logger.close, state))
            thread.add(None)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._drop_failed()
        self._threads.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(end_state(error))

    def _drop_failed(self) -> None:
        """Turns off the loggers that failed, with a warning each."""
        for thread in self._threads:
            if thread.error:
                self._warn(thread.name, thread.error)
        self._threads = [thread for thread in self._threads if not thread.error]

    def _warn(self, name: str, error: BaseException) -> None:
        text = (
            f"warning: log.loggers=[{name}] is off after an error: {reason(error)};"
            " metrics.jsonl has all metrics"
        )
        self._say(wrapped(printable(text)))


def _write_json(run: RunFolder, name: str, data: Any) -> None:
    run.files.replace(name, (json.dumps(data, indent=1) + "\n").encode())


def _read_ids(run: RunFolder) -> dict[str, str]:
    """Reads the loggers' ids of this run. Empty for a new run or a damaged file."""
    try:
        ids = json.loads(run.files.read(LOGGERS))
    except (OSError, StrangeFile, ValueError, RecursionError):
        return {}
    if not isinstance(ids, dict):
        return {}
    return {name: id for name, id in ids.items() if isinstance(id, str)}
