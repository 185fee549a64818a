"""Parameter groups of an optimizer, and the dtype in which gradients accumulate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups of named parameters: matrices with `weight_decay`, vectors (norms, biases) without, as in Megatron.

    A tied parameter appears once, under its first name; frozen ones do not appear, nor does an empty group.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if p.dim() > 1]
    vectors = [(name, p) for name, p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_grad_dtype(params: Iterable[nn.Parameter], dtype: torch.dtype) -> None:
    """Accumulate the `.grad` of parameters narrower than `dtype` in `dtype`; wider ones keep their own.

    Autograd casts each incoming gradient, so microbatches add up in `dtype` (bf16 weights with `torch.float32` is
    NeMo's `grad_reduce_in_fp32`). Call it before the first backward pass and after `to_empty`, which makes new parameters.
    DistributedDataParallel refuses such parameters ("Expected BFloat16, got Float"): its buckets have their dtype.
    """
    for parameter in params:
        if parameter.dtype.itemsize < dtype.itemsize:
            parameter.grad_dtype = dtype
