"""Status of a run: `status.json` in its folder, and whether a process still trains it.

A run writes its status when it starts and when it ends. A killed run can't write, so its status
stays at "running". The lock tells: the kernel releases it with the process.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from fp8cfg.run_folder.file_names import LOCK, STATUS
from fp8cfg.run_folder.files import RunFiles, StrangeFile
from fp8cfg.schema.errors import printable

State = Literal["running", "done", "stopped", "diverged", "crashed"]
STATES: tuple[State, ...] = get_args(State)
MAX_MESSAGE = 500
"""Characters of a message that are kept."""


@dataclass(frozen=True)
class Status:
    """Contents of status.json.

    Attributes:
        state: State of the run when it was written.
        step: Optimizer steps done.
        message: One line on how the run ended, "" while it runs.
        time: When it was written, in Unix seconds.
    """

    state: State
    step: int
    message: str
    time: float


def write_status(files: RunFiles, state: State, step: int, message: str = "") -> None:
    """Replaces status.json. Raises OSError.

    Args:
        files: Run folder.
        state: State of the run.
        step: Optimizer steps done.
        message: How the run ended. The first line is kept.
    """
    line = printable(message.strip().partition("\n")[0])[:MAX_MESSAGE]
    status = Status(state, step, line, time.time())
    files.replace(STATUS, (json.dumps(asdict(status), indent=1) + "\n").encode())


def read_status(files: RunFiles) -> Status | None:
    """Reads status.json. None if it is missing or damaged, as in folders of older versions."""
    try:
        data = json.loads(files.read(STATUS))
    except (OSError, StrangeFile, ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    state, step, message = data.get("state"), data.get("step"), data.get("message")
    written = data.get("time")
    if state not in STATES or type(step) is not int:
        return None
    if not isinstance(message, str) or not isinstance(written, (int, float)):
        return None
    return Status(state, step, printable(message), float(written))


def is_locked(files: RunFiles) -> bool | None:
    """Whether a process uses the run folder. None if the file system can't tell.

    Tests run.lock with a shared lock that is released at once. Readers do not disturb each other,
    and `take_lock` tries again if it meets one.
    """
    try:
        descriptor = files.open_regular(LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except (OSError, StrangeFile):
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False
