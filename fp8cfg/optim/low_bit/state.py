"""Optimizer state of a parameter: creation before the first step, and the flat tensors of a step."""

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
    p: Tensor, c: Columns, value: Tensor, key: Tensor, weight: EncodedTensor | None
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
    p: Tensor, state: dict[str, Any], grad: EncodedTensor, held: EncodedTensor | None, written: bool
) -> Slot:
    """The tensors that a step reads and writes, flat."""
    weight, master = _flat(held or state.get("weight") or (p.detach(),)), state.get("master")
    source, weight_of_master = (
        (weight, None) if master is None else (_flat(master), None if written else weight)
    )
    copy = p.detach().view(-1) if "weight" in state else None
    moments = _flat(state["exp_avg"]), _flat(state["exp_avg_sq"])
    return Slot(source, weight_of_master, *moments, copy, _flat((grad[0].contiguous(), *grad[1:])))


def _flat(stored: EncodedTensor) -> EncodedTensor:
    return (stored[0].view(-1), *stored[1:])


State = Mapping[Any, dict[str, Any]]


def collect_tensors(names: Names, state: State) -> dict[str, Tensor]:
    """Data as `<name>.exp_avg`, inverse scales as `<name>.exp_avg.scale_inv`, and so on: the tensors themselves, no copies, of a
    shard as parts of the whole."""
    return {
        f"{name}.{column}{suffix}": of_shards(tensor, p, data=not suffix)
        for p, name in names.items()
        for column in STORED
        for suffix, tensor in zip(("", ".scale_inv"), state[p].get(column, ()), strict=False)
    }


def collect_json(names: Names, state: State) -> dict[str, Any]:
    """The step count and the codecs of each parameter."""
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
    """Saved state with the moments of a parameter in this layout's codec, where one layout has them in blocks and the other in
    float32, since its shards would cut these; `columns` are those of tensors here, of whole ones too, `mine` is this optimizer's
    own JSON, and `parts` are parameters that are parts of tensors. A float32 weight is called its own master, or a float32 master
    the weight, as here. Other differences are left."""
    tensors, entries = (
        dict(tensors),
        {name: {**entry, "codecs": {**entry["codecs"]}} for name, entry in json["state"].items()},
    )
    for name in entries.keys() & mine.keys():
        there, here = (each[name]["codecs"].get("master") for each in (entries, mine))
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
    """Copy in what `collect_tensors` and `collect_json` gave; working copies of stored weights are rewritten."""
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
    """Raise ValueError where saved state, `tensors` and `json`, does not fit an optimizer whose own is `like` and `mine`."""
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
    return ", ".join(f"{column} {codec}" for column, codec in codecs.items())
