"""Signal handling: SIGTERM, SIGINT and SIGUSR1 request a stop, and the loop stops at the next safe point.

SIGTERM (a scheduler), SIGINT (a person), SIGUSR1 (Slurm's warning before the limit) and SIGHUP (a terminal that closes; under
nohup it is left alone) set a flag. The loop reads it before the first step, between steps and between the batches of an
evaluation, writes a checkpoint and ends with exit code 75. A second signal exits at once, with 128 + its number, if the process is
the command's own. In a process of others, as a launcher or a notebook, their handler gets it.

Python calls handlers between two bytecodes of the main thread, so not while that waits for other ranks in C++, which takes up to
trainer.timeout. A thread ends the command's own process then: at the second signal, or at the first while the ranks meet.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REQUEUE = 75
"""Exit code of a run that a signal stopped and that resumes."""
own_process = False
"""Whether this process is that of the command, which a second signal may end: set by its entry alone."""
_ranks_meet = False
"""Whether this rank waits for all others to start: nothing is trained yet."""


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
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    remembered = [number for number in SIGNALS if number is not signal.SIGINT]
    with _exit_thread(), StopSignals(signals=remembered):
        yield


@contextmanager
def ranks_meeting(ranks: int) -> Iterator[None]:
    """While several `ranks` meet, a signal ends the command's own process at once, since nothing is trained yet."""
    global _ranks_meet
    _ranks_meet = own_process and ranks > 1
    try:
        if _ranks_meet:
            for number in SIGNALS:
                _end_if_received(number)
        yield
    finally:
        _ranks_meet = False


def _end_if_received(number: signal.Signals) -> None:
    """End the process if signal `number` came before the ranks meet."""
    stop = _stop_signals(number)
    if stop is not None and stop.received is not None:
        _end_at_start(stop.received)


def _stop_signals(number: int) -> StopSignals | None:
    """The StopSignals that handles signal `number`, if one does."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    return owner if isinstance(owner, StopSignals) else None


@contextmanager
def _exit_thread() -> Iterator[None]:
    """Run the thread that ends the command's own process while the main thread cannot."""
    if not own_process:
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_exit_when_asked, args=(reading, signal.getsignal(signal.SIGINT)), daemon=True
    )
    try:
        if outer == -1:
            thread.start()
        else:  # the same thread for the whole command, or another library's file
            signal.set_wakeup_fd(outer)
        yield
    finally:
        if outer == -1:
            signal.set_wakeup_fd(-1)
            os.write(writing, _END)
            thread.join()
        os.close(writing)
        os.close(reading)


_END = b"\0"
"""Ends the exit thread; no signal has the number 0."""


def _exit_when_asked(reading: int, interrupt: Any) -> None:
    """End the process at the second signal, or at the first while the ranks meet. Python writes the numbers of signals to the pipe
    `reading` as they come, whatever the main thread does. Signals whose handler is another library's, as of a launcher in this
    process, are left to that; `interrupt` is the command's handler of SIGINT."""
    count = 0
    while True:
        (number,) = os.read(reading, 1)
        if number == _END[0]:
            return
        if number not in SIGNALS:
            continue
        if _stop_signals(number) is None and signal.getsignal(number) is not interrupt:
            continue
        count += 1
        if _ranks_meet:
            _end_at_start(signal.Signals(number))
        if count > 1:
            os._exit(128 + number)


def _end_at_start(number: signal.Signals) -> None:
    """End the process, whose main thread waits for the other ranks."""
    with suppress(OSError):  # the terminal may be what has gone
        line = f"{number.name}: stopped while waiting for the other ranks, nothing was trained\n"
        os.write(2, line.encode())
        sys.stdout.flush()
    os._exit(128 + number if number is signal.SIGINT else REQUEUE)
