"""Memory of CUDA tensors on the fake GPU, which is the host's: CPU tensors in it, and what is in it at first."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def in_host_memory(t: Tensor) -> Tensor:
    """A CPU tensor in the memory of `t`, if that is a CUDA tensor, else `t`; not to be kept longer than `t`."""
    if not t.is_cuda:
        return t
    storage = t.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = (ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr())
    alias = torch.empty(0, dtype=t.dtype)
    alias.set_(
        torch.frombuffer(memory, dtype=torch.uint8).untyped_storage(),
        t.storage_offset(),
        t.shape,
        t.stride(),
    )
    alias = alias.conj() if t.is_conj() else alias
    return torch._neg_view(alias) if t.is_neg() else alias


def on_host(x: Any) -> Any:
    if isinstance(x, Tensor):
        return in_host_memory(x)
    if isinstance(x, torch.device):
        return torch.device("cpu") if x.type == "cuda" else x
    return None if isinstance(x, torch.Generator) else x


def nothing_in(made: Tensor) -> Tensor:
    """`made`, and in all of its memory NaN, or -1: a GPU has what was there before."""
    if made.is_cuda and made.dtype != torch.bool and made.untyped_storage().nbytes():
        ctypes.memset(made.untyped_storage().data_ptr(), 0xFF, made.untyped_storage().nbytes())
    return made


def sent(t: Tensor, device: torch.device) -> Tensor:
    there = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    in_host_memory(there).copy_(t)
    return there


@contextmanager
def seeded(leaves: list[Any]) -> Iterator[None]:
    """CPU random numbers of the state of the CUDA generator among `leaves`, else of the default one."""
    torch.cuda.init()  # type: ignore[no-untyped-call]
    given = [x for x in leaves if isinstance(x, torch.Generator) and x.device.type == "cuda"]
    state = (given or torch.cuda.default_generators)[0].get_state().numpy().tobytes()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(
            int.from_bytes(hashlib.blake2b(state, digest_size=7).digest())
        )
        yield
