"""Master weights in float32 for parameters that are stored in fewer bits."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def make_masters(
    names: Mapping[nn.Parameter, str], given: Mapping[nn.Parameter, Tensor]
) -> dict[nn.Parameter, Tensor]:
    """A float32 master for each parameter of `names`: the given one, the parameter itself if float32, or a copy.

    Raises ValueError for a given master of another shape or dtype or of no parameter here, and for an 8-bit parameter
    without one: what was rounded away cannot be read back from it.
    """
    if given.keys() - names.keys():
        raise ValueError(
            f"masters for {len(given.keys() - names.keys())} parameters that are not optimized"
        )
    return {
        p: _checked(name, p, given[p]) if p in given else _own(name, p) for p, name in names.items()
    }


def _checked(name: str, parameter: nn.Parameter, master: Tensor) -> Tensor:
    if master.dtype != torch.float32 or master.shape != parameter.shape:
        raise ValueError(
            f"the master of {name} must be float32 {list(parameter.shape)}, not {master.dtype}"
            f" {list(master.shape)}"
        )
    return master.detach()


def _own(name: str, parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    if parameter.dtype in (torch.bfloat16, torch.float16):
        return parameter.detach().float()
    raise ValueError(f"{name} is {parameter.dtype}: its float32 master must be given")
