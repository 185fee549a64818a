"""A rank whose peer never comes: a process group of two of which this process is one, and stores that fail."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401 - the backend "fake"


class Failing:
    """A store of which every call fails."""

    def __init__(self, error: RuntimeError) -> None:
        self.error, self.asked = error, 0

    def check(self, *_: Any) -> NoReturn:
        self.asked += 1
        raise self.error

    set = check


@contextmanager
def first_of_two() -> Iterator[dist.TCPStore]:
    """The store of a process group of which this process is the first of two ranks, and the other one is none."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        yield store
    finally:
        dist.destroy_process_group()


def failed(call: Callable[[], Any]) -> RuntimeError:
    with pytest.raises(RuntimeError) as e:
        call()
    return e.value


def until(done: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 100
    while not done():
        assert time.monotonic() < end, what
        time.sleep(0.1)
