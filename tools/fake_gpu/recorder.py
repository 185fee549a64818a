"""Recorder of what a program asks of the fake GPU: launches, copies, memsets and waits, in order, and the lines that ask.

    with record(places="CS") as found:
        step()
    found.launches, found.copies("H2D"), found.waits
    found.places     # Counter of ("S cudaStreamSynchronize", "fp8cfg/training/step.py:71")
    found.names()    # [(27, "K vectorized_elementwise_kernel<...>"), ...], the most frequent first

Count a third step: the first compiles, allocates and tunes. A place is the innermost line of fp8cfg on the stack of the thread that
asks, else the innermost line of Python, else "?", which is autograd's C++.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LAUNCHES, COPIES, MEMSETS, WAITS = "KTG", "C", "M", "S"
"""Kinds of requests, as stubs/request_log.c has them."""


@dataclass
class Requests:
    """What was asked for: the lines of the log, and who asked for those of the kinds that were observed."""

    lines: list[str] = field(default_factory=list)
    places: Counter[tuple[str, str]] = field(default_factory=Counter)

    def count(self, kinds: str) -> int:
        return sum(line[0] in kinds for line in self.lines)

    @property
    def launches(self) -> int:
        """Kernels of torch and Triton, and products of cuBLAS, each taken for one."""
        return self.count(LAUNCHES)

    @property
    def waits(self) -> int:
        return self.count(WAITS)

    def copies(self, way: str = "") -> int:
        """Of one direction: two of H (pageable host memory), P (pinned) and D (device), as in "H2D"."""
        return sum(line.startswith(f"C {way}") for line in self.lines)

    def names(self, width: int = 110) -> list[tuple[int, str]]:
        found = Counter(readable(line)[:width] for line in self.lines)
        return [(times, line) for line, times in found.most_common()]

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.lines + other.lines, self.places + other.places)


def readable(line: str) -> str:
    """A line of the log, the name of torch's kernel demangled."""
    if not line.startswith("K "):
        return line
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_char_p
    name = demangle(line[2:].encode(), None, None, None) or line[2:].encode()
    return "K " + re.sub(
        r"at::native::|^void |\(anonymous namespace\)::|std::|at::detail::", "", name.decode()
    )


def is_fake() -> bool:
    """Whether this process has the libraries of setup.sh in the place of CUDA's."""
    try:
        return hasattr(_runtime(), "fake_requests")
    except OSError:
        return False


@contextmanager
def record(places: str = "") -> Iterator[Requests]:
    """What all threads ask for in the block; `places` are the kinds of which it is noted who asked."""
    runtime, found = _runtime(), Requests()
    runtime.fake_requests.restype = ctypes.c_char_p
    observed = (ctypes.c_char * 8).in_dll(runtime, "fake_observed")
    observer = ctypes.c_void_p.in_dll(runtime, "fake_observer")
    recording = ctypes.c_int.in_dll(runtime, "fake_recording")

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)
    def note(kind: bytes, what: bytes) -> None:
        found.places[f"{kind.decode()} {what.decode()}", _place()] += 1

    observed.value = places.encode()
    observer.value = ctypes.cast(note, ctypes.c_void_p).value if places else None
    runtime.fake_clear()
    recording.value = 1
    try:
        yield found
    finally:
        recording.value, observer.value = 0, None
        found.lines = runtime.fake_requests().decode(errors="replace").splitlines()


def _runtime() -> ctypes.CDLL:
    return ctypes.CDLL("libcudart.so.13")


def _place() -> str:
    frame, innermost = sys._getframe(2), "?"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/fp8cfg/" in file:
            return f"{file[file.rindex('/fp8cfg/') + 1 :]}:{frame.f_lineno}"
        if innermost == "?" and not file.startswith("<"):
            innermost = f"{file.rpartition('site-packages/')[2]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return innermost
