"""Qwen 2, 2.5 and 3 (dense) with published shapes and NeMo's training defaults, and tiny versions.

Qwen 2 and 2.5 have biases of queries, keys and values. Qwen 3 has norms of each head's queries and
keys instead, and 128 channels per head for any hidden size. Embeddings of small sizes are tied, as
in their checkpoints. NeMo's qwen2_500m and qwen2_1p5b untie them. NeMo has no qwen25_3b, so it has
the layout of qwen25_1p5b.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import SHORT, size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model

QWEN2 = Model(
    vocab_size=152064, seq_length=4096, rotary_base=1e6, layernorm_epsilon=1e-6, add_qkv_bias=True
)
QWEN2_TIED = QWEN2.model_copy(
    update={"vocab_size": 151936, "share_embeddings_and_output_weights": True}
)
QWEN3 = Model(
    vocab_size=151936,
    seq_length=4096,
    rotary_base=1e6,
    layernorm_epsilon=1e-6,
    kv_channels=128,
    qk_layernorm="head",
)
QWEN3_TIED = QWEN3.model_copy(update={"share_embeddings_and_output_weights": True})
NEMO = {**SHORT, "max_steps": 300_000}

hugging_face.family("qwen2", "Qwen2ForCausalLM", Model(layernorm_epsilon=1e-6, add_qkv_bias=True))
hugging_face.family(
    "qwen3", "Qwen3ForCausalLM", Model(layernorm_epsilon=1e-6, kv_channels=128, qk_layernorm="head")
)

qwen2_500m = size(
    "qwen2_500m",
    QWEN2_TIED,
    (24, 896, 4864, 14, 2, 0.02),
    "Qwen 2 0.5B, one node, tied embeddings.",
    **NEMO,
)
qwen2_1p5b = size(
    "qwen2_1p5b",
    QWEN2_TIED,
    (28, 1536, 8960, 12, 2, 0.02),
    "Qwen 2 1.5B, one node, tied embeddings.",
    **NEMO,
)
qwen2_7b = size(
    "qwen2_7b",
    QWEN2,
    (28, 3584, 18944, 28, 4, 0.02),
    "Qwen 2 7B, one node, tensor parallel 2.",
    tp=2,
    **NEMO,
)
qwen2_72b = size(
    "qwen2_72b",
    QWEN2,
    (80, 8192, 29568, 64, 8, 0.02),
    "Qwen 2 72B, four nodes, tensor parallel 8, pipeline parallel 4.",
    nodes=4,
    tp=8,
    pp=4,
    sp=True,
    recompute="selective",
    **NEMO,
)

qwen25_500m = size(
    "qwen25_500m",
    QWEN2_TIED,
    (24, 896, 4864, 14, 2, 0.02),
    "Qwen 2.5 0.5B, one node, tied embeddings.",
    **NEMO,
)
qwen25_1p5b = size(
    "qwen25_1p5b",
    QWEN2_TIED,
    (28, 1536, 8960, 12, 2, 0.02),
    "Qwen 2.5 1.5B, one node, tied embeddings.",
    **NEMO,
)
qwen25_3b = size(
    "qwen25_3b",
    QWEN2_TIED,
    (36, 2048, 11008, 16, 2, 0.02),
    "Qwen 2.5 3B, one node, tied embeddings.",
    **NEMO,
)
qwen25_7b = size(
    "qwen25_7b",
    QWEN2,
    (28, 3584, 18944, 28, 4, 0.02),
    "Qwen 2.5 7B, one node, tensor parallel 2.",
    tp=2,
    **NEMO,
)
qwen25_14b = size(
    "qwen25_14b",
    QWEN2,
    (48, 5120, 13824, 40, 8, 0.02),
    "Qwen 2.5 14B, one node, tensor parallel 4.",
    tp=4,
    recompute="selective",
    **NEMO,
)
qwen25_32b = size(
    "qwen25_32b",
    QWEN2,
    (64, 5120, 27648, 40, 8, 0.02),
    "Qwen 2.5 32B, two nodes, tensor parallel 8, pipeline parallel 2.",
    nodes=2,
    tp=8,
    pp=2,
    recompute="selective",
    **NEMO,
)
qwen25_72b = size(
    "qwen25_72b",
    QWEN2,
    (80, 8192, 29568, 64, 8, 0.02),
    "Qwen 2.5 72B, four nodes, tensor parallel 8, pipeline parallel 4.",
    nodes=4,
    tp=8,
    pp=4,
    sp=True,
    recompute="selective",
    **NEMO,
)

qwen3_600m = size(
    "qwen3_600m",
    QWEN3_TIED,
    (28, 1024, 3072, 16, 8, 0.02),
    "Qwen 3 0.6B, one node, tied embeddings.",
    **NEMO,
)
qwen3_1p7b = size(
    "qwen3_1p7b",
    QWEN3_TIED,
    (28, 2048, 6144, 16, 8, 0.02),
    "Qwen 3 1.7B, one node, tied embeddings.",
    **NEMO,
)
qwen3_4b = size(
    "qwen3_4b",
    QWEN3_TIED,
    (36, 2560, 9728, 32, 8, 0.02),
    "Qwen 3 4B, one node, tensor parallel 2.",
    tp=2,
    **NEMO,
)
qwen3_8b = size(
    "qwen3_8b",
    QWEN3,
    (36, 4096, 12288, 32, 8, 0.02),
    "Qwen 3 8B, one node, tensor parallel 4.",
    tp=4,
    **NEMO,
)
qwen3_14b = size(
    "qwen3_14b",
    QWEN3,
    (40, 5120, 17408, 40, 8, 0.02),
    "Qwen 3 14B, one node, tensor parallel 8.",
    tp=8,
    **NEMO,
)
qwen3_32b = size(
    "qwen3_32b",
    QWEN3,
    (64, 5120, 25600, 64, 8, 0.02),
    "Qwen 3 32B, two nodes, tensor parallel 8, pipeline parallel 2.",
    nodes=2,
    tp=8,
    pp=2,
    recompute="selective",
    **NEMO,
)

qwen2_tiny = tiny(
    "qwen2_tiny", QWEN2_TIED, "Qwen 2 with 3.2 million parameters, for two CPU cores."
)
qwen3_tiny = tiny(
    "qwen3_tiny",
    QWEN3_TIED,
    "Qwen 3 with 3.2 million parameters, for two CPU cores.",
    kv_channels=64,
)
