"""Connection to the store of the process group, made anew where it breaks while the store is still there.

torch's is broken for good once it was closed, idle for too long or cut by the network: each later call raises DistNetworkError
(torch 2.13; ends with the torch that connects again by itself). So does each call to a store that has ended, whose port then
takes no connection: that is asked first, for torch would log each try.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

PATIENCE = 5.0
"""Seconds for which a store may take to be connected with."""


class StoreConnection:
    """Another connection to the default store, with all methods of torch's Store. They raise DistNetworkError where the store has
    ended, and DistStoreError where it is late."""

    def __init__(self) -> None:
        default: Any = distributed_c10d._get_default_store()
        self._store = default.clone()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            try:
                return getattr(self._store, name)(*given)
            except dist.DistNetworkError:
                if not _answers(self._store):
                    raise
                self._store = self._store.clone()
                return getattr(self._store, name)(*given)

        return call


def _answers(store: Any) -> bool:
    """Whether the host of `store` still takes connections for it."""
    while inner := getattr(store, "underlying_store", None):  # of a prefix
        store = inner
    try:
        socket.create_connection((store.host, store.port), PATIENCE).close()
    except (AttributeError, OSError):  # of a store without a host
        return False
    return True
