"""A rank that ends while a thread of gloo's still has a collective's tensor."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

from fp8cfg.parallel import process_group
from tests.support.ranks import ROOT

LATE = """
import itertools, sys, threading, weakref, zlib
import torch, torch.distributed as dist
from fp8cfg.parallel.process_group import wait_until_idle

started = threading.Event()

def busy():  # without Python's lock, mostly
    started.set()
    for _ in range(100) if sys.argv[1] == "waits" else itertools.count():
        zlib.compress(bytes(2_000_000))

store, groups = dist.HashStore(), {}
ranks = [threading.Thread(target=lambda r=r: groups.update({r: dist.ProcessGroupGloo(store, r, 2)})) for r in range(2)]
[rank.start() for rank in ranks], [rank.join() for rank in ranks]
sent = torch.ones(4)
weakref.finalize(sent, busy).atexit = False  # in the thread that lets go of it last
groups[0].allreduce(sent)
del sent
groups[1].allreduce(torch.ones(4)).wait()
started.wait()
print(sys.argv[1] == "waits" and wait_until_idle())
"""


def test_a_rank_that_ends_while_gloo_has_a_tensor() -> None:
    """Ends well where it waits, and else by SIGABRT, until CPython 3.14: what the wait is for."""
    waits, ends = (
        subprocess.run(
            [sys.executable, "-c", LATE, how], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        for how in ("waits", "ends")
    )
    assert (waits.stdout, waits.stderr, waits.returncode) == ("True\n", "", 0)
    if sys.version_info < (3, 14):
        assert (
            ends.returncode == -signal.SIGABRT
            and "terminate called without an active exception" in ends.stderr
        )


def test_threads_that_stay_busy_are_waited_for_no_longer_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, ended = threading.Event(), threading.Event()

    def busy() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        started.set()
        while not ended.is_set():
            zlib.compress(bytes(5_000_000))

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    try:
        assert started.wait(100) and not process_group.wait_until_idle(patience=0.1, interval=0.001)
    finally:
        ended.set()
        thread.join()
    assert process_group.wait_until_idle()
    monkeypatch.setattr(process_group, "_gloo_thread_states", lambda: None)
    assert process_group.wait_until_idle()  # where the system does not tell
