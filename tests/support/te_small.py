"""Small Transformer for tests of the Transformer Engine backend, and its conversion."""

from __future__ import annotations

from typing import Any

import torch

from fp8cfg.backends.gemm_plan import PlannedLinear, layer_numbering, plan_linears
from fp8cfg.backends.native import rules
from fp8cfg.models.config import TransformerConfig, linear_layers, norm_names
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import Region
from fp8cfg.schema.fp8 import FP8

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=64,
    ffn_hidden_size=128,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    vocab_size=256,
    seq_length=32,
)


def transformer(**changed: Any) -> Transformer:
    import dataclasses

    model = Transformer(dataclasses.replace(CONFIG, **changed))
    model.init_weights(0)
    return model


def planned(fp8: FP8, model: Transformer) -> list[PlannedLinear]:
    return plan_linears(
        linear_layers(model.config),
        fp8,
        layer_numbering(model.config.num_layers),
        rules.misfit,
        norms=norm_names(model.config),
    )


def converted(fp8: FP8, **changed: Any) -> Transformer:
    """The small model converted, in bfloat16 as building.model casts it. Inside of a te_standin context alone."""
    from fp8cfg.backends.te import backend

    model = transformer(**changed)
    backend.convert(model, fp8, planned(fp8, model), Region(), "scaled_mm")
    for p in model.parameters():
        if p.dtype == torch.float32:
            p.data = p.data.to(torch.bfloat16)
    return model


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(seed))
