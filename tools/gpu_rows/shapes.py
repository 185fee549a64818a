"""Shapes and words of the cases of tools/bench_gpu.py, of which estimate_gpu.py has estimates; the goals on an H200."""

from __future__ import annotations

from typing import Any

EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
WORDS = {
    "bf16": ["precision=bf16"],
    "delayed": ["precision=bf16_fp8"],
    "current": ["precision=bf16_fp8_current", EVERYWHERE],
    "row": ["precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"],
    "block": ["precision=bf16_fp8_block", "fp8.format=e4m3"],
    "mxfp8": ["precision=bf16_mxfp8"],
    "nvfp4": ["precision=bf16_nvfp4"],
}
BLACKWELL = ("mxfp8", "nvfp4")
"""Scalings that a GPU multiplies from compute capability 10.0 on."""
SHAPES: dict[bool, dict[str, Any]] = {
    False: {
        "linear": (15872, 4096, 16384),
        "block": ["recipe=llama_8b"],
        "1b": [
            "recipe=llama_1b",
            "model.seq_length=2048",
            "trainer.micro_batch_size=4",
            "trainer.global_batch_size=4",
        ],
        "8b": [
            "recipe=llama_8b",
            "model.num_layers=4",
            "trainer.strategy.context_parallel_size=1",
            "trainer.micro_batch_size=1",
            "trainer.global_batch_size=1",
        ],
    },
    True: {
        "linear": (512, 256, 512),
        "block": ["recipe=llama_tiny", "model.seq_length=256"],
        "1b": [
            "recipe=llama_tiny",
            "model.num_layers=2",
            "model.hidden_size=128",
            "model.ffn_hidden_size=256",
            "model.seq_length=64",
            "trainer.micro_batch_size=4",
            "trainer.global_batch_size=4",
        ],
        "8b": [
            "recipe=llama_tiny",
            "model.num_layers=1",
            "model.hidden_size=128",
            "model.ffn_hidden_size=512",
            "model.seq_length=64",
            "trainer.micro_batch_size=1",
            "trainer.global_batch_size=1",
        ],
    },
}
WHOLE = [
    "recipe=llama_8b",
    "model.seq_length=8192",
    "trainer.devices=1",
    "trainer.strategy.context_parallel_size=1",
    "trainer.micro_batch_size=1",
    "trainer.global_batch_size=8",
]
"""The step that "8b whole" stands for, on one GPU."""
GOALS = {
    ("linear", "delayed"): 1.75,
    ("linear", "current"): 1.65,
    ("linear", "block"): 1.45,
    ("8b whole", "delayed"): 1.35,
}
"""How many times as fast as compiled BF16 each case is to be on an H200, by case and scaling; "8b whole" has all layers. The
project set them, before anything was measured; there are none of other GPUs."""
