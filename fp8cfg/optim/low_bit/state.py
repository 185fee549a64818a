"""State of a parameter in a low-bit optimizer: creation, saving and loading."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.codecs import Codec, EncodedTensor
from fp8cfg.numerics.formats import StridedStart
from fp8cfg.optim.low_bit.adam_update import Slot
from fp8cfg.optim.low_bit.columns import Columns, decoded_part, first_element, local, of_shards
from fp8cfg.optim.state_dict import Names, check_names, check_tensors

STORED = ("master", "weight", "exp_avg", "exp_avg_sq")
"""Tensors in the state of a parameter.

A master is optional. `weight` is missing if the parameter itself is the stored weight.
"""


def check_parameter(
    name: str, p: nn.Parameter, columns: Columns, kept_apart: bool, written: bool
) -> None:
    """Checks that a parameter can be optimized.

    Args:
        name: Its name.
        p: The parameter.
        columns: Its columns.
        kept_apart: Whether its bits need a scale that is stored elsewhere.
        written: Whether it is written from a master.

    Raises:
        ValueError: Its dtype, memory layout or columns do not fit.
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
    """Whether the parameter itself is the stored weight."""
    return weight.scaling == "none" and weight.format.dtype == p.dtype


def fresh_state(
    p: Tensor, c: Columns, value: Tensor, key: Tensor, weight: EncodedTensor | None
) -> dict[str, Any]:
    """Creates the state of a parameter before its first step.

    The rounded value is written to `p` or `weight`.

    Args:
        p: The parameter.
        c: Its columns.
        value: Its value before rounding, any float dtype.
        key: Random key for stochastic rounding.
        weight: Tensors that store the weight outside of the state. () does not write them.
    """
    state: dict[str, Any] = {"step": 0}
    if c.master is not None:
        state["master"] = c.master.zeros(p.shape, p.device)
        c.master.store(value, state["master"], key)
        # The weight is rounded from the stored master, as in each later step.
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
    p: Tensor, state: dict[str, Any], grad: EncodedTensor, held: EncodedTensor | None, written: bool
) -> Slot:
    """Returns the flat tensors that a step reads and writes.

    Args:
        p: This rank's tensor of the parameter.
        state: Its state.
        grad: Its gradient.
        held: Tensors that store the weight outside of the state, or None.
        written: Whether a writer stores the weight from the master.
    """
    weight, master = _flat(held or state.get("weight") or (p.detach(),)), state.get("master")
    source, weight_of_master = (
        (weight, None) if master is None else (_flat(master), None if written else weight)
    )
    copy = p.detach().view(-1) if "weight" in state else None
    moments = _flat(state["exp_avg"]), _flat(state["exp_avg_sq"])
    return Slot(source, weight_of_master, *moments, copy, _flat((grad[0].contiguous(), *grad[1:])))


def _flat(stored: EncodedTensor) -> EncodedTensor:
    """Returns stored data as a flat view."""
    return (stored[0].view(-1), *stored[1:])


State = Mapping[Any, dict[str, Any]]


def collect_tensors(names: Names, state: State) -> dict[str, Tensor]:
    """Returns data as `<name>.exp_avg`, inverse scales as `<name>.exp_avg.scale_inv`, and so on.

    These are no copies. Shards are DTensors.
    """
    return {
        f"{name}.{column}{suffix}": of_shards(tensor, p, data=not suffix)
        for p, name in names.items()
        for column in STORED
        for suffix, tensor in zip(("", ".scale_inv"), state[p].get(column, ()), strict=False)
    }


def collect_json(names: Names, state: State) -> dict[str, Any]:
    """Returns the step count and the codecs of each parameter."""
    return {name: {key: state[p][key] for key in ("step", "codecs")} for p, name in names.items()}


def recoded(
    names: Names,
    columns: Collection[Columns],
    tensors: Mapping[str, Tensor],
    json: Mapping[str, Any],
    mine: Mapping[str, Any],
    key: Callable[[nn.Parameter, str], Tensor],
    parts: Mapping[nn.Parameter, StridedStart],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Converts saved state to the codecs of this layout.

    One layout may have blockwise moments where another has float32, because its shards would split
    blocks. A float32 weight and a float32 master are renamed to each other. Other differences stay.

    Args:
        names: Names of the parameters.
        columns: Columns of this optimizer, and of full tensors.
        tensors: Saved tensors.
        json: Saved JSON.
        mine: JSON entries of this optimizer.
        key: Returns the random key of a parameter.
        parts: Positions of parameters that tensor parallelism splits.

    Returns:
        The converted tensors and JSON.
    """
    tensors, entries = (
        dict(tensors),
        {name: {**entry, "codecs": {**entry["codecs"]}} for name, entry in json["state"].items()},
    )
    for name in entries.keys() & mine.keys():
        there, here = (each[name]["codecs"].get("master") for each in (entries, mine))
        # Under FSDP2 a float32 parameter is its own master, so one side has no entry.
        if {there, here} == {None, "fp32"}:
            entries[name]["codecs"] = {**entries[name]["codecs"], "master": "fp32"}
            if here is None:
                del entries[name]["codecs"]["master"]
    for column in ("exp_avg", "exp_avg_sq"):
        codecs = {str(codec): codec for each in columns if (codec := getattr(each, column)).block}
        for p, name in names.items():
            if name not in entries or name not in mine:
                continue
            there, here = entries[name]["codecs"].get(column), mine[name]["codecs"][column]
            data, scales = f"{name}.{column}", f"{name}.{column}.scale_inv"
            if there in codecs and here == "fp32":
                first = first_element(p, parts.get(p))
                tensors[data] = of_shards(
                    decoded_part(codecs[there], local(tensors[data]), tensors.pop(scales), first),
                    p,
                    data=True,
                )
            elif there == "fp32" and here in codecs:
                made = codecs[here].encode(local(tensors[data]).float(), key(p, column))
                tensors[data], tensors[scales] = (of_shards(t, p, data=t is made[0]) for t in made)
            else:
                continue
            entries[name]["codecs"][column] = here
    return tensors, {**json, "state": entries}


def restore(
    names: Names,
    state: State,
    columns: Mapping[nn.Parameter, Columns],
    tensors: Mapping[str, Tensor],
    json: Mapping[str, Any],
) -> None:
    """Copies saved state into the optimizer.

    Parameters that are copies of a stored weight are written again.
    """
    for name, tensor in collect_tensors(names, state).items():
        local(tensor).copy_(local(tensors[name]))
    for p, name in names.items():
        state[p]["step"] = int(json[name]["step"])
        if "weight" in state[p]:
            p.copy_(columns[p].weight.decode(state[p]["weight"]))


def check_state(
    tensors: Mapping[str, Tensor],
    like: Mapping[str, Tensor],
    json: Mapping[str, Any],
    mine: Mapping[str, Any],
) -> None:
    """Raises ValueError if saved state does not fit an optimizer.

    Args:
        tensors: Saved tensors.
        like: Tensors of the optimizer.
        json: Saved JSON.
        mine: JSON of the optimizer.
    """
    if json.keys() != mine.keys():
        raise ValueError(f"optimizer state: the JSON has {sorted(json)}, expected {sorted(mine)}")
    if json["optimizer"] != mine["optimizer"]:
        raise ValueError(
            f"the saved state is of {json['optimizer']}, this optimizer is {mine['optimizer']}"
        )
    check_names("parameters", json["state"].keys(), mine["state"].keys())
    for name, expected in mine["state"].items():
        saved = json["state"][name]["codecs"]
        if saved != expected["codecs"]:
            raise ValueError(
                f"optimizer state: {name} is stored as {_said(saved)}, expected"
                f" {_said(expected['codecs'])}"
            )
    check_tensors(tensors, like)


def _said(codecs: Mapping[str, str]) -> str:
    """Formats codecs for messages."""
    return ", ".join(f"{column} {codec}" for column, codec in codecs.items())
