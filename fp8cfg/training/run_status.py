"""The status that a run leaves in its folder when it starts and when it ends."""

from __future__ import annotations

from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from fp8cfg.checkpoint.saver import Diverged
from fp8cfg.run_folder.status import State, write_status
from fp8cfg.schema.errors import Fp8cfgError, out_of_memory
from fp8cfg.training.signals import REQUEUE

if TYPE_CHECKING:
    from fp8cfg.run_folder.run_folder import RunFolder


class RunStatus:
    """Writes status.json around a run. A context manager.

    Args:
        run: Run folder, None on ranks that write nothing.
        step: Optimizer steps done before.

    Attributes:
        step: Optimizer steps done. The training loop counts them here.
    """

    def __init__(self, run: RunFolder | None, step: int) -> None:
        self._run = run
        self.step = step

    def __enter__(self) -> Self:
        self._write("running", "")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        message = ""
        if error is not None:
            message = _describe_error(error)
        self._write(end_state(error), message)

    def _write(self, state: State, message: str) -> None:
        if self._run is None:
            return
        # The training itself reports a full disk or a deleted folder.
        with suppress(OSError):
            write_status(self._run.files, state, self.step, message)


def end_state(error: BaseException | None) -> State:
    """Returns the state of a run that `error` has ended. None is the normal end."""
    if error is None:
        return "done"
    code = None
    if isinstance(error, Fp8cfgError):
        code = error.exit_code
    if code == REQUEUE or isinstance(error, KeyboardInterrupt):
        return "stopped"
    if code == Diverged.exit_code:
        return "diverged"
    return "crashed"


def _describe_error(error: BaseException) -> str:
    """Returns the message of `error`."""
    if isinstance(error, Fp8cfgError):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return out_of_memory(error) or f"{type(error).__name__}: {error}"
