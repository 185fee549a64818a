"""Background write: what a thread writes while the run goes on, of which there is one at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8cfg.training.checkpoint.checkpoint import CheckpointError


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
