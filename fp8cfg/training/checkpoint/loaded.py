"""Loaded checkpoint: its JSON state and its tensors, which are read when they are asked for, after their sums were checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fp8cfg.training.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    NoUsableCheckpoint,
    check_sums,
    sum_of,
)
from fp8cfg.training.checkpoint.saved_tensors import groups
from fp8cfg.training.distributed.world import World
from fp8cfg.training.folder_descriptor import StrangeFile
from fp8cfg.training.run_files import RunFiles

Tensors = Mapping[str, Mapping[str, Tensor]]
"""Tensors by group and name."""
STATE, RNG = "state.json", "rng"
ALSO = "also"
"""Of the state of a checkpoint by several ranks: other names of tensors, by group."""
MAX_STATE = 1 << 30


class LoadedTensors(dict[str, Mapping[str, Tensor]]):
    """The groups of tensors of a checkpoint. Sums of `unchecked` files are still to be compared with the manifest."""

    def __init__(
        self,
        folder: RunFiles,
        manifest: Manifest,
        unchecked: list[str],
        also: Mapping[str, dict[str, str]],
    ) -> None:
        found = groups(folder, also)
        super().__init__(
            {name: tensors.whole() if name == RNG else tensors for name, tensors in found.items()}
        )
        self._folder, self._manifest, self._unchecked = folder, manifest, unchecked

    def check_sums(self, world: World) -> None:
        """Compare the sums of the files that are not checked, each by one of the ranks, all of which call it. Raises
        DamagedCheckpoint on all of them."""
        problem = ""
        try:
            check_sums(self._folder, self._manifest, self._unchecked[world.rank :: world.size])
        except DamagedCheckpoint as e:
            problem = str(e)
        said = [text for text in world.texts(problem) if text.strip()]
        if said:
            raise DamagedCheckpoint(said[0])
        self._unchecked = []


def read(
    folder: RunFiles, manifest: Manifest, unchecked: list[str]
) -> tuple[LoadedTensors, dict[str, Any]]:
    """The tensors and the state of the checkpoint in `folder`. Raises DamagedCheckpoint, naming the file."""
    try:
        state = json.loads(folder.read(STATE, MAX_STATE), parse_constant=_refuse_constant)
    except (OSError, ValueError, RecursionError, StrangeFile) as error:
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise DamagedCheckpoint(f"{folder.path}: {STATE}: not a JSON object")
    if not _names(also := state.get(ALSO, {})):
        raise DamagedCheckpoint(
            f"{folder.path}: {STATE}: {ALSO} must map groups to names of tensors"
        )
    return LoadedTensors(folder, manifest, unchecked, also), state


def refuse_unlike(state: Mapping[str, Any] | None, world: World) -> None:
    """Raise NoUsableCheckpoint on all ranks, which all call it, unless they go on from one checkpoint, whose `state` each has read
    by itself; None is the start. A rank that passed over the newest, or sees another file system, would train another model.
    """
    if world.size == 1:
        return
    own = (
        "the start" if state is None else f"step {state['step']}",
        state and sum_of(json.dumps(state, sort_keys=True).encode()),
    )
    found = [json.loads(text) for text in world.texts(json.dumps(own))]
    for rank, each in enumerate(found):
        if each != found[0]:
            raise NoUsableCheckpoint(
                f"rank 0 would go on from {found[0][0]} and rank {rank} from {each[0]} of another"
                " checkpoint; all must read one run folder, on a file system that they share"
            )


def _names(also: Any) -> bool:
    return isinstance(also, dict) and all(
        isinstance(named, dict) and all(isinstance(name, str) for name in named.values())
        for named in also.values()
    )


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
