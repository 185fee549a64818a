"""Stop signals: four signals ask the loop to stop, to save a checkpoint and to exit with code 75.

    SIGTERM   a scheduler, or `kill`
    SIGINT    a person at the keyboard
    SIGUSR1   Slurm, before the time limit
    SIGHUP    a terminal that closes; under nohup it stays ignored

A handler sets a flag. The loop reads it before the first step, between steps and between the
batches of an evaluation. A second signal exits at once with 128 + its number if the process runs
the `fp8cfg` command. In another program, such as a notebook, the second signal goes to the handler
of that program.

Python calls handlers between two bytecodes of the main thread. That is too late while the main
thread waits for other ranks in C++, for up to trainer.timeout. So in the process of the command a
thread reads the signals too. It exits at the second signal, or at the first one while the ranks
meet.
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
"""Whether this process runs the command, so that a second signal may end it. The entry point sets it."""
_ranks_meet = False
"""Whether this rank waits for the others to start. Nothing is trained yet."""


class StopSignals:
    """Catches signals while it is entered, and restores the former handlers after. Main thread only.

    If another instance is entered already, its received signal counts here too.

    Args:
        agree: Returns whether any rank's flag is set, given this rank's flag. A collective: all
            ranks must call `stop_requested` at the same steps. None for one rank.
        signals: The signals to catch.
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
