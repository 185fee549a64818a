"""RNG state of python, numpy and torch, as tensors and plain JSON values.

A generator's bulk (625 words of python's Mersenne Twister, numpy's key, torch's own blob) is a uint8 tensor; the few numbers
beside it are JSON, whose floats come back bit for bit. Sources: random.getstate, numpy.random.get_state,
torch.get_rng_state, torch.cuda.get_rng_state.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The states of python's `random`, numpy's global generator, torch on the CPU and on each CUDA device.

    Returns uint8 tensors on the CPU by name, and what belongs to them and is JSON. Generators that somebody made (a
    torch.Generator, a numpy Generator) are not among them.
    """
    version, words, gauss = random.getstate()
    drawn: dict[str, Any] = np.random.get_state(legacy=False)
    inner = dict(drawn["state"])
    tensors = {"python": _bytes(np.array(words, dtype=np.uint32)), "torch": torch.get_rng_state()}
    if "key" in inner:  # MT19937; the other bit generators have a few integers and no key
        tensors["numpy"] = _bytes(inner.pop("key"))
    for device in range(torch.cuda.device_count()):
        tensors[f"cuda.{device}"] = torch.cuda.get_rng_state(device)
    state = {"python": {"version": version, "gauss": gauss}, "numpy": {**drawn, "state": inner}}
    return tensors, state


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> list[str]:
    """Put back what capture() returned; the next draws are then the same bit for bit.

    Returns what had no place to go: CUDA devices that this machine lacks, or has and the capture lacks, by name. Raises
    KeyError, ValueError, TypeError or RuntimeError where the parts do not belong together.
    """
    random.setstate(_python(tensors, state))
    np.random.set_state(_numpy(tensors, state))
    torch.set_rng_state(tensors["torch"].cpu())
    there = {name for name in tensors if name.startswith("cuda.")}
    here = {f"cuda.{device}" for device in range(torch.cuda.device_count())}
    for name in there & here:
        torch.cuda.set_rng_state(tensors[name].cpu(), int(name.removeprefix("cuda.")))
    return sorted(there ^ here)


def check(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Raise as restore() would, and change nothing."""
    random.Random().setstate(_python(tensors, state))
    np.random.RandomState().set_state(_numpy(tensors, state))
    torch.Generator().set_state(tensors["torch"].cpu())


def _python(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> tuple[Any, ...]:
    python = state["python"]
    return python["version"], tuple(_words(tensors["python"]).tolist()), python["gauss"]


def _numpy(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, Any]:
    drawn = {**state["numpy"], "state": dict(state["numpy"]["state"])}
    if "numpy" in tensors:
        drawn["state"]["key"] = _words(tensors["numpy"])
    return drawn


def _bytes(words: np.ndarray) -> Tensor:
    return torch.frombuffer(bytearray(words.astype("<u4").tobytes()), dtype=torch.uint8)


def _words(tensor: Tensor) -> np.ndarray:
    return np.frombuffer(tensor.cpu().numpy().tobytes(), dtype="<u4").astype(np.uint32)
