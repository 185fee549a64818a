"""Loaded checkpoint: its JSON state and its tensors, which are read when they are asked for, after their sums were checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8cfg.training.checkpoint.manifest import DamagedCheckpoint, Manifest, check_sums
from fp8cfg.training.checkpoint.saved_tensors import groups
from fp8cfg.training.distributed.world import World
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name."""
STATE, RNG = "state.json", "rng"
MAX_STATE = 1 << 30


class LoadedTensors(dict[str, Mapping[str, Tensor]]):
    """The groups of tensors of a checkpoint. Sums of `unchecked` files are still to be compared with the manifest."""

    def __init__(self, folder: RunFiles, manifest: Manifest, unchecked: list[str]) -> None:
        found = groups(folder)
        super().__init__({name: tensors.whole() if name == RNG else tensors for name, tensors in found.items()})
        self._folder, self._manifest, self._unchecked = folder, manifest, unchecked

    def check_sums(self, world: World) -> None:
        """Compare the sums of the files that are not checked, each by one of the ranks, all of which call it. Raises
        DamagedCheckpoint on all of them."""
        problem = ""
        try:
            check_sums(self._folder, self._manifest, self._unchecked[world.rank::world.size])
        except DamagedCheckpoint as e:
            problem = str(e)
        said = [text for text in world.texts(problem) if text.strip()]
        if said:
            raise DamagedCheckpoint(said[0])
        self._unchecked = []


def read(folder: RunFiles, manifest: Manifest, unchecked: list[str]) -> tuple[LoadedTensors, dict[str, Any]]:
    """The tensors and the state of the checkpoint in `folder`. Raises DamagedCheckpoint, naming the file."""
    try:
        state = json.loads(folder.read(STATE, MAX_STATE), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: not a JSON object")
    return LoadedTensors(folder, manifest, unchecked), state


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
