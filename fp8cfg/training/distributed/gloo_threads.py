"""Threads of gloo's process groups, which may hold the tensors of a collective for a moment after it is done.

One lets go of them with Python's lock, and `destroy_process_group` waits for none while a device mesh, which DTensor's caches keep,
has the group (torch 2.13). One that is late, on a busy machine, finds Python ending, is unwound through torch's C++, and C++ ends
the process: "terminate called without an active exception", SIGABRT (until CPython 3.14).
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

_NAME = "pt_gloo_runloop"
_LOOKS = 3
"""Looks in a row that find all threads asleep: one asleep for the lock alone would have had it in between."""


def wait_until_idle(patience: float = 10.0, every: float = 0.01) -> bool:
    """Wait, without Python's lock, until gloo's threads wait for work, at most `patience` seconds; whether they do. On Linux, whose
    /proc tells; elsewhere for a few times `every` seconds."""
    asleep, end = 0, time.monotonic() + patience
    while (threads := _states()) != [] and asleep < _LOOKS and time.monotonic() < end:
        asleep = asleep + 1 if threads is None or set(threads) == {"S"} else 0
        time.sleep(every)
    return threads == [] or asleep == _LOOKS


def _states() -> list[str] | None:
    """The state of each of gloo's threads, as in proc(5); None where the system does not tell."""
    tasks = Path("/proc/self/task")
    if not tasks.is_dir():
        return None
    found = []
    for task in tasks.iterdir():
        with suppress(OSError):  # it has ended
            name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME:
                found.append(rest.split()[0])
    return found
