"""The `model` node: the shape of a decoder-only Transformer, in Megatron's terms."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pydantic
from pydantic import Field

from fp8cfg.schema.node import Node, expand_home


class LoRA(Node):
    """Low-rank adapters (LoRA): y = W x + alpha / rank B A dropout(x), W frozen. `task=lora` turns them on."""

    home: ClassVar[str] = "lora"

    enabled: bool = False
    """Train only adapters, in precision.compute, on frozen weights. Default false; task=lora sets true."""
    rank: int = Field(default=8, ge=1)
    """Rows of A, columns of B. Default 8 (NeMo's finetune_recipe)."""
    alpha: float = Field(default=16.0, gt=0)
    """Adapters are multiplied by alpha / rank. Default 16 (NeMo's finetune_recipe)."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of an adapter's inputs in training. Default 0 (NeMo)."""
    targets: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    """Layers with adapters: names or patterns, from any dot on, of this model's (linear_qkv) or of transformers' projections
    (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head). Default all but the output layer (NeMo), which PEFT
    calls all-linear."""
    weights: str | None = None
    """Folder of adapters in PEFT's format, or hf://OWNER/NAME, to start from. null initializes A from trainer.seed and B with 0.
    Default null."""

    @pydantic.field_validator("targets", mode="before")
    @classmethod
    def _all_linear(cls, value: Any) -> Any:
        """Accepts PEFT's name of all linear layers but the output layer."""
        if value in ("all-linear", ["all-linear"], ("all-linear",)):
            return cls.model_fields["targets"].default
        return value


class RopeScaling(Node):
    """Scaling of rotary frequencies for longer contexts. A factor of 1 is off."""

    home: ClassVar[str] = "model.rope_scaling"

    factor: float = Field(default=1.0, ge=1.0)
    """Scaling factor of the low frequencies. Default 1, off; Llama 3.1 has 8, Llama 3.2 has 32, Gemma 3 linear 8."""
    rope_type: Literal["llama3", "linear"] = "llama3"
    """llama3: only low frequencies; linear: all of them (arXiv 2306.15595; Gemma 3). Default llama3."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Wavelengths above original_max_position / low_freq_factor are scaled in full. Default 1 (Llama 3.1)."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Wavelengths below original_max_position / high_freq_factor are not scaled. Default 4 (Llama 3.1)."""
    original_max_position: int = Field(default=8192, ge=1)
    """Context length, in tokens, that the frequencies were chosen for. Default 8192 (Llama 3)."""


class Model(Node):
    """A decoder-only Transformer; by default Llama's: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases."""

    home: ClassVar[str] = "model"

    path: str | None = None
    """Folder of a Hugging Face checkpoint, or hf://OWNER/NAME, whose config.json gives the shape, with recipe=from_hf. Default
    null."""
    weights: str | None = None
    """Folder of a Hugging Face checkpoint (safetensors), or hf://OWNER/NAME, with the initial weights. null initializes them from
    trainer.seed. Default null."""
    num_layers: int = Field(default=4, ge=1, le=10_000)
    """Transformer layers. Default 4 (llama_tiny)."""
    hidden_size: int = Field(default=256, ge=1)
    """Width of the residual stream. Default 256 (llama_tiny)."""
    ffn_hidden_size: int = Field(default=768, ge=1)
    """Width inside the MLP. Default 768 (llama_tiny)."""
    num_attention_heads: int = Field(default=4, ge=1)
    """Query heads. Default 4 (llama_tiny)."""
    num_query_groups: int = Field(default=2, ge=1)
    """Key and value heads; queries share them in groups. Default 2 (llama_tiny)."""
    kv_channels: int | None = Field(default=None, ge=2)
    """Width of a head; null is hidden_size / num_attention_heads. Default null (Megatron)."""
    vocab_size: int = Field(default=272, ge=1)
    """Rows of the embedding, padding included. Default 272: 256 bytes and an end mark, padded to a multiple of 16."""
    seq_length: int = Field(default=256, ge=2)
    """Tokens of one training sample. Default 256 (llama_tiny)."""
    rotary_base: float = Field(default=10000.0, gt=1)
    """Base of the rotary frequencies (theta). Default 10000 (Llama 2)."""
    rope_scaling: RopeScaling = Field(default_factory=RopeScaling)
    """Scaling of the rotary frequencies; off by default."""
    layernorm_epsilon: float = Field(default=1e-5, gt=0)
    """Added to the mean square in RMSNorm, to the variance in LayerNorm. Default 1e-5 (Llama)."""
    share_embeddings_and_output_weights: bool = False
    """Tie the output layer to the embedding. Default false (Llama 2, 3, 3.1)."""
    init_method_std: float = Field(default=0.02, gt=0)
    """Standard deviation of initial weights. Default 0.02 (Megatron)."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """RMSNorm (arXiv 1910.07467), or LayerNorm with a bias (GPT-3, Nemotron). Default RMSNorm (Llama)."""
    layernorm_zero_centered_gamma: bool = False
    """Norms store the difference of their weights from 1: Megatron's LayerNorm1p, Gemma. Default false (Llama)."""
    layernorm_placement: Literal["pre", "post", "both"] = "pre"
    """Norms before attention and MLP, after them (OLMo 2), or both (Gemma 2 and 3). Default pre (Llama)."""
    qk_layernorm: Literal["none", "head", "hidden"] = "none"
    """Norms of queries and keys before the rotation: per head (Qwen 3, Gemma 3), or over all heads (OLMo 2). Default none
    (Llama)."""
    activation: Literal["swiglu", "geglu", "gelu", "squared_relu"] = "swiglu"
    """Activation of the MLP: swiglu; geglu (Gemma) and gelu (GPT-3) with the tanh approximation; squared_relu (Nemotron). Default
    swiglu (Llama)."""
    add_qkv_bias: bool = False
    """Biases only of queries, keys and values (Qwen 2). Default false (Llama)."""
    add_bias_linear: bool = False
    """Biases of all linear layers but the output layer (GPT-3). Default false (Llama)."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Rotary positions, or a learned embedding per position (GPT-3). Default rope (Llama)."""
    max_position_embeddings: int | None = Field(default=None, ge=1)
    """Rows of the learned positions; with rotary positions the context length in an exported checkpoint. null is seq_length.
    Default null."""
    rotary_percent: float = Field(default=1.0, gt=0, le=1)
    """Share of a head's channels, from the first on, that are rotated. Default 1 (Llama); Nemotron has 0.5."""
    rotary_base_local: float | None = Field(default=None, gt=1)
    """Rotary base of layers with a sliding window, without rope_scaling (Gemma 3: 10000). null is rotary_base. Default null."""
    sliding_window: int | None = Field(default=None, ge=1)
    """Tokens that a token attends to, including itself; null is all previous tokens. Default null (Llama); Mistral 0.1 and Gemma
    2 have 4096."""
    window_attn_skip_freq: int | None = Field(default=None, ge=2)
    """Every n-th layer has no sliding window (Gemma 2: 2, Gemma 3: 6); null gives all layers one. Default null (Mistral)."""
    query_pre_attn_scalar: float | None = Field(default=None, gt=0)
    """Attention scores are divided by its square root; null is the width of a head. Default null (Llama); Gemma 2 27B has 144."""
    attn_logit_softcapping: float | None = Field(default=None, gt=0)
    """Bound c of attention scores, c tanh(scores / c); null is none. Default null (Llama); Gemma 2 has 50."""
    final_logit_softcapping: float | None = Field(default=None, gt=0)
    """Bound of the logits, applied as for attention scores. Default null (Llama); Gemma 2 has 30."""
    scale_embeddings: bool = False
    """Multiply embeddings by the square root of hidden_size (Gemma). Default false (Llama)."""
    recompute_granularity: Literal["none", "selective", "full"] = "none"
    """Activation checkpointing: full recomputes each layer in the backward pass; selective recomputes outputs of norms and of the
    activation function, and attention scores without flash attention. Default none (NeMo)."""

    @pydantic.field_validator("path", "weights", mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return expand_home(value)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads
