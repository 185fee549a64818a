"""Compiled code of a low-bit step: a tensor at a time, or several in one launch.

A scale of a whole tensor needs two launches, for its amax comes before what is stored. On a GPU Inductor's combo kernels, which
torch's own compiled optimizers are made of too (`torch._foreach_*`), take TOGETHER tensors of any sizes in each.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch
from torch.fx.experimental import _config as shape_config

from fp8cfg.numerics.fused_quantize import TRITON

LEAST_COMPILED = 64
"""Elements below which a tensor is left to eager code: torch.compile takes sizes of 0 and 1 for constants, and a size that is also
that of `hyper` or of a key for the same one, and would compile for each anew."""
OPTIONS: dict[str, Any] = {
    "emulate_precision_casts": True,  # round where the code says so
    "eager_numerics.division_rounding": (
        True
    ),  # and as eager code does: Triton's own division is an approximation
    **dict.fromkeys(
        ("realize_reads_threshold", "realize_acc_reads_threshold", "realize_opcount_threshold"),
        1 << 20,
    ),
}
"""Inductor's options. Large thresholds: compute again rather than keep a float32 copy of a tensor."""
TOGETHER = 4
"""Tensors of one launch on a GPU. Of eight the compiler needs twice as long, and makes two kernels for want of arguments."""
Options = tuple[tuple[str, int], ...]
REDUCED: Options = (("combo_kernels", True), ("combo_kernels_autotune", 1))
"""Options of reductions of several tensors. Without Inductor's heuristics for reductions a program would take 1024 rows."""
STORED: Options = (
    ("combo_kernels", True),
    ("combo_kernels_autotune", 0),
    ("combo_kernels_pointwise_only", True),
)
"""Options of code that writes several tensors: to try it out would copy them. Reductions that are combined and not tried out would
take 1024 rows of 256 elements a program, 1024 numbers a thread: code that LLVM optimizes for minutes."""
_CONSTANTS: dict[str, tuple[Any, ...]] = {}


def compiles(device: torch.device) -> bool:
    """Whether steps on `device` are compiled, whoever asks."""
    return TRITON and device.type == "cuda"


def in_one_piece(count: int, block: int) -> bool:
    """Whether compiled code takes a tensor of `count` elements, so many of which share a scale."""
    return count >= LEAST_COMPILED and count % block == 0


def together(device: torch.device) -> int:
    """The tensors that one piece of code on `device` takes at most."""
    return TOGETHER if compiles(device) else 1


def launch_groups(kinds: Sequence[Hashable], most: int) -> Iterator[list[int]]:
    """Places in `kinds` of what is of one kind, at most so many at a time."""
    places = defaultdict[Hashable, list[int]](list)
    for place, kind in enumerate(kinds):
        places[kind].append(place)
    for found in places.values():
        yield from (found[i : i + most] for i in range(0, len(found), most))


@functools.cache
def compiled_code(
    function: Callable[..., Any], *constants: Any, more: Options = ()
) -> Callable[..., Any]:
    """`function`, whose first arguments are `constants`, such as columns of codecs, compiled; it takes the other arguments. With
    `more` options the first of these is a list of several tensors, and each length has code of its own.
    """
    if not more:
        return _compiled(function, constants, ())
    of_length = functools.cache(lambda length: _compiled(function, constants, more))

    def run_of_any_sizes(several: Sequence[Any], *args: Any) -> Any:
        # What is of one size now may be of several the next time.
        with shape_config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return of_length(len(several))(several, *args)

    return run_of_any_sizes


def _compiled(
    function: Callable[..., Any], constants: tuple[Any, ...], more: Options
) -> Callable[..., Any]:
    name = f"{function.__name__}_{len(_CONSTANTS)}"
    _CONSTANTS[name] = constants

    def run(*args: Any) -> Any:
        return function(
            *_CONSTANTS[name], *args
        )  # Dynamo takes the numbers in a global for constants, not those in a closure

    # Dynamo counts recompilations by code object and stops at eight, and these would all share one. Seen with torch 2.13, whose
    # isolate_recompiles ends it once no older torch is supported.
    run.__code__ = run.__code__.replace(co_name=name)
    return torch.compile(run, fullgraph=True, dynamic=True, options=OPTIONS | dict(more))
