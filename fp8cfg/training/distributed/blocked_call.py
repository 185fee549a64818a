"""Blocked call: what a thread waits in, read from its frames: a collective and its process group, or a line of this package."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.numerics import host_copy, waited_collective

PACKAGE = Path(__file__).parents[2]
_FILES = {distributed_c10d.__file__, _functional_collectives.__file__}
_PREFIXES = (
    "all_",
    "reduce",
    "broadcast",
    "gather",
    "scatter",
    "send",
    "recv",
    "isend",
    "irecv",
    "batch_isend_irecv",
    "barrier",
    "monitored_barrier",
)
"""How the names of public collectives in torch's _FILES begin, and those of no other functions there that wait."""
_TENSOR = f"{Path(dist.__file__).parent}/tensor/"
_DTENSOR = {
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_to_replicate_tensor": "all_gather",
}
"""What methods of a DTensor's placements do: they may wait for it in an operator of the result."""


class Collective(NamedTuple):
    """The name of a collective and its process group; None where the frames do not say."""

    name: str | None
    group: dist.ProcessGroup | None

    def __str__(self) -> str:
        return self.name or "a collective"


def raised_in(error: BaseException) -> Collective:
    """The collective that `error` comes from."""
    return _collective(reversed(list(_traced(error.__traceback__))))


def doing(frame: FrameType | None) -> str:
    """What a thread does at `frame`: the collective that it is in, or its line of this package, which says more than that of a copy
    to the host that it waits for, or of the program around it."""
    first = frame
    for each in _outward(frame):
        if name := _name(each):
            return f"the collective {name}"
        if (path := each.f_code.co_filename).startswith(
            f"{PACKAGE}/"
        ) and path != host_copy.__file__:
            return (
                f"fp8cfg/{Path(path).relative_to(PACKAGE)}:{each.f_lineno}, {each.f_code.co_name}"
            )
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}" if first else "no Python"


def _collective(frames: Iterator[FrameType]) -> Collective:
    """That of the innermost frames, up to the first of this package; `frames` go outward."""
    name: str | None = None
    group: dist.ProcessGroup | None = None
    for frame in frames:
        ours = frame.f_code.co_filename.startswith(f"{PACKAGE}/")
        name = name or _name(frame)
        group = group or _group(frame, named=name is not None)
        if ours or (name and group):
            break
    return Collective(name, group)


def _name(frame: FrameType) -> str | None:
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    if path == waited_collective.__file__:
        return getattr(frame.f_locals.get("collective"), "__name__", None)
    if path.startswith(_TENSOR):
        return _DTENSOR.get(name)
    return name if path in _FILES and name.startswith(_PREFIXES) else None


def _group(frame: FrameType, named: bool) -> dist.ProcessGroup | None:
    """The process group that a frame has as its local or its object's `group`, of which None is all ranks in a collective, or as a
    dimension of a mesh."""
    there: dict[str, Any] = frame.f_locals
    own, axis = there.get("self"), there.get("mesh_dim")
    if named and "group" in there and there["group"] is None:
        return dist.group.WORLD
    for of in (there.get("group"), getattr(own, "group", None)):
        if isinstance(of, dist.ProcessGroup):
            return of
        if isinstance(of, str) and (
            known := next(
                (g for g, name in distributed_c10d._world.pg_names.items() if name == of), None
            )
        ):
            return known
    for mesh in (there.get("mesh"), getattr(own, "device_mesh", None)):
        if isinstance(mesh, DeviceMesh) and (axis is not None or mesh.ndim == 1):
            return mesh.get_group(axis)
    return None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame:
        yield frame
        frame = frame.f_back


def _traced(at: TracebackType | None) -> Iterator[FrameType]:
    while at:
        yield at.tb_frame
        at = at.tb_next
