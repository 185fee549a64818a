"""Ctrl-C while modules are imported. Python code that native libraries (torch, numpy, pydantic's) call as they load swallows a
KeyboardInterrupt, or makes another error of it, and leaves modules half imported. Nothing is at work then: the process may end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

_IMPORT = "<frozen importlib._bootstrap>"


@contextmanager
def ending_imports() -> Iterator[None]:
    """In a process of one's own SIGINT ends it, with 130, where it comes within an import, and is a KeyboardInterrupt elsewhere. A
    handler of others, or that it is ignored, stays."""
    former = signal.getsignal(signal.SIGINT)
    if (
        former is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, _interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _interrupted(number: int, frame: FrameType | None) -> NoReturn:
    while frame is not None and frame.f_code.co_filename != _IMPORT:
        frame = frame.f_back
    if frame is None:
        raise KeyboardInterrupt
    with suppress(Exception):  # no reader, or this came amid a print()
        sys.stdout.flush()
    os._exit(128 + number)
