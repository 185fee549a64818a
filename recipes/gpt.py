"""GPT-3 with the shapes of its paper (arXiv 2005.14165, table 2.1), and a tiny version.

GPT-3 has learned positions, LayerNorm, GELU and biases in all linear layers. As in NeMo, the 50257
tokens of GPT-2 are padded to 50304, and LayerNorm weights are zero-centered.

In the paper, the widths of 1.3B and 13B are not multiples of their heads. So gpt3_1p3b has 16
heads, and gpt3_13b a width of 5120. NeMo's only recipe is 175B, on 64 nodes. Other sizes have the
paper's learning rates and batches. Their layouts are ours.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import size, tiny
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model
from fp8cfg.schema.training import Optim

GPT3 = Model(
    vocab_size=50304,
    seq_length=2048,
    normalization="LayerNorm",
    layernorm_zero_centered_gamma=True,
    activation="gelu",
    add_bias_linear=True,
    position_embedding_type="learned_absolute",
    share_embeddings_and_output_weights=True,
)

hugging_face.family(
    "gpt2",
    "GPT2LMHeadModel",
    GPT3.model_copy(update={"vocab_size": 50257, "layernorm_zero_centered_gamma": False}),
    conv1d=True,
    keys={
        "n_layer": "num_layers",
        "n_embd": "hidden_size",
        "n_head": "num_attention_heads",
        "n_inner": "ffn_hidden_size",
        "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layernorm_epsilon",
    },
    fixed={
        "hidden_act": None,
        "activation_function": "gelu_new",
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    weights={
        "embedding": ("transformer.wte",),
        "position_embedding": ("transformer.wpe",),
        "final_layernorm": ("transformer.ln_f",),
        "layers.{}.input_layernorm": ("transformer.h.{}.ln_1",),
        "layers.{}.pre_mlp_layernorm": ("transformer.h.{}.ln_2",),
        "layers.{}.self_attention.linear_qkv": ("transformer.h.{}.attn.c_attn",),
        "layers.{}.self_attention.linear_proj": ("transformer.h.{}.attn.c_proj",),
        "layers.{}.mlp.linear_fc1": ("transformer.h.{}.mlp.c_fc",),
        "layers.{}.mlp.linear_fc2": ("transformer.h.{}.mlp.c_proj",),
    },
)

gpt3_125m = size(
    "gpt3_125m",
    GPT3,
    (12, 768, 3072, 12, 12, 0.02),
    "GPT-3 125M, one node.",
    batch=(256, 2),
    optim=Optim(lr=6e-4),
)
gpt3_350m = size(
    "gpt3_350m",
    GPT3,
    (24, 1024, 4096, 16, 16, 0.02),
    "GPT-3 350M, one node.",
    batch=(256, 2),
    optim=Optim(lr=3e-4),
)
gpt3_760m = size(
    "gpt3_760m",
    GPT3,
    (24, 1536, 6144, 16, 16, 0.02),
    "GPT-3 760M, one node.",
    batch=(256, 2),
    optim=Optim(lr=2.5e-4),
)
gpt3_1p3b = size(
    "gpt3_1p3b",
    GPT3,
    (24, 2048, 8192, 16, 16, 0.02),
    "GPT-3 1.3B, one node.",
    batch=(512, 2),
    optim=Optim(lr=2e-4),
)
gpt3_2p7b = size(
    "gpt3_2p7b",
    GPT3,
    (32, 2560, 10240, 32, 32, 0.02),
    "GPT-3 2.7B, one node.",
    batch=(512, 2),
    optim=Optim(lr=1.6e-4),
)
gpt3_6p7b = size(
    "gpt3_6p7b",
    GPT3,
    (32, 4096, 16384, 32, 32, 0.02),
    "GPT-3 6.7B, one node, tensor parallel 2.",
    tp=2,
    sp=True,
    batch=(1024, 2),
    optim=Optim(lr=1.2e-4),
)
gpt3_13b = size(
    "gpt3_13b",
    GPT3,
    (40, 5120, 20480, 40, 40, 0.02),
    "GPT-3 13B, one node, tensor parallel 4.",
    tp=4,
    sp=True,
    batch=(1024, 2),
    optim=Optim(lr=1e-4),
)
gpt3_175b = size(
    "gpt3_175b",
    GPT3,
    (96, 12288, 49152, 96, 96, 0.02),
    "GPT-3 175B, 64 nodes, tensor parallel 4, pipeline parallel 8.",
    nodes=64,
    tp=4,
    pp=8,
    vp=6,
    sp=True,
    batch=(2048, 2),
    optim=Optim(lr=9e-5),
    recompute="selective",
)

gpt3_tiny = tiny(
    "gpt3_tiny",
    GPT3,
    "GPT-3 with 3.3 million parameters, for two CPU cores.",
    num_query_groups=4,
    ffn_hidden_size=1024,
)
