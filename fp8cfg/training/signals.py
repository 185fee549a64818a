"""Signal handling: SIGTERM, SIGINT and SIGUSR1 request a stop, and the loop stops at the next safe point.

SIGTERM (a scheduler), SIGINT (a person), SIGUSR1 (Slurm's warning before the limit) and SIGHUP (a terminal that closes; under
nohup it is left alone) set a flag. The loop reads it before the first step, between steps and between the batches of an
evaluation, writes a checkpoint and ends with exit code 75. A second signal does not wait: 128 + its number, at once, where the
process is the command's own; in another one's, a launcher's or a notebook's, it does what that one does with it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
own_process = False
"""Whether this process is that of the command, which a second signal may end: set by its entry alone."""


class StopSignals:
    """Catches `signals` while it is entered, and puts the former handlers back after. Main thread only. Where another one is
    entered already, what that one has received counts here too.

    `agree` makes one decision of the ranks' own: it is given this rank's flag and returns whether any rank's is set (an
    all-reduce with MAX). Each rank must then call stop_requested() at the same steps.
    """

    def __init__(
        self,
        agree: Callable[[bool], bool] | None = None,
        signals: Iterable[signal.Signals] = SIGNALS,
    ) -> None:
        self._signals = signals
        self.received: signal.Signals | None = None
        self._agree = agree
        self._former: dict[signal.Signals, Any] = {}

    def stop_requested(self) -> bool:
        """Whether to stop now: this process got a signal or, where ranks agree, any of them did."""
        own = self.received is not None
        return self._agree(own) if self._agree else own

    def __enter__(self) -> StopSignals:
        for number in self._signals:
            former = signal.getsignal(number)
            if number is signal.SIGHUP and former is signal.SIG_IGN:
                continue
            self._former[number] = signal.signal(number, self._receive)
            outer = getattr(former, "__self__", None)
            if isinstance(outer, StopSignals):
                self.received = self.received or outer.received
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            # None: the handler was not installed from Python and cannot be put back from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._former = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            if own_process:
                os._exit(128 + number)
            former = self._outermost(number)
            if former is signal.SIG_IGN:
                return
            if not callable(
                former
            ):  # the default, or none of Python's: the process is left to whoever has it
                raise KeyboardInterrupt
            former(number, frame)
            return
        self.received = signal.Signals(number)
        # os.write: print() in a handler may interrupt a print() and fail as reentrant.
        with suppress(OSError):  # the terminal may be what has gone
            os.write(
                2,
                f"{self.received.name}: stopping as soon as all is saved; once more to exit at"
                " once\n".encode(),
            )

    def _outermost(self, number: int) -> Any:
        """The handler of the process itself, below those of all that are entered."""
        handler = self._former.get(signal.Signals(number))
        entered = getattr(handler, "__self__", None)
        return entered._outermost(number) if isinstance(entered, StopSignals) else handler


@contextmanager
def waiting_to_stop() -> Iterator[None]:
    """Until a run catches signals itself, remember for it those of a scheduler; a person's SIGINT ends what has not begun."""
    if threading.current_thread() is threading.main_thread():
        with StopSignals(signals=[number for number in SIGNALS if number is not signal.SIGINT]):
            yield
    else:
        yield
