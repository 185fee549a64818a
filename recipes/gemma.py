"""Gemma 2 and 3 (text only) with published shapes and NeMo's training defaults, and tiny versions.

Both have GeGLU, scaled and tied embeddings, norms before and after attention and MLP with
zero-centered weights, and layers with sliding windows. Gemma 2 has soft caps for attention scores
and logits. Gemma 3 has norms of queries and keys instead, five windowed layers per full layer, and
a separate rotary base for the windowed ones.

NeMo's only recipe for Gemma 3 is 1B. Larger sizes use layouts and batches of Gemma 2. The vision
tower of Gemma 3 is not included.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import SHORT, size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model, RopeScaling

GEMMA2 = Model(
    vocab_size=256000,
    seq_length=4096,
    layernorm_epsilon=1e-6,
    kv_channels=256,
    activation="geglu",
    scale_embeddings=True,
    share_embeddings_and_output_weights=True,
    layernorm_zero_centered_gamma=True,
    layernorm_placement="both",
    sliding_window=4096,
    window_attn_skip_freq=2,
    query_pre_attn_scalar=256,
    attn_logit_softcapping=50,
    final_logit_softcapping=30,
)
GEMMA3 = GEMMA2.model_copy(
    update={
        "vocab_size": 262208,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "qk_layernorm": "head",
        "window_attn_skip_freq": 6,
        "sliding_window": 1024,
        "rotary_base": 1e6,
        "rotary_base_local": 1e4,
        "rope_scaling": RopeScaling(factor=8, rope_type="linear"),
    }
)
GEMMA3_SMALL = GEMMA3.model_copy(
    update={"vocab_size": 262144, "sliding_window": 512, "rope_scaling": RopeScaling()}
)

NORMS = {
    "layers.{}.post_self_attn_layernorm": ("model.layers.{}.post_attention_layernorm",),
    "layers.{}.pre_mlp_layernorm": ("model.layers.{}.pre_feedforward_layernorm",),
    "layers.{}.post_mlp_layernorm": ("model.layers.{}.post_feedforward_layernorm",),
}
GELU = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "use_bidirectional_attention": False,
}
CAPS = {
    key: key
    for key in ("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping")
}
hugging_face.family("gemma2", "Gemma2ForCausalLM", GEMMA2, weights=NORMS, fixed=GELU, keys=CAPS)
hugging_face.family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA3_SMALL.model_copy(update={"sliding_window": 4096}),
    weights=NORMS,
    fixed=GELU,
    keys=CAPS,
)

gemma2_2b = size(
    "gemma2_2b",
    GEMMA2,
    (26, 2304, 9216, 8, 4, 0.02),
    "Gemma 2 2B, one node, tensor parallel 2.",
    tp=2,
    **SHORT,
)
gemma2_9b = size(
    "gemma2_9b",
    GEMMA2,
    (42, 3584, 14336, 16, 8, 0.02),
    "Gemma 2 9B, one node, tensor parallel 8.",
    tp=8,
    **SHORT,
)
gemma2_27b = size(
    "gemma2_27b",
    GEMMA2,
    (46, 4608, 36864, 32, 16, 0.02),
    "Gemma 2 27B, two nodes, tensor parallel 8, pipeline parallel 2.",
    nodes=2,
    tp=8,
    pp=2,
    kv_channels=128,
    more={"query_pre_attn_scalar": 144},
    recompute="selective",
    **SHORT,
)

gemma3_270m = size(
    "gemma3_270m",
    GEMMA3_SMALL,
    (18, 640, 2048, 4, 1, 0.02),
    "Gemma 3 270M, one node.",
    more={"seq_length": 8192},
)
gemma3_1b = size(
    "gemma3_1b",
    GEMMA3_SMALL,
    (26, 1152, 6912, 4, 1, 0.02),
    "Gemma 3 1B, one node.",
    more={"seq_length": 8192},
)
gemma3_4b = size(
    "gemma3_4b",
    GEMMA3,
    (34, 2560, 10240, 8, 4, 0.02),
    "Gemma 3 4B, text, one node, tensor parallel 2.",
    tp=2,
    **SHORT,
)
gemma3_12b = size(
    "gemma3_12b",
    GEMMA3,
    (48, 3840, 15360, 16, 8, 0.02),
    "Gemma 3 12B, text, one node, tensor parallel 8.",
    tp=8,
    **SHORT,
)
gemma3_27b = size(
    "gemma3_27b",
    GEMMA3,
    (62, 5376, 21504, 32, 16, 0.02),
    "Gemma 3 27B, text, two nodes, tensor parallel 8, pipeline parallel 2.",
    nodes=2,
    tp=8,
    pp=2,
    kv_channels=128,
    more={"query_pre_attn_scalar": 168},
    recompute="selective",
    **SHORT,
)

gemma2_tiny = tiny(
    "gemma2_tiny",
    GEMMA2,
    "Gemma 2 with 3.2 million parameters, for two CPU cores.",
    kv_channels=64,
    query_pre_attn_scalar=64,
    sliding_window=64,
)
gemma3_tiny = tiny(
    "gemma3_tiny",
    GEMMA3_SMALL,
    "Gemma 3 with 3.2 million parameters, for two CPU cores.",
    kv_channels=64,
    query_pre_attn_scalar=64,
    sliding_window=64,
    window_attn_skip_freq=2,
)
