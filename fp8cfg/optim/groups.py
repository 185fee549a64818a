"""Parameter groups of an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of named parameters: matrices with `weight_decay`, vectors (norms, biases) without, as in Megatron.

    A tied parameter appears once, under its first name; frozen ones do not appear, nor does an empty group.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.dim() > 1]
    vectors = [(name, p) for name, p in trained if p.dim() <= 1]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
