"""Where a rank stands: the collective on its stack, or its current line.

Reports about stalled ranks (stalled_ranks.py) and heartbeats (heartbeat.py) read Python frames. They
need no wrappers around collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
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


def raised_in(error: BaseException) -> Collective:
    """Returns the collective that raised `error`, from the frames of its traceback."""
    # A traceback begins at the outermost frame.
    return _collective(reversed(list(_traced(error.__traceback__))))


def doing(frame: FrameType | None) -> str:
    """Returns the current activity of a thread, as text for a report.

    Args:
        frame: The thread's innermost frame, None if it runs no Python.

    Returns:
        Its collective. Otherwise its innermost line in fp8cfg, or the innermost line
        if no frame is in fp8cfg.
    """
    first = frame
    for each in _outward(frame):
        if name := _name(each):
            return f"the collective {name}"
        # Every copy to the host waits in async_copies.py. The caller's line says more.
        if (path := each.f_code.co_filename).startswith(
            f"{PACKAGE}/"
        ) and path != async_copies.__file__:
            return (
                f"fp8cfg/{Path(path).relative_to(PACKAGE)}:{each.f_lineno}, {each.f_code.co_name}"
            )
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}" if first else "no Python"


def _collective(frames: Iterator[FrameType]) -> Collective:
    """Returns the collective of `frames`, innermost first, up to the first frame of fp8cfg."""
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
    """Returns the collective that a frame runs, None if it runs none."""
    path, name = frame.f_code.co_filename, frame.f_code.co_name
    # `waited` and `wait` of async_copies.py get the collective as an argument. A functional
    # collective has returned by then, so no frame has its name.
    if path == async_copies.__file__:
        return getattr(frame.f_locals.get("collective"), "__name__", None)
    if path.startswith(_TENSOR):
        return _DTENSOR.get(name)
    return name if path in _FILES and name.startswith(_PREFIXES) else None


def _group(frame: FrameType, named: bool) -> dist.ProcessGroup | None:
    """Returns the process group that a frame uses, None if its locals don't show one.

    Args:
        frame: The frame.
        named: Whether this frame or one inside it runs a collective. `group=None` then means all
            ranks.
    """
    there: dict[str, Any] = frame.f_locals
    own, axis = there.get("self"), there.get("mesh_dim")
    if named and "group" in there and there["group"] is None:
        return dist.group.WORLD
    for of in (there.get("group"), getattr(own, "group", None)):
        if isinstance(of, dist.ProcessGroup):
            return of
        # Functional collectives take the name of a group.
        if isinstance(of, str) and (
            known := next(
                (g for g, name in distributed_c10d._world.pg_names.items() if name == of), None
            )
        ):
            return known
    # DTensor passes a mesh and the number of one of its dimensions.
    for mesh in (there.get("mesh"), getattr(own, "device_mesh", None)):
        if isinstance(mesh, DeviceMesh) and (axis is not None or mesh.ndim == 1):
            return mesh.get_group(axis)
    return None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields `frame` and its callers."""
    while frame:
        yield frame
        frame = frame.f_back


def _traced(at: TracebackType | None) -> Iterator[FrameType]:
    """Yields the frames of a traceback, outermost first."""
    while at:
        yield at.tb_frame
        at = at.tb_next
