"""Language and other models of transformers: small configurations with sizes that are multiples of 16, and a loss for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH, BATCH = 256, 32, 4
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
TRANSFORMERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: model class, config class, what its config has
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "mistral": ("MistralForCausalLM", "MistralConfig", DECODER),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", DECODER | EXPERTS),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        DECODER
        | EXPERTS
        | {
            "shared_expert_intermediate_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", DECODER),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        DECODER
        | {
            "num_key_value_heads": 4,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "granite": ("GraniteForCausalLM", "GraniteConfig", DECODER),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        DECODER | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {key: value for key, value in DECODER.items() if key != "num_key_value_heads"},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            key: value
            for key, value in DECODER.items()
            if key not in ("num_key_value_heads", "head_dim", "use_cache")
        }
        | {"cls_token_id": 1, "sep_token_id": 2, "reference_compile": False},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        IMAGE
        | {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "num_mel_bins": 16,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "max_source_positions": 32,
            "max_target_positions": 64,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_heads": 16,
            "head_dim": 8,
            "state_size": 16,
            "n_groups": 1,
            "num_hidden_layers": 2,
            "chunk_size": 16,
            "use_cache": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}
Loss = Callable[[nn.Module], Tensor]


def made(name: str) -> tuple[nn.Module, Loss]:
    """The model called `name`, and the loss of one batch, always the same."""
    import transformers

    model_class, config_class, values = TRANSFORMERS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**values))
    inputs = batch(name)
    return model, lambda job_model: job_model(**inputs).loss


def batch(name: str) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=draw)
    if name == "vit":
        return {
            "pixel_values": torch.randn(BATCH, 3, 32, 32, generator=draw),
            "labels": torch.arange(BATCH),
        }
    if name == "whisper":
        return {"input_features": torch.randn(BATCH, 16, 64, generator=draw), "labels": tokens}
    return {"input_ids": tokens, "labels": tokens}
