"""Signal handling: SIGTERM, SIGINT and SIGUSR1 request a stop, and the loop stops at the next safe point.

SIGTERM (a scheduler), SIGINT (a person) and SIGUSR1 (Slurm's warning before the limit) set a flag. The loop reads it between
optimizer steps, writes a checkpoint and ends with exit code 75. A second signal does not wait: 128 + its number, at once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignals:
    """Catches the signals while it is entered, and puts the former handlers back after. Main thread only.

    `agree` makes one decision of the ranks' own: it is given this rank's flag and returns whether any rank's is set (an
    all-reduce with MAX). Each rank must then call stop_requested() at the same steps.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None) -> None:
        self.received: signal.Signals | None = None
        self._agree = agree
        self._former: dict[signal.Signals, Any] = {}

    def stop_requested(self) -> bool:
        """Whether to stop now: this process got a signal or, where ranks agree, any of them did."""
        own = self.received is not None
        return self._agree(own) if self._agree else own

    def __enter__(self) -> StopSignals:
        self._former = {number: signal.signal(number, self._receive) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: the handler was not installed from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + number)
        self.received = signal.Signals(number)
        # os.write: print() in a handler may interrupt a print() and fail as reentrant.
        os.write(2, f"{self.received.name}: stopping after this step; once more to exit at once\n".encode())
