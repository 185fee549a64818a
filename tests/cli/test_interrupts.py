"""Ctrl-C: within an import it ends the process, elsewhere it is a KeyboardInterrupt."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fp8cfg.cli.output import ending_imports

SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
    while True: pass
except BaseException:
    pass
"""
CHILD = """
import sys
from fp8cfg import __main__
print("before")
__main__.main = lambda own_process: __import__("swallows") and print("went on")
__main__.entry()
"""


def test_a_module_that_swallows_interrupts_does_not_go_on(tmp_path: Path) -> None:
    (tmp_path / "swallows.py").write_text(SWALLOWS)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "before\n", "")


def test_elsewhere_it_is_an_interrupt_and_the_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGINT)
    with ending_imports(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler


def test_what_ignores_interrupts_goes_on_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ignores.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # nohup, or a shell's background job
    try:
        with ending_imports():
            importlib.import_module("ignores")
    finally:
        signal.signal(signal.SIGINT, before)
