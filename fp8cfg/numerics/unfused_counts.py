"""Counts of overflowed values of tensors that plain operations quantize: on a CPU, and where a GPU emulates products.

A tensor is read once more where its amax says that some of it did not fit, and not else. On a CPU, where nothing waits, the host
asks; on a GPU each program of a kernel does, so that a tensor that fits takes a launch and no read. A compiler gets one operator
for both: a sum beside the amax would make quantizing every tensor take longer, and a graph does not know, as the operator does when
it runs, whether a backward pass computes it again.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from fp8cfg.numerics.formats import Format
from fp8cfg.numerics.fused_quantize import TRITON
from fp8cfg.numerics.overflowed_values import TAGS, counter


def count_values(t: Tensor, role: int, amax: Tensor, scale: Tensor | None, fmt: Format) -> None:
    """Count what of `t`, any shape and float dtype, does not fit into `fmt` under `scale`, float32 [], or is infinite. No value of
    `t` is larger than `amax`, float32 [], in which a layer recorded it. Without a `scale` finite values fit. No kernel quantizes
    `t`, which would count it too."""
    if t.is_cuda or torch.compiler.is_compiling():
        count_overflow(t, amax, scale, role, fmt.reach)
    elif t.device.type == "cpu":
        _read_again(t, amax, scale, role, fmt.reach)


@library.custom_op("fp8cfg::count_overflow", mutates_args=("amax",), tags=TAGS)
def count_overflow(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    """`count_values` on a GPU, and to a compiler. The `amax` is not written: that it might be keeps the call in a graph, behind
    what records the amax, and apart from those of other layers that read `t`."""
    if not t.is_cuda:
        _read_again(t, amax, scale, role, reach)
    elif TRITON and t.numel():
        from fp8cfg.numerics import triton_kernels

        densest_last = sorted(
            range(t.dim()), key=t.stride, reverse=True
        )  # elements are counted in any order
        triton_kernels.count(
            t.permute(densest_last).contiguous(), amax, scale, counter(t.device, role), reach
        )


def _read_again(t: Tensor, amax: Tensor, scale: Tensor | None, role: int, reach: float) -> None:
    most = amax.item()
    if most < torch.inf and (scale is None or most * scale.item() <= reach):
        return
    a = t.detach().abs()
    infinite = (a == torch.inf).sum()
    beyond = infinite if scale is None else (a.float() * scale > reach).sum()
    counter(t.device, role)[:2] += torch.stack([beyond - infinite, infinite])
