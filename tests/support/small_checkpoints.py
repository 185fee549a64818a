"""Small checkpoints that say their step in every part, so that a mix of two saves shows; a byte of a file that changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.whole_checkpoints import load, save

GROUPS = ("model", "optimizer", "fp8")


def content(step: int) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, Any]]:
    """A state that says `step` in every group, so that a mix of two saves shows."""
    return {
        group: {"x": torch.full((64, 64), float(step)), "n": torch.tensor(step)} for group in GROUPS
    }, {"step": step}


def put(root: Path, step: int, keep: int = 2) -> Path:
    return save(root, step, *content(step), keep=keep)


def step_of(path: Path) -> int:
    """The step of a checkpoint, all of whose parts must agree on it."""
    tensors, state = load(path)
    assert set(tensors) == set(GROUPS)
    said = {state["step"]}
    for named in tensors.values():
        said |= {int(named["n"]), *named["x"].unique().int().tolist()}
    assert len(said) == 1
    return said.pop()


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
