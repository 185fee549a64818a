"""Failpoints: places in a save where a test kills the process, as a power cut would."""

from __future__ import annotations

import os
import signal
from collections import Counter


def failpoint(name: str) -> None:
    """For tests only: kill this process where FP8CFG_FAILPOINT=`name` or `name:n` says, at the n-th time it gets here; or send it
    another signal, as `name:n:SIGTERM` says, and go on.

    Points of save(): shard (after each group), manifest (before it), rename (before), renamed (after), delete (an old
    checkpoint is renamed away and not yet removed).
    """
    wanted, nth, number = [*os.environ.get("FP8CFG_FAILPOINT", "").split(":"), "", ""][:3]
    if name == wanted:
        _reached[name] += 1
        if _reached[name] == int(nth or 1):
            os.kill(os.getpid(), signal.Signals[number or "SIGKILL"])


_reached: Counter[str] = Counter()
