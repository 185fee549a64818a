"""OLMo 2 with published shapes, and a tiny version.

Its norms come after attention and MLP. One norm covers all queries, and another one all keys.
Shapes are from the published `config.json`. NeMo has no recipe for OLMo 2. Training defaults and
layouts follow llama2_7b and larger models.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model

OLMO2 = Model(
    vocab_size=100352,
    seq_length=4096,
    rotary_base=5e5,
    layernorm_epsilon=1e-6,
    layernorm_placement="post",
    qk_layernorm="hidden",
)

hugging_face.family(
    "olmo2",
    "Olmo2ForCausalLM",
    OLMO2.model_copy(update={"layernorm_epsilon": 1e-5, "rotary_base": 1e4}),
    weights={
        "layers.{}.post_self_attn_layernorm": ("model.layers.{}.post_attention_layernorm",),
        "layers.{}.post_mlp_layernorm": ("model.layers.{}.post_feedforward_layernorm",),
    },
)

olmo2_1b = size("olmo2_1b", OLMO2, (16, 2048, 8192, 16, 16, 0.02), "OLMo 2 1B, one node.")
olmo2_7b = size(
    "olmo2_7b",
    OLMO2,
    (32, 4096, 11008, 32, 32, 0.02),
    "OLMo 2 7B, one node, tensor parallel 2.",
    tp=2,
)
olmo2_13b = size(
    "olmo2_13b",
    OLMO2,
    (40, 5120, 13824, 40, 40, 0.02),
    "OLMo 2 13B, one node, tensor parallel 2.",
    tp=2,
    recompute="selective",
)
olmo2_32b = size(
    "olmo2_32b",
    OLMO2,
    (64, 5120, 27648, 40, 8, 0.02),
    "OLMo 2 32B, two nodes, tensor parallel 8, pipeline parallel 2.",
    nodes=2,
    tp=8,
    pp=2,
)

olmo2_tiny = tiny("olmo2_tiny", OLMO2, "OLMo 2 with 3.3 million parameters, for two CPU cores.")
