"""Model families: a tiny recipe of each beside transformers' model with the same random weights, and published counts."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from fp8cfg.models import TransformerConfig
from fp8cfg.models.hf_checkpoint import Layout, from_hf
from fp8cfg.models.transformer import Transformer
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema import hugging_face
from fp8cfg.schema.model import Model, RopeScaling
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipes

SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 128,
    "seq_length": 48,
    "init_method_std": 0.1,
}
TINY = {name: make for name, make in recipes().items() if name.endswith("_tiny")}
MORE: dict[
    str, dict[str, Any]
] = {  # what a small shape needs so that each difference of the family is felt
    "gemma2_tiny": {
        "kv_channels": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_tiny": {
        "kv_channels": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": 12,
        "rotary_base_local": 100.0,
        "rope_scaling": RopeScaling(factor=4, rope_type="linear"),
    },
    "gpt3_tiny": {"num_query_groups": 4},
    "mistral_tiny": {"sliding_window": 12},
    "qwen3_tiny": {"kv_channels": 32},
    "nemotron_tiny": {"kv_channels": 32},
}


def shaped(name: str) -> Model:
    """The model of a tiny recipe, smaller still."""
    return TINY[name]().model.model_copy(update={**SHAPE, **MORE.get(name, {})})


def config_of(model: Model) -> TransformerConfig:
    return transformer_config(Recipe(model=model))


def layout_of(family: hugging_face.Family) -> Layout:
    return Layout(family.names, family.conv1d, family.model.layernorm_zero_centered_gamma)


def theirs(family: hugging_face.Family, model: Model) -> Any:
    """transformers' model with random weights, none of them where it starts: that would hide a norm or a bias in the wrong place."""
    torch.manual_seed(0)
    said = {
        k: v for k, v in family.write(model).items() if k not in ("architectures", "model_type")
    }
    made = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(family.model_type, **said), attn_implementation="eager"
    )
    for name, p in made.named_parameters():
        if p.dim() == 1:
            torch.nn.init.uniform_(p, -0.5, 0.5) if name.endswith(
                "bias"
            ) else torch.nn.init.uniform_(p, 0.3, 1.2)
    return made


def build(name: str, dtype: torch.dtype) -> tuple[Any, Transformer, TransformerConfig, Layout]:
    model = shaped(name)
    family, config = hugging_face.family_of_model(model), config_of(model)
    layout, their = layout_of(family), theirs(family, model)
    ours = Transformer(config)
    ours.load_state_dict(from_hf(their.state_dict(), config, layout))
    return their.to(dtype), ours.to(dtype), config, layout


PUBLISHED = {  # billions, to the digits of the model cards and papers
    "llama2_7b": 6.74,
    "llama2_13b": 13.0,
    "llama2_70b": 69.0,
    "llama31_8b": 8.03,
    "llama31_70b": 70.6,
    "llama31_405b": 406.0,
    "llama32_1b": 1.24,
    "llama32_3b": 3.21,
    "qwen2_500m": 0.49,
    "qwen2_1p5b": 1.54,
    "qwen2_7b": 7.62,
    "qwen2_72b": 72.7,
    "qwen25_500m": 0.49,
    "qwen25_1p5b": 1.54,
    "qwen25_3b": 3.09,
    "qwen25_7b": 7.62,
    "qwen25_14b": 14.8,
    "qwen25_32b": 32.8,
    "qwen25_72b": 72.7,
    "qwen3_600m": 0.6,
    "qwen3_1p7b": 1.72,
    "qwen3_4b": 4.02,
    "qwen3_8b": 8.19,
    "qwen3_14b": 14.8,
    "qwen3_32b": 32.8,
    "gemma2_2b": 2.61,
    "gemma2_9b": 9.24,
    "gemma2_27b": 27.2,
    "gemma3_270m": 0.268,
    "gemma3_1b": 1.0,
    "gemma3_4b": 3.88,
    "gemma3_12b": 11.8,
    "gemma3_27b": 27.0,
    "gpt3_125m": 0.125,
    "gpt3_6p7b": 6.7,
    "gpt3_175b": 175,
    "nemotron3_4b": 4.19,
    "nemotron4_15b": 15.6,
    "nemotron4_340b": 341,
    "mistral_7b": 7.24,
    "mistral_7b_v03": 7.25,
    "mistral_nemo_12b": 12.2,
    "olmo2_1b": 1.48,
    "olmo2_7b": 7.30,
    "olmo2_13b": 13.7,
    "olmo2_32b": 32.2,
}
