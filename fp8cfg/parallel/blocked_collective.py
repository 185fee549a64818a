"""Where a rank stands: the collective on its stack, or its current line.

Reports about stalled ranks (stalled_ranks.py) and heartbeats (heartbeat.py) read Python frames. They
need no wrappers around collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import _functional_collectives, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from fp8cfg.numerics import async_copies

PACKAGE = Path(__file__).parents[1]
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
"""Prefixes of the public collectives in _FILES. Other waiting functions have other prefixes."""
_TENSOR = f"{Path(dist.__file__).parent}/tensor/"
_DTENSOR = {
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_to_replicate_tensor": "all_gather",
}
"""Collectives of DTensor placements, by method. A method may wait in an operator of its result."""


class Collective(NamedTuple):
    """A collective found on the stack.

    Attributes:
        name: Its name, None if no frame shows it.
        group: Its process group, None if no frame shows it.
    """

    name: str | None
    group: dist.ProcessGroup | None

    def __str__(self) -> str:
        return self.name or "a collective"


def find_collective(error: BaseException) -> Collective:
    """Returns the collective that raised `error`, from the frames of its traceback."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    # A traceback begins at the outermost frame.
    return _innermost_collective(reversed(frames))


def describe_activity(frame: FrameType | None) -> str:
    """Returns the current activity of a thread, as text for a report.

    Args:
        frame: The thread's innermost frame, None if it runs no Python.

    Returns:
        Its collective. Otherwise its innermost line in fp8cfg, or the innermost line
        if no frame is in fp8cfg.
    """
    if frame is None:
        return "no Python"
    for caller, line in walk_stack(frame):
        name = _collective_name(caller)
        if name:
            return f"the collective {name}"
        path = caller.f_code.co_filename
        # Every copy to the host waits in async_copies.py. The caller's line says more.
        if _is_in_package(path) and path != async_copies.__file__:
            file = Path(path).relative_to(PACKAGE)
            return f"fp8cfg/{file}:{line}, {caller.f_code.co_name}"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _innermost_collective(frames: Iterator[FrameType]) -> Collective:
    """Returns the collective of `frames`, innermost first, up to the first frame of fp8cfg."""
    name: str | None = None
    group: dist.ProcessGroup | None = None
    for frame in frames:
        name = name or _collective_name(frame)
        group = group or _process_group(frame, in_collective=name is not None)
        if (name and group) or _is_in_package(frame.f_code.co_filename):
            break
    return Collective(name, group)


def _collective_name(frame: FrameType) -> str | None:
    """Returns the collective that a frame runs, None if it runs none."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    # `run_collective` and `wait` of async_copies.py get the collective as an argument. A functional
    # collective has returned by then, so no frame has its name.
    if path == async_copies.__file__:
        return getattr(frame.f_locals.get("collective"), "__name__", None)
    if path.startswith(_TENSOR):
        return _DTENSOR.get(name)
    if path in _FILES and name.startswith(_PREFIXES):
        return name
    return None


def _process_group(frame: FrameType, in_collective: bool) -> dist.ProcessGroup | None:
    """Returns the process group that a frame uses, None if its locals don't show one.

    Args:
        frame: The frame.
        in_collective: Whether this frame or one inside it runs a collective. `group=None` then
            means all ranks.
    """
    variables: dict[str, Any] = frame.f_locals
    instance = variables.get("self")
    if in_collective and variables.get("group", ...) is None:
        return dist.group.WORLD
    for group in (variables.get("group"), getattr(instance, "group", None)):
        # Functional collectives take the name of a group.
        if isinstance(group, str):
            group = _group_with_name(group)
        if isinstance(group, dist.ProcessGroup):
            return group
    # DTensor passes a mesh and the number of one of its dimensions.
    dimension = variables.get("mesh_dim")
    for mesh in (variables.get("mesh"), getattr(instance, "device_mesh", None)):
        if isinstance(mesh, DeviceMesh) and (dimension is not None or mesh.ndim == 1):
            return mesh.get_group(dimension)
    return None


def _group_with_name(name: str) -> dist.ProcessGroup | None:
    """Returns the process group that torch knows by `name`."""
    for group, group_name in distributed_c10d._world.pg_names.items():
        if group_name == name:
            return group
    return None


def _is_in_package(path: str) -> bool:
    """Returns whether a source file belongs to fp8cfg."""
    return path.startswith(f"{PACKAGE}/")
