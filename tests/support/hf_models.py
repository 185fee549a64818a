"""Small models as Hugging Face folders: made by transformers, and exported from runs; and logits to compare them by."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import fp8cfg

SHAPE = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 144,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 64,
    "head_dim": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WORDS = [
    "data=tiny",
    "precision=fp32",
    "model.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
    "trainer.accelerator=cpu",
]
WIDE = [
    "recipe=qwen3_tiny",
    "data=tiny",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=256",
    "model.kv_channels=64",
    "model.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
    "trainer.max_steps=2",
    "optim.warmup_steps=1",
    "trainer.val_check_interval=0",
    "checkpoint.every_n_steps=2",
    "trainer.compile=off",
    "trainer.accelerator=cpu",
]


def saved(folder: Path, kind: str = "qwen3", shards: str = "10GB", **said: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, "initializer_range": 0.1, **said})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(272, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


def trained(folder: Path, *words: str) -> Path:
    """A run folder."""
    from fp8cfg.__main__ import main

    base = [
        w for w in WIDE if not w.startswith(tuple(f"{word.partition('=')[0]}=" for word in words))
    ]
    assert main([*base, *words, f"log.dir={folder}"]) == 0
    (run,) = folder.iterdir()
    return run


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    )


def plain(run: Path) -> Any:
    """The run's model with plain weights, dequantized in float32."""
    from fp8cfg.training import trained_model

    found = trained_model.load(run, print)
    return fp8cfg.convert_back(found.model.float())
