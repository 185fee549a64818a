"""Decoder-only Transformer: one implementation that every model family configures.

The package itself loads no torch, so the planner can count parameters on a machine without it. The
model is in `fp8cfg.models.transformer`, and Hugging Face weights in `fp8cfg.models.hf_checkpoint`.
"""

from __future__ import annotations

from fp8cfg.models.config import (
    LinearShape,
    RopeScaling,
    TransformerConfig,
    linear_layers,
    parameter_counts,
    parameter_shapes,
)

__all__ = [
    "LinearShape",
    "RopeScaling",
    "TransformerConfig",
    "linear_layers",
    "parameter_counts",
    "parameter_shapes",
]
