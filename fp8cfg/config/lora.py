"""The `lora` node: low-rank adapters over frozen weights (LoRA, arXiv 2106.09685)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from fp8cfg.config.node import Node


class LoRA(Node):
    """Low-rank adapters (LoRA): y = W x + alpha / rank B A dropout(x), W frozen. `task=lora` turns them on."""

    home: ClassVar[str] = "lora"

    enabled: bool = False
    """Train adapters alone, in precision.compute, over weights that stay as they are. Default false; task=lora writes true."""
    rank: int = Field(default=8, ge=1)
    """Rows of A, columns of B. Default 8 (NeMo's finetune_recipe)."""
    alpha: float = Field(default=16.0, gt=0)
    """Adapters are multiplied by alpha / rank. Default 16 (NeMo's finetune_recipe)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of an adapter's inputs that is dropped in training. Default 0 (NeMo)."""
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Layers with adapters: names or patterns, from any dot on, of this model's (linear_qkv) or of transformers' projections
    (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head). Default all but the output layer (NeMo)."""
    weights: str | None = None
    """Folder of adapters in PEFT's format, or hf://OWNER/NAME, to start from; null draws A from trainer.seed, and B is 0.
    Default null."""
