"""State dict of an inner optimizer by parameter name: tensors for safetensors, the rest for JSON.

`names` are the parameters' names and `masters` what the inner optimizer moves in their place; a parameter may be its
own master. Step counts are JSON: torch keeps one 0-d tensor for each parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

Names = Mapping[nn.Parameter, str]
Masters = Mapping[nn.Parameter, Tensor]


def collect_tensors(
    names: Names, masters: Masters, inner: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """Masters and moments as `<name>.master`, `<name>.exp_avg`, ...: the tensors themselves, not copies."""
    found = _separate_masters(names, masters)
    for p, master in masters.items():
        for key in _tensor_keys(inner, master):
            found[f"{names[p]}.{key}"] = inner.state[master][key]
    return found


def collect_json(names: Names, masters: Masters, inner: torch.optim.Optimizer) -> dict[str, Any]:
    """The inner optimizer's class, and for each parameter its step count and which tensors belong to it."""
    state: dict[str, dict[str, Any]] = {}
    for p, master in masters.items():
        state[names[p]] = {"tensors": _tensor_keys(inner, master)}
        if "step" in inner.state.get(master, {}):
            state[names[p]]["step"] = int(inner.state[master]["step"])
    return {"optimizer": type(inner).__name__, "state": state}


def restore(
    names: Names,
    masters: Masters,
    inner: torch.optim.Optimizer,
    tensors: Mapping[str, Tensor],
    json: Mapping[str, Any],
) -> None:
    """Copy collected state into `masters`, which may be those of some of `names`, and `inner`. Raises ValueError before anything is
    changed."""
    if json["optimizer"] != type(inner).__name__:
        raise ValueError(
            f"the saved state is of {json['optimizer']}, this optimizer is {type(inner).__name__}"
        )
    named = {names[p]: master for p, master in masters.items()}
    check_names("parameters", json["state"].keys(), set(names.values()))
    saved = {name: entry for name, entry in json["state"].items() if name in named}
    elsewhere = {f"{name}." for name in json["state"].keys() - named.keys()}
    tensors = {
        k: t for k, t in tensors.items() if not any(k.startswith(prefix) for prefix in elsewhere)
    }
    separate = _separate_masters(names, masters)
    moments = {
        f"{name}.{key}": named[name] for name, entry in saved.items() for key in entry["tensors"]
    }
    check_tensors(tensors, {**separate, **moments})

    for name, master in separate.items():
        master.copy_(tensors[name])
    inner.state.clear()
    for name, master in named.items():
        state = {
            key: tensors[f"{name}.{key}"].to(master.device, copy=True)
            for key in saved[name]["tensors"]
        }
        if "step" in saved[name]:
            state["step"] = _step_tensor(inner, master, saved[name]["step"])
        if state:
            inner.state[master] = state


def moments(inner: torch.optim.Optimizer) -> list[str]:
    """The tensors that `inner`, torch's SGD, Adam or AdamW, keeps of a parameter that it has stepped."""
    if isinstance(inner, torch.optim.SGD):
        return ["momentum_buffer"] if inner.defaults["momentum"] else []
    return ["exp_avg", "exp_avg_sq"]


def stepped(inner: torch.optim.Optimizer, count: int) -> dict[str, Any]:
    """The entry of `collect_json` for a parameter that `inner` has stepped so often, on whatever rank."""
    if not count:
        return {"tensors": []}
    return {"tensors": moments(inner)} | (
        {} if isinstance(inner, torch.optim.SGD) else {"step": count}
    )


def from_low_bit(json: Mapping[str, Any]) -> Mapping[str, Any]:
    """The JSON of a low-bit optimizer whose state is float32 throughout, as ZeRO once had it, as that of torch's Adam, whose
    tensors it has; any other as it is."""
    name = str(json.get("optimizer", "")).removeprefix("LowBitTraining")
    state = json.get("state", {})
    if name == json.get("optimizer") or any(
        set(entry["codecs"].values()) - {"fp32"} for entry in state.values()
    ):
        return json
    entries = {
        k: {"tensors": ["exp_avg", "exp_avg_sq"], "step": entry["step"]}
        for k, entry in state.items()
    }
    return {**{k: v for k, v in json.items() if k != "seed"}, "optimizer": name, "state": entries}


def _separate_masters(names: Names, masters: Masters) -> dict[str, Tensor]:
    return {f"{names[p]}.master": master for p, master in masters.items() if master is not p}


def _tensor_keys(inner: torch.optim.Optimizer, master: Tensor) -> list[str]:
    state = inner.state.get(master, {})
    return sorted(key for key, value in state.items() if key != "step" and value is not None)


def _step_tensor(inner: torch.optim.Optimizer, master: Tensor, step: int) -> Tensor:
    # Fused and capturable kernels read the count on the device; elsewhere torch keeps it on the CPU.
    group = next(group for group in inner.param_groups if any(master is p for p in group["params"]))
    on_device = group.get("fused") or group.get("capturable")
    return torch.tensor(
        float(step), dtype=torch.float32, device=master.device if on_device else "cpu"
    )


def check_names(what: str, given: Set[str], expected: Set[str]) -> None:
    for problem, names in (("missing", expected - given), ("unexpected", given - expected)):
        if names:
            some = ", ".join(sorted(names)[:4])
            raise ValueError(f"optimizer state: {len(names)} {what} {problem}, among them {some}")


def check_tensors(given: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    check_names("tensors", given.keys(), expected.keys())
    for name, like in expected.items():
        tensor = given[name]
        if tensor.shape != like.shape or tensor.dtype != like.dtype:
            raise ValueError(
                f"optimizer state: {name} is {tensor.dtype} {list(tensor.shape)}, expected"
                f" {like.dtype} {list(like.shape)}"
            )
