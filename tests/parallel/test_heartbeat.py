"""The heartbeat of ranks, whose store is late, or whose connection breaks."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fp8cfg.parallel import heartbeat
from tests.support.missing_rank import Failing, first_of_two, until


@pytest.fixture
def two() -> Iterator[dist.TCPStore]:
    with first_of_two() as store:
        yield store


def test_a_store_that_was_late_once_does_not_end_the_heartbeat(two: dist.TCPStore) -> None:
    beats = heartbeat.Heartbeat(0.05)
    try:
        store = beats._beat_store
        beats._beat_store = failing = Failing(
            dist.DistStoreError("wait timeout after 50ms, keys: /a")
        )
        until(lambda: failing.asked > 1, "no second try")
        beats._beat_store = store
        beats._read_store.delete_key(heartbeat._key(0))
        until(lambda: beats._read_store.check([heartbeat._key(0)]), "no beat")
        beats._beat_store = Failing(dist.DistNetworkError("Broken pipe"))
        beats._thread.join(100)
        assert not beats._thread.is_alive() and not beats.ended.is_set()
    finally:
        beats.close()


def test_a_connection_that_breaks_is_made_anew_where_the_store_is_there(
    two: dist.TCPStore, capfd: pytest.CaptureFixture[str]
) -> None:
    beats, key = heartbeat.Heartbeat(0.05), heartbeat._key(0)
    try:
        until(lambda: beats._read_store.check([key]), "no beat")
        _cut(two.port)
        beats._read_store.delete_key(key)
        until(lambda: beats._read_store.check([key]), "no beat after the fault")
        assert beats._thread.is_alive() and "sendBytes failed" in capfd.readouterr().err
    finally:
        beats.close()
    ended = dist.TCPStore("127.0.0.1", 0, is_master=True)
    beats._read_store._store = dist.TCPStore("127.0.0.1", ended.port, is_master=False)
    del ended
    assert beats.describe_silent([1]) == "rank 0, which held the store, has ended"


def test_no_thread_is_in_the_store_once_the_heartbeat_is_closed(
    two: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Python ends, one that comes back from there would end the process by SIGABRT."""
    beats, entered = heartbeat.Heartbeat(0.01), threading.Event()
    monkeypatch.setattr(
        beats,
        "_beat_store",
        SimpleNamespace(
            set=lambda key, value: entered.set() or time.sleep(0.3),
            check=beats._read_store.check,
            get=beats._read_store.get,
        ),
    )
    assert entered.wait(100)
    beats.close()
    assert not beats._thread.is_alive()


def _cut(port: int) -> None:
    """Shut every connection of this process to that port."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(fd))) as one:
            if one.getpeername()[1] == port:
                one.shutdown(socket.SHUT_RDWR)
