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
"""Whether this process runs the `fp8cfg` command, so that a second signal may end it.

The command's entry point sets it."""
_ranks_meet = False
"""Whether this rank waits for the others to start. Nothing is trained yet."""


class StopSignals:
    """Catches signals while it is entered, then restores the former handlers. Main thread only.

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
        """Whether to stop now: this process got a signal, or with `agree` any rank got one."""
        is_received = self.received is not None
        if self._agree is None:
            return is_received
        return self._agree(is_received)

    def __enter__(self) -> StopSignals:
        for number in self._signals:
            former = signal.getsignal(number)
            # nohup ignores SIGHUP, and the run must survive it.
            if number is signal.SIGHUP and former is signal.SIG_IGN:
                continue
            self._former[number] = signal.signal(number, self._receive)
            # A signal from before this instance, such as during the build, stops the run too.
            outer = getattr(former, "__self__", None)
            if isinstance(outer, StopSignals):
                self.received = self.received or outer.received
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            if handler is None:
                # It was not installed from Python and cannot be put back from it.
                handler = signal.SIG_DFL
            signal.signal(number, handler)
        self._former = {}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: records the first signal. Ends the process or passes on later ones."""
        if self.received is not None:
            if own_process:
                os._exit(128 + number)
            former = self._outermost_handler(number)
            if former is signal.SIG_IGN:
                return
            # The default handler, or one from outside Python. KeyboardInterrupt unwinds the run and
            # leaves the process to its owner, such as a notebook.
            if not callable(former):
                raise KeyboardInterrupt
            former(number, frame)
            return
        self.received = signal.Signals(number)
        # Not print(): a handler may interrupt another print(), and then it raises RuntimeError for
        # a reentrant call. OSError: the terminal may be closed.
        with suppress(OSError):
            os.write(
                2,
                f"{self.received.name}: saving a checkpoint and exiting; repeat to exit without"
                " saving\n".encode(),
            )

    def _outermost_handler(self, number: int) -> Any:
        """Returns the handler of the process from before all entered instances."""
        handler = self._former.get(signal.Signals(number))
        # The handler of an outer instance is a bound method of it.
        outer = getattr(handler, "__self__", None)
        if isinstance(outer, StopSignals):
            return outer._outermost_handler(number)
        return handler


@contextmanager
def waiting_to_stop() -> Iterator[None]:
    """Remembers signals of a scheduler until the run catches them itself.

    The command uses it around imports and the build. SIGINT is not caught: it may stop a run before
    the start.
    """
    # Other threads cannot install handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    remembered = [number for number in SIGNALS if number is not signal.SIGINT]
    with _exit_thread(), StopSignals(signals=remembered):
        yield


@contextmanager
def ranks_meeting(ranks: int) -> Iterator[None]:
    """Lets a signal end the command's process at once, while the ranks wait for each other.

    Nothing is trained yet, and the main thread cannot run handlers during the wait.

    Args:
        ranks: Number of ranks. One rank does not wait.
    """
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
    """Ends the process if signal `number` arrived before this wait."""
    stop = _stop_signals(number)
    if stop is not None and stop.received is not None:
        _end_at_start(stop.received)


def _stop_signals(number: int) -> StopSignals | None:
    """Returns the StopSignals instance with the handler of signal `number`, or None."""
    # The handler is a bound method, so `__self__` is its instance.
    owner = getattr(signal.getsignal(number), "__self__", None)
    if isinstance(owner, StopSignals):
        return owner
    return None


@contextmanager
def _exit_thread() -> Iterator[None]:
    """Runs a thread that can end the command's process while the main thread is blocked."""
    if not own_process:
        yield
        return
    reading, writing = os.pipe()
    # The wakeup descriptor must not block: Python writes to it inside its C signal handler.
    os.set_blocking(writing, False)
    outer = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(
        target=_exit_when_asked, args=(reading, signal.getsignal(signal.SIGINT)), daemon=True
    )
    try:
        if outer == -1:
            thread.start()
        # A thread of an outer call runs already, or another library such as asyncio uses it.
        else:
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
"""Ends the exit thread. No signal has the number 0."""


def _exit_when_asked(reading: int, interrupt: Any) -> None:
    """Ends the process at the second signal, or at the first one while the ranks meet.

    Python writes the number of each signal to a pipe at once, even if the main thread is blocked.
    Signals with a handler of another library, such as a launcher's, are ignored here.

    Args:
        reading: Read end of the pipe.
        interrupt: The command's handler of SIGINT.
    """
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
    """Ends the process during the wait for the other ranks."""
    with suppress(OSError):  # the terminal may be closed
        line = f"{number.name}: stopped while waiting for the other ranks, nothing was trained\n"
        os.write(2, line.encode())
        sys.stdout.flush()
    code = REQUEUE
    if number is signal.SIGINT:
        code = 128 + number
    # os._exit: sys.exit in this thread would not end the blocked main thread.
    os._exit(code)
