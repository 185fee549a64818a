"""Interface of a logger, and what it is told about the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fp8cfg.composition.recipe_yaml import nested
from fp8cfg.run_folder.status import State

DEFAULT_PROJECT = "fp8cfg"


@dataclass(frozen=True)
class LoggedRun:
    """A run, for a logger.

    Attributes:
        folder: Run folder.
        project: log.project.
        values: Value of each key of the recipe, by its short name with dots.
        first_step: Optimizer steps done before.
        run_id: The logger's own id of this run, if the run is resumed. Otherwise None.
    """

    folder: Path
    project: str | None
    values: Mapping[str, Any]
    first_step: int
    run_id: str | None

    @property
    def name(self) -> str:
        """Name of the run: the name of its folder."""
        return self.folder.absolute().name

    @property
    def config(self) -> dict[str, Any]:
        """The recipe as nested mappings."""
        return nested(self.values)


class RunLogger(Protocol):
    """Writes a run to one library. Created with a LoggedRun when the training loop starts.

    The other methods are called in one thread, in order. They may raise anything: then the logger
    is turned off with a warning.

    Attributes:
        run_id: The library's id of the run, to continue it later.
        location: Where the user finds the run.
    """

    run_id: str
    location: str

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs metrics of optimizer step `step`, counted from 1.

        Steps can repeat and arrive out of order: a resumed run repeats the steps after its
        checkpoint, and on a GPU the FP8 statistics of a step come before the step's own metrics.
        """

    def save(self, path: Path) -> None:
        """Logs a file of the run folder as an artifact."""

    def close(self, state: State) -> None:
        """Ends the run in the given state and waits until everything is written."""
