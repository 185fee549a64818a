"""Memory of selective recomputation: what a layer does not keep under model.recompute_granularity=selective, bytes of one token.

From fp8cfg/models/selective_recompute.py; letters as in report/memory/activations.py. Dropped are

    norms       all but their input, cD each, and those of queries and keys, whose input is linear_qkv's output; the inputs of
                linear_qkv and linear_fc1, cD, under sequence parallelism the gathered ones
    activation  silu(gate) cF, and linear_fc2's input cF
    attention   where it is not flash attention: scores, keys and values by head; its output, where linear_proj keeps that quantized

Inputs that are kept quantized stay: they are not quantized again.
"""

from __future__ import annotations

from typing import NamedTuple

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.report.memory.linears import LinearBytes


class Dropped(NamedTuple):
    """Bytes of a token that one layer does not keep, by the part of its backward pass that makes them again; `fc1` and `fc2` are
    the inputs of those layers among them."""

    attention: float = 0.0
    norm: float = 0.0
    fc1: float = 0.0
    activation: float = 0.0
    fc2: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.attention + self.norm + self.activation


def dropped(
    b: LinearBytes,
    qkv: PlannedLinear,
    fc1: PlannedLinear,
    fc2: PlannedLinear,
    inner: float,
    explicit: float,
) -> Dropped:
    """Of a layer of those products, that keeps `inner` bytes between those of its MLP, and `explicit` ones of attention that is
    recomputed; nothing without selective recomputation."""
    m = b.recipe.model
    if m.recompute_granularity != "selective":
        return Dropped()
    before, after = m.layernorm_placement != "post", m.layernorm_placement != "pre"
    norm = b.norm - b.c * b.d
    inputs = [discarded(b, p, b.wide) if before else 0.0 for p in (qkv, fc1)]
    second = discarded(b, fc2, b.f)
    attention = b.head_norms + explicit + before * norm + inputs[0] + 2 * after * norm
    return Dropped(
        attention, before * norm + inputs[1], inputs[1], inner - b.c * b.fc1 + second, second
    )


def discarded(b: LinearBytes, linear: PlannedLinear, width: float) -> float:
    """The input that `linear` would keep as it is, for its wgrad or for adapters of the same dtype."""
    if "wgrad" in linear.left_out:
        return (
            b.adapters(linear, width) - b.adapters(linear, 0)
            if b.adapters_keep_input(linear)
            else 0.0
        )
    return 0.0 if b.keeps_quantized(linear) else b.c * width
