"""Mistral 7B (0.1 and 0.3) and Mistral NeMo 12B with published shapes, and a tiny version.

Version 0.1 has a sliding window of 4096 in all layers. Version 0.3 has no window, a larger
vocabulary and a larger rotary base. Training defaults are NeMo's. Its only recipe is 7B 0.1, with
4096 tokens per sample. mistral_nemo_12b has the layout of llama2_7b.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model

MISTRAL = Model(vocab_size=32000, seq_length=4096, sliding_window=4096)
MISTRAL_V03 = Model(vocab_size=32768, seq_length=4096, rotary_base=1e6)

hugging_face.family(
    "mistral", "MistralForCausalLM", Model(layernorm_epsilon=1e-6, sliding_window=4096)
)

mistral_7b = size(
    "mistral_7b",
    MISTRAL,
    (32, 4096, 14336, 32, 8, 0.02),
    "Mistral 7B 0.1, one node, context parallel 2.",
    cp=2,
)
mistral_7b_v03 = size(
    "mistral_7b_v03",
    MISTRAL_V03,
    (32, 4096, 14336, 32, 8, 0.02),
    "Mistral 7B 0.3, one node, context parallel 2.",
    cp=2,
)
mistral_nemo_12b = size(
    "mistral_nemo_12b",
    MISTRAL_V03,
    (40, 5120, 14336, 32, 8, 0.02),
    "Mistral NeMo 12B, one node, tensor parallel 2.",
    tp=2,
    kv_channels=128,
    more={"vocab_size": 131072},
)

mistral_tiny = tiny(
    "mistral_tiny",
    MISTRAL,
    "Mistral with 3.3 million parameters and a window of 64, for two CPU cores.",
    sliding_window=64,
)
