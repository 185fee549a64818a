"""An example of each key, for the page of keys and for `fp8cfg explain`."""

from __future__ import annotations

from typing import Any

from fp8cfg.report.recipe_export import key_schema
from fp8cfg.schema.keys import short

VALUES = {
    "name": "llama_8b_fp8_margin1",
    "model.path": "hf://Qwen/Qwen3-0.6B",
    "model.weights": "hf://Qwen/Qwen3-0.6B",
    "model.num_layers": "32",
    "model.hidden_size": "4096",
    "model.ffn_hidden_size": "14336",
    "model.num_attention_heads": "32",
    "model.num_query_groups": "8",
    "model.kv_channels": "128",
    "model.vocab_size": "128256",
    "model.seq_length": "8192",
    "model.rotary_base": "500000",
    "model.rope_scaling.factor": "8",
    "model.rope_scaling.low_freq_factor": "1",
    "model.rope_scaling.high_freq_factor": "4",
    "model.rope_scaling.original_max_position": "8192",
    "model.layernorm_epsilon": "1e-6",
    "model.init_method_std": "0.01",
    "model.max_position_embeddings": "32768",
    "model.rotary_percent": "0.5",
    "model.rotary_base_local": "10000",
    "model.sliding_window": "4096",
    "model.window_attn_skip_freq": "6",
    "model.query_pre_attn_scalar": "144",
    "model.attn_logit_softcapping": "50",
    "model.final_logit_softcapping": "30",
    "lora.rank": "16",
    "lora.alpha": "32",
    "lora.dropout": "0.05",
    "lora.targets": "[linear_qkv,linear_proj]",
    "lora.weights": "adapters/",
    "data.path": "corpus/",
    "data.mixture": "[{path: web/, weight: 0.7}, {path: code/, weight: 0.3}]",
    "data.text_key": "content",
    "data.tokenizer": "models/Qwen3-0.6B",
    "data.validation_path": "held_out.jsonl",
    "data.validation_fraction": "0.01",
    "optim.lr": "1e-4",
    "optim.min_lr": "1e-5",
    "optim.betas": "[0.9,0.99]",
    "optim.eps": "1e-8",
    "optim.momentum": "0.95",
    "optim.weight_decay": "0.05",
    "optim.warmup_steps": "500",
    "optim.constant_steps": "1000",
    "fp8.margin": "1",
    "fp8.interval": "4",
    "fp8.amax_history_len": "16",
    "fp8.high_precision_at_start": "1",
    "fp8.high_precision_at_end": "1",
    "fp8.include": "['*.mlp.*']",
    "fp8.exclude": "['*.linear_fc2']",
    "fp8.min_coverage": "0.9",
    "precision.loss_scale": "1024",
    "precision.initial_loss_scale": "65536",
    "precision.min_loss_scale": "128",
    "precision.loss_scale_window": "500",
    "precision.hysteresis": "1",
    "trainer.strategy.tensor_model_parallel_size": "2",
    "trainer.strategy.pipeline_model_parallel_size": "4",
    "trainer.strategy.virtual_pipeline_model_parallel_size": "2",
    "trainer.strategy.context_parallel_size": "2",
    "trainer.strategy.data_parallel_replicate_size": "2",
    "trainer.timeout.start": "1200",
    "trainer.timeout.step": "300",
    "trainer.num_nodes": "4",
    "trainer.devices": "8",
    "trainer.max_steps": "1000",
    "trainer.global_batch_size": "512",
    "trainer.micro_batch_size": "1",
    "trainer.gradient_clip_val": "0.5",
    "trainer.val_check_interval": "500",
    "trainer.limit_val_batches": "64",
    "trainer.seed": "42",
    "trainer.spike_factor": "3",
    "trainer.max_bad_steps": "10",
    "checkpoint.every_n_steps": "1000",
    "checkpoint.every_minutes": "30",
    "checkpoint.keep": "5",
    "log.dir": "~/runs",
    "log.folder": "runs/llama_8b",
    "log.every_n_steps": "1",
    "log.loggers": "[wandb]",
    "log.project": "llama-8b",
    "log.profile": "10:12",
    "log.fp8_stats_every_n_steps": "100",
}
"""Values of keys without a list of choices, as on a command line."""


def example(key: str) -> str | None:
    """Returns a word for a command line, such as "fp8.margin=1".

    Args:
        key: Full or short name of a key with a value.

    Returns:
        The word. None if the key has neither choices nor an entry in VALUES.
    """
    name = short(key)
    if name in VALUES:
        return f"{name}={VALUES[name]}"
    choices = _choices_without_default(key_schema(key))
    if not choices:
        return None
    return f"{name}={choices[0]}"


def _choices_without_default(schema: dict[str, Any]) -> list[str]:
    """Returns the choices of a key except its default, in their order."""
    # pydantic writes an optional choice as anyOf, with {"type": "null"} as one alternative.
    choices: list[Any] = []
    for alternative in schema.get("anyOf", [schema]):
        if alternative.get("type") == "boolean":
            choices += [True, False]
        else:
            choices += alternative.get("enum", [])
    texts = []
    for choice in choices:
        if choice != schema["default"]:
            # YAML writes booleans in lower case.
            texts.append(str(choice).lower() if isinstance(choice, bool) else str(choice))
    return texts
