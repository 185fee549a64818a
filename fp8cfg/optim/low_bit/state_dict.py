"""State dict of a low-bit optimizer: its state by parameter name, tensors for safetensors and the rest for JSON."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn

from fp8cfg.numerics.stochastic_rounding import Strided
from fp8cfg.optim.inner_state import Names, check_names, check_tensors
from fp8cfg.optim.low_bit.columns import Columns
from fp8cfg.optim.low_bit.shards import decoded_part, first_element, local, of_shards
from fp8cfg.optim.low_bit.state import STORED

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
    parts: Mapping[nn.Parameter, Strided],
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
