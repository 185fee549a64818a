"""A signal asks, a second one insists, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8cfg.__main__ import entry, main
from fp8cfg.cli import train
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.training import loop, signals
from fp8cfg.training.signals import SIGNALS, StopSignals, waiting_to_stop
from tests.support.small import SMALL


@pytest.mark.parametrize("number", SIGNALS)
def test_sets_a_flag(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as stop:
        assert not stop.stop_requested()
        os.kill(os.getpid(), number)
        assert stop.stop_requested() and stop.received is number
    assert number.name in capfd.readouterr().err


def test_handlers_come_back() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(ZeroDivisionError), StopSignals() as stop:
        assert {signal.getsignal(number) for number in SIGNALS} == {stop._receive}
        raise ZeroDivisionError
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_handler_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignals()
    with monkeypatch.context() as patch:
        patch.setattr(
            signal, "signal", lambda *_: None
        )  # what signal.signal returns for a handler set in C
        stop.__enter__()
    before = signal.getsignal(signal.SIGINT)
    try:
        stop.__exit__()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("others", [True, False])
def test_ranks_agree(others: bool, capfd: pytest.CaptureFixture[str]) -> None:
    asked: list[bool] = []

    def agree(own: bool) -> bool:
        asked.append(own)
        return own or others

    with StopSignals(agree) as stop:
        assert stop.stop_requested() is others
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.stop_requested()
    assert asked == [False, True]


CHILD = """
import sys, time
from fp8cfg.training import signals
from fp8cfg.training.signals import StopSignals
signals.own_process = sys.argv[1] != "theirs"
with StopSignals() as stop:
    print("ready", flush=True)
    while not stop.stop_requested():
        time.sleep(0.01)
    if sys.argv[1] == "obey":
        print("asked", flush=True)
        sys.exit(75)
    try:
        print("asked", flush=True)
        time.sleep(60)
    finally:
        print("not at once", flush=True)
"""


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, None])
def test_in_a_process(first: signal.Signals, second: signal.Signals | None) -> None:
    command = [sys.executable, "-c", CHILD, "obey" if second is None else "hang"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(first)
        assert child.stdout.readline() == "asked\n"
        if second is not None:
            child.send_signal(second)
        assert child.stdout.read() == ""
        assert child.wait(30) == (75 if second is None else 128 + second)


BLOCKED = """
import ctypes
from fp8cfg.training import signals
signals.own_process = True
with signals.waiting_to_stop(), signals.StopSignals():
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    print("ready", flush=True)
    for _ in range(2):
        libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_process_that_waits_in_c(number: signal.Signals) -> None:
    """As a rank does in a collective: Python's own handlers would not run before it ends."""
    with subprocess.Popen(
        [sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        try:
            child.send_signal(number)
            while is_pending(child.pid, number):  # the kernel would make one of two such signals
                time.sleep(0.01)
            with pytest.raises(subprocess.TimeoutExpired):
                child.wait(0.5)
            child.send_signal(number)
            assert child.wait(60) == 128 + number
        finally:
            child.kill()


def is_pending(pid: int, number: signal.Signals) -> bool:
    """Whether a signal waits for the process to take it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pending,) = [line.split()[1] for line in lines if line.startswith("ShdPnd")]
    return bool(int(pending, 16) >> (number - 1) & 1)


def test_in_a_process_of_others_the_end_is_theirs() -> None:
    """What is to be done at its end is done, and it ends as a signal of the keyboard ends it."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, "theirs"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in ("ready\n", "asked\n"):
            assert child.stdout.readline() == line
            child.send_signal(signal.SIGTERM)
        assert child.stdout.read() == "not at once\n" and child.wait(30) == -signal.SIGINT


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The signals that a handler of this process got; a rank of whatever launcher, which may not be left by os._exit."""
    got: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"left with {code}"))
    before = signal.signal(signal.SIGUSR1, lambda number, _: got.append(number))
    yield got
    signal.signal(signal.SIGUSR1, before)


def test_a_second_signal_goes_to_the_handler_that_was_there(theirs: list[int]) -> None:
    with waiting_to_stop(), StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.stop_requested() and theirs == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert theirs == [signal.SIGUSR1]
        for number in (signal.SIGTERM, signal.SIGINT):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)


def test_a_command_in_a_process_of_others_returns(
    theirs: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit code, as after a key that interrupts; what it had open is closed."""

    def interrupted(*_: object, **__: object) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop, "train_step", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert (
        main([*SMALL, f"log.folder={tmp_path}/run"]) == 130
        and signal.getsignal(signal.SIGTERM) is before
    )
    RunFolder.open(tmp_path / "run").close()


def test_the_entry_of_the_command_has_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "run", lambda argv: 3 if signals.own_process else 4)
    monkeypatch.setattr(sys, "argv", ["fp8cfg", "train"])
    monkeypatch.setattr(signals, "own_process", False)  # and put back
    assert main(["train"]) == 4
    with pytest.raises(SystemExit) as e:
        entry()
    assert e.value.code == 3
