"""Tensor file: a group of tensors as one safetensors file, with tensors that share memory stored once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fp8cfg.training.checkpoint.manifest import PLAIN


def refuse_unstorable(group: str, named: Mapping[str, Tensor]) -> None:
    """Raise ValueError or TypeError for a group that cannot come back as it is."""
    if "/" in group or not PLAIN.fullmatch(group):
        raise ValueError(f"group {group!r} cannot be the name of a file")
    if "__metadata__" in named:
        raise ValueError(f"{group}: safetensors keeps the name __metadata__ for itself")
    for name, tensor in named.items():
        # A wrapper subclass (DTensor, a quantized weight) has no memory of its own and would be stored as no bytes.
        if (
            type(tensor) not in (Tensor, torch.nn.Parameter)
            or tensor.layout != torch.strided
            or tensor.is_meta
        ):
            raise TypeError(
                f"{group}: {name}: only plain dense tensors can be stored, not"
                f" {type(tensor).__name__}"
            )
        if tensor.dtype == torch.complex128 or tensor.is_quantized:
            raise TypeError(f"{group}: {name}: safetensors does not store {tensor.dtype}")


def write(file: Path, named: Mapping[str, Tensor]) -> None:
    """Write `named` to `file`. Tensors that are one and the same are stored once. Raises OSError where the file cannot be read
    back."""
    stored, aliases = _packed(named)
    # The note that safetensors' own save_model leaves for names it drops: dropped name to kept name. None and not an
    # empty dict: with one, safetensors 0.8 writes a header it cannot read where there is no tensor either.
    save_file(stored, file, metadata=aliases or None)
    # The manifest proves that a file stays as it was written; this, that what was written can be read.
    with safe_open(file, framework="pt") as opened:
        if set(opened.keys()) != stored.keys():
            raise OSError(f"{file} was not written as asked")


def distinct(named: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors of a group that are stored, each once."""
    return list({view_of(t) if t.numel() else (name,): t for name, t in named.items()}.values())


def _packed(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What safetensors accepts of a group, contiguous and without shared memory, and its aliases: name to stored name."""
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for name, tensor in named.items():
        view = view_of(tensor)
        if tensor.numel() and first.setdefault(view, name) != name:
            aliases[name] = first[view]
            continue
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        areas = taken[tensor.untyped_storage().data_ptr()]
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        if any(start < other_stop and other_start < stop for other_start, other_stop in areas):
            tensor = tensor.clone()
        areas.append((start, stop))
        stored[name] = tensor
    return stored, aliases


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors that are one and the same have in common."""
    return (
        tensor.data_ptr(),
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )
