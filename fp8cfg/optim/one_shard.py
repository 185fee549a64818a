"""State dicts of one shard: FSDP2's tensors under storage.shard=none, of which each rank has all, as plain ones and back.

A parameter is its own master there. Its float32 values stand in the optimizer's state dict too, as `<name>.master`, where a rank
alone has a master: either goes on with the other's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.numerics.stored_form import in_stored_form
from fp8cfg.optim.low_bit.shards import local, of_shards

MASTER = ".master"


def plain(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str], masters: Container[str]
) -> dict[str, Tensor]:
    """The state `tensors` of the parameters of these `names` as plain tensors, no copies; with those of `masters` themselves."""
    found = {name: local(t) for name, t in tensors.items()}
    return found | {
        name + MASTER: local(p.detach()) for p, name in names.items() if name in masters
    }


def shards(
    tensors: Mapping[str, Tensor], names: Mapping[nn.Parameter, str]
) -> tuple[dict[str, Tensor], dict[nn.Parameter, Tensor]]:
    """The inverse of `plain`: the state, and the values of parameters."""
    params = {name: p for p, name in names.items()}
    masters = {
        params[name]: t
        for key, t in tensors.items()
        if (name := key.removesuffix(MASTER)) in params and name != key
    }
    state = {key: t for key, t in tensors.items() if key.removesuffix(MASTER) not in params}
    owners = {key: params.get(key.rpartition(".")[0]) for key in state}
    return {
        key: t if (p := owners[key]) is None else of_shards(t.to(p.device), p, data=False)
        for key, t in state.items()
    }, masters


@torch.no_grad()
def write(masters: Mapping[nn.Parameter, Tensor]) -> None:
    """Write these values into their parameters."""
    for p, master in masters.items():
        local(p.detach()).copy_(master)


def state_dict_of_one(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """State dict hook: plain tensors, but in the stored form, of which checkpoints write parts."""
    if not in_stored_form():
        state_dict.update(
            {name: local(t) for name, t in state_dict.items() if isinstance(t, Tensor)}
        )


def load_into_one(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load hook: the shards that plain tensors are."""
    params = {
        f"{prefix}{name}": p
        for name, p in module.named_parameters(remove_duplicate=False)
        if hasattr(p, "placements")
    }
    state_dict.update(
        {
            name: of_shards(t.to(params[name].device, torch.float32), params[name], data=False)
            for name, t in state_dict.items()
            if name in params and not hasattr(t, "placements")
        }
    )
