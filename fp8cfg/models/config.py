"""Transformer configuration: layer count, widths, heads, norms and positions under Megatron's names, without torch.

The defaults are Llama's. What a field means, and who trains so, stands with the key of the same name in config/model.py.
"""

from __future__ import annotations

from dataclasses import dataclass

GATED = ("swiglu", "geglu")
"""Activations of an MLP whose first layer has a gate's rows before those of the up projection."""


@dataclass(frozen=True)
class RopeScaling:
    """A stretch of the rotary frequencies, `rope_type` llama3 or linear in Hugging Face's config.json.

    Raises ValueError where `high_freq_factor` is not above `low_freq_factor`: between the two lies the blend.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    rope_type: str = "llama3"

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor} must be above"
                f" low_freq_factor={self.low_freq_factor}"
            )


@dataclass(frozen=True)
class TransformerConfig:
    """Shapes of one decoder-only Transformer; by default RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

    Raises ValueError where the numbers do not fit together.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    """Key-value heads; equal to `num_attention_heads` for multi-head attention."""
    head_dim: int
    vocab_size: int
    """Rows of the embedding, padding included."""
    seq_length: int
    """Tokens in a training sequence. The model takes any length; plans and memory estimates read this one."""
    rotary_base: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    layernorm_epsilon: float = 1e-5
    tie_embeddings: bool = False
    init_std: float = 0.02
    normalization: str = "RMSNorm"
    layernorm_zero_centered_gamma: bool = False
    layernorm_placement: str = "pre"
    qk_layernorm: str = "none"
    activation: str = "swiglu"
    add_qkv_bias: bool = False
    add_bias_linear: bool = False
    position_embedding_type: str = "rope"
    max_position_embeddings: int | None = None
    """Rows of learned positions; None is `seq_length`."""
    rotary_percent: float = 1.0
    rotary_base_local: float | None = None
    sliding_window: int | None = None
    window_attn_skip_freq: int | None = None
    query_pre_attn_scalar: float | None = None
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    scale_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_query_groups",
            "vocab_size",
            "seq_length",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.num_attention_heads < 1 or self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of"
                f" num_query_groups={self.num_query_groups}"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} must be even: rotary positions turn pairs of channels"
            )

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_attention_heads // self.num_query_groups

    @property
    def query_size(self) -> int:
        """Channels of all query heads together; the input of `linear_proj`."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_size(self) -> int:
        """Channels of all key heads together, and of all value heads."""
        return self.num_query_groups * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Channels of all query, key and value heads together; the output of `linear_qkv`."""
        return self.query_size + 2 * self.key_size

    @property
    def fc1_size(self) -> int:
        """Channels of the output of `linear_fc1`: twice the MLP's width where a gate multiplies it."""
        return self.ffn_hidden_size * (2 if self.activation in GATED else 1)

    @property
    def rotary_size(self) -> int:
        """Channels of a head that rotary positions turn, the first ones."""
        return int(self.head_dim * self.rotary_percent)

    @property
    def learned_positions(self) -> int:
        """Rows of the learned position embedding; 0 under rotary positions."""
        return (
            (self.max_position_embeddings or self.seq_length)
            if self.position_embedding_type == "learned_absolute"
            else 0
        )

    def window(self, layer: int) -> int | None:
        """Tokens that attention of the layer (from 0) reaches back over, its own among them; None for all of them."""
        every = self.window_attn_skip_freq
        return None if every and (layer + 1) % every == 0 else self.sliding_window
