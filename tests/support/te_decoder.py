"""Decoder layers of the small Transformer in te.TransformerLayer: conversion, one pass, and differences of two passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fp8cfg.models.attention import rotary_tables
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region
from tests.support.te_small import planned
from tests.support.te_table import node

CURRENT = {"scaling": "current"}
BOTH = {"override_linear_precision": {"dgrad": True, "wgrad": True}}
WHOLE = {"layers.0": "te.TransformerLayer", "layers.1": "te.TransformerLayer"}


def described(model: nn.Module) -> dict[str, str]:
    from fp8cfg.backends.te import decoder

    return decoder.describe_decoder_layers(model)


def convert(model: Transformer, given: dict[str, Any]) -> Transformer:
    from fp8cfg.backends.te import backend

    backend.convert(model, node(given), planned(node(given), model), Region(), "scaled_mm")
    return model


def passed(model: nn.Module, fp8: bool = False) -> dict[str, torch.Tensor]:
    """What one layer makes of random numbers, and the gradients that come of it."""
    from fp8cfg.backends.te import backend

    g = torch.Generator().manual_seed(1)
    layer, dtype = model.layers[0], model.embedding.weight.dtype
    x = torch.randn(2, 32, 64, generator=g).to(dtype).requires_grad_()
    with backend.autocast(model, fp8):
        y = layer(x, *rotary_tables(model.config, torch.arange(32)))
        y.backward(torch.randn(y.shape, generator=g).to(dtype))
    return {"y": y.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def apart(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of two passes."""
    assert mine.keys() == theirs.keys()
    return max(((mine[n] - t).float().norm() / t.float().norm()).item() for n, t in theirs.items())


def hooked(model: Transformer) -> None:
    model.layers[0].mlp.register_forward_hook(lambda *_: None)
