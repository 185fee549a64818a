"""Nemotron 3 and 4 with published shapes and NeMo's pre-training defaults, and a tiny version.

They have squared ReLU without a gate, LayerNorm with zero-centered weights (LayerNorm1p), rotary
positions in half of the channels of a head, and biases in norms only.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import SHORT, size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model
from fp8cfg.schema.training import Optim

NEMOTRON = Model(
    vocab_size=256000,
    seq_length=4096,
    normalization="LayerNorm",
    layernorm_zero_centered_gamma=True,
    activation="squared_relu",
    rotary_percent=0.5,
)
LOW = Optim(lr=1e-4, min_lr=1e-5, warmup_steps=500)

hugging_face.family(
    "nemotron",
    "NemotronForCausalLM",
    NEMOTRON,
    keys={"norm_eps": "layernorm_epsilon"},
    fixed={"hidden_act": "relu2"},
    weights={"layers.{}.mlp.linear_fc1": ("model.layers.{}.mlp.up_proj",)},
)

nemotron3_4b = size(
    "nemotron3_4b",
    NEMOTRON,
    (32, 3072, 9216, 24, 8, 0.0134),
    "Nemotron 3 4B, one node, tensor parallel 2.",
    tp=2,
    kv_channels=128,
    **SHORT,
)
nemotron3_8b = size(
    "nemotron3_8b",
    NEMOTRON,
    (32, 4096, 16384, 32, 32, 0.01),
    "Nemotron 3 8B, one node, tensor parallel 2.",
    tp=2,
    **{**SHORT, "max_steps": 300_000},
)
nemotron3_22b = size(
    "nemotron3_22b",
    NEMOTRON,
    (40, 6144, 24576, 48, 48, 0.008),
    "Nemotron 3 22B, one node, tensor parallel 2, pipeline parallel 4.",
    tp=2,
    pp=4,
    vp=10,
    **{**SHORT, "max_steps": 300_000, "batch": (32, 1), "optim": LOW},
    recompute="selective",
)
nemotron4_15b = size(
    "nemotron4_15b",
    NEMOTRON,
    (32, 6144, 24576, 48, 8, 0.0134),
    "Nemotron 4 15B, one node, tensor parallel 4.",
    tp=4,
    sp=True,
    **{**SHORT, "max_steps": 300_000, "optim": Optim(lr=4.5e-5, min_lr=4.5e-5, warmup_steps=500)},
)
nemotron4_340b = size(
    "nemotron4_340b",
    NEMOTRON,
    (96, 18432, 73728, 96, 8, 0.0063),
    "Nemotron 4 340B, 768 nodes, tensor parallel 8, pipeline parallel 12.",
    nodes=768,
    tp=8,
    pp=12,
    vp=8,
    sp=True,
    **{**SHORT, "max_steps": 100_000, "batch": (2304, 1), "optim": LOW},
    recompute="selective",
)

nemotron_tiny = tiny(
    "nemotron_tiny",
    NEMOTRON,
    "Nemotron with 3.0 million parameters, for two CPU cores.",
    ffn_hidden_size=1024,
)
