"""A signal asks, a second one insists, and the handlers that were there come back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from fp8cfg.training.signals import SIGNALS, StopSignals


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
        patch.setattr(signal, "signal", lambda *_: None)  # what signal.signal returns for a handler set in C
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
from fp8cfg.training.signals import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while not stop.stop_requested():
        time.sleep(0.01)
    print("asked", flush=True)
    if sys.argv[1] == "obey":
        sys.exit(75)
    try:
        time.sleep(60)
    finally:
        print("not at once", flush=True)
"""


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT, None])
def test_in_a_process(first: signal.Signals, second: signal.Signals | None) -> None:
    command = [sys.executable, "-c", CHILD, "obey" if second is None else "hang"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(first)
        assert child.stdout.readline() == "asked\n"
        if second is not None:
            child.send_signal(second)
        assert child.stdout.read() == ""
        assert child.wait(30) == (75 if second is None else 128 + second)
