"""Transformer Engine backend: genuine TE modules around the model's Parameters."""

from __future__ import annotations

from fp8cfg.schema.backends import Capabilities

CAPABILITIES = Capabilities(
    priority=30,
    skips_on_device=True,
    fully_shards=True,
    compiles=False,
    norms=True,
    zero_fp8_weights=False,
    keeps_cast=True,
    layer_modules=("transformer_engine", "fp8cfg.backends.te.layers"),
)
