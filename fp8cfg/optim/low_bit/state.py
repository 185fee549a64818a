"""Optimizer state of a parameter: creation before the first step, and the flat tensors of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, Stored
from fp8cfg.optim.low_bit.adam_step import Slot
from fp8cfg.optim.low_bit.columns import Columns

STORED = ("master", "weight", "exp_avg", "exp_avg_sq")
"""What is stored for a parameter: the first two where there is a master, and where the parameter is not the weight itself."""


def check_parameter(
    name: str, p: nn.Parameter, columns: Columns, kept_apart: bool, written: bool
) -> None:
    """Raise ValueError for a parameter that cannot be optimized. `kept_apart`: its bits mean something only with a scale that is
    stored elsewhere; `written`: it is stored from a master.
    """
    if written and columns.master is None:
        raise ValueError(f"{name} is written from a master; its columns have none")
    if not kept_apart and p.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"{name} is {p.dtype}; parameters are float32, bfloat16 or float16")
    if not p.is_contiguous():
        raise ValueError(
            f"{name} is not contiguous; it is stepped through in the order of its memory"
        )


def is_stored(p: Tensor, weight: Codec) -> bool:
    """Whether the parameter is the stored weight itself."""
    return weight.scaling == "none" and weight.format.dtype == p.dtype


def fresh_state(
    p: Tensor, c: Columns, value: Tensor, key: Tensor, weight: Stored | None
) -> dict[str, Any]:
    """The state of `p` before its first step, from `value`, of any float dtype; what rounding changes is written to `p`, or to
    `weight` where that is given: the tensors it is held in, none where it is left as it is."""
    state: dict[str, Any] = {"step": 0}
    if c.master is not None:
        state["master"] = c.master.zeros(p.shape, p.device)
        c.master.store(value, state["master"], key)
        value = c.master.decode(state["master"])
    if weight is None and is_stored(p, c.weight):
        weight = (p.detach(),)
    if weight:
        c.weight.store(value, weight, key)
    elif weight is None:
        state["weight"] = c.weight.zeros(p.shape, p.device)
        c.weight.store(value, state["weight"], key)
        p.copy_(c.weight.decode(state["weight"]))
    return {
        **state,
        **{m: getattr(c, m).zeros(p.shape, p.device) for m in ("exp_avg", "exp_avg_sq")},
    }


def slot_of(
    p: Tensor, state: dict[str, Any], grad: Stored, held: Stored | None, written: bool
) -> Slot:
    """The tensors that a step reads and writes, flat."""
    weight, master = _flat(held or state.get("weight") or (p.detach(),)), state.get("master")
    source, weight_of_master = (
        (weight, None) if master is None else (_flat(master), None if written else weight)
    )
    copy = p.detach().view(-1) if "weight" in state else None
    moments = _flat(state["exp_avg"]), _flat(state["exp_avg_sq"])
    return Slot(source, weight_of_master, *moments, copy, _flat((grad[0].contiguous(), *grad[1:])))


def _flat(stored: Stored) -> Stored:
    return (stored[0].view(-1), *stored[1:])
