"""Llama 2, 3, 3.1 and 3.2 with published shapes and NeMo's training defaults, and a tiny version.

Shapes are from the published `config.json`. Training defaults and parallel layouts are from NeMo
2.0, `llm/recipes/llama*.py`, all in BF16. NeMo has no recipe for llama2_13b and llama2_70b, so they
have the layouts of llama2_7b and llama3_70b.
"""

from __future__ import annotations

from fp8cfg.recipes.pretraining import size
from fp8cfg.schema import hugging_face
from fp8cfg.schema.data import Data
from fp8cfg.schema.model import Model, RopeScaling
from fp8cfg.schema.presets import precision_preset
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.recipe_registry import recipe
from fp8cfg.schema.training import Checkpoint, Log, Optim, Trainer

LLAMA2 = Model(vocab_size=32000, seq_length=4096)
LLAMA3 = Model(vocab_size=128256, seq_length=8192, rotary_base=5e5)
LLAMA31 = LLAMA3.model_copy(update={"rope_scaling": RopeScaling(factor=8)})
LLAMA32 = LLAMA3.model_copy(
    update={"rope_scaling": RopeScaling(factor=32), "share_embeddings_and_output_weights": True}
)
FOUR_NODES = {"nodes": 4, "tp": 4, "pp": 4, "vp": 5, "cp": 2, "sp": True}
SIXTY_FOUR_NODES = {"nodes": 64, "tp": 8, "pp": 8, "vp": 2, "cp": 4, "sp": True}


hugging_face.family("llama", "LlamaForCausalLM", Model(layernorm_epsilon=1e-6))

# Shapes are layers, hidden size, FFN size, attention heads, query groups and init std.
llama2_7b = size(
    "llama2_7b",
    LLAMA2,
    (32, 4096, 11008, 32, 32, 0.02),
    "Llama 2 7B, one node, tensor parallel 2.",
    tp=2,
)
llama2_13b = size(
    "llama2_13b",
    LLAMA2,
    (40, 5120, 13824, 40, 40, 0.02),
    "Llama 2 13B, one node, tensor parallel 2.",
    tp=2,
)
llama2_70b = size(
    "llama2_70b",
    LLAMA2,
    (80, 8192, 28672, 64, 8, 0.02),
    "Llama 2 70B, four nodes, tensor parallel 4, pipeline parallel 4.",
    **FOUR_NODES,
)
llama3_8b = size(
    "llama3_8b",
    LLAMA3,
    (32, 4096, 14336, 32, 8, 0.01),
    "Llama 3 8B, one node, context parallel 2.",
    cp=2,
    recompute="selective",
)
llama3_70b = size(
    "llama3_70b",
    LLAMA3,
    (80, 8192, 28672, 64, 8, 0.008944),
    "Llama 3 70B, four nodes, tensor parallel 4, pipeline parallel 4, context parallel 2.",
    recompute="selective",
    **FOUR_NODES,
)
llama31_8b = size(
    "llama31_8b",
    LLAMA31,
    (32, 4096, 14336, 32, 8, 0.02),
    "Llama 3.1 8B, one node, context parallel 2.",
    cp=2,
    recompute="selective",
)
llama31_70b = size(
    "llama31_70b",
    LLAMA31,
    (80, 8192, 28672, 64, 8, 0.02),
    "Llama 3.1 70B, four nodes, tensor parallel 4, pipeline parallel 4, context parallel 2.",
    recompute="selective",
    **FOUR_NODES,
)
llama31_405b = size(
    "llama31_405b",
    LLAMA31,
    (126, 16384, 53248, 128, 8, 0.02),
    "Llama 3.1 405B, 64 nodes, tensor parallel 8, pipeline parallel 8, context parallel 4.",
    recompute="selective",
    **SIXTY_FOUR_NODES,
)
llama32_1b = size(
    "llama32_1b", LLAMA32, (16, 2048, 8192, 32, 8, 0.02), "Llama 3.2 1B, one node, tied embeddings."
)
llama32_3b = size(
    "llama32_3b", LLAMA32, (28, 3072, 8192, 24, 8, 0.02), "Llama 3.2 3B, one node, tied embeddings."
)


def _renamed(base: Recipe, name: str) -> Recipe:
    base.name = name
    return base


@recipe
def llama_1b() -> Recipe:
    """Short for llama32_1b."""
    return _renamed(llama32_1b(), "llama_1b")


@recipe
def llama_3b() -> Recipe:
    """Short for llama32_3b."""
    return _renamed(llama32_3b(), "llama_3b")


@recipe
def llama_8b() -> Recipe:
    """Short for llama31_8b."""
    return _renamed(llama31_8b(), "llama_8b")


@recipe
def llama_70b() -> Recipe:
    """Short for llama31_70b."""
    return _renamed(llama31_70b(), "llama_70b")


@recipe
def llama_405b() -> Recipe:
    """Short for llama31_405b."""
    return _renamed(llama31_405b(), "llama_405b")


@recipe
def llama_tiny() -> Recipe:
    """3.3 million parameters on bytes of the standard library: trains visibly on two CPU cores in a minute."""
    return Recipe(
        name="llama_tiny",
        data=Data(name="stdlib"),
        optim=Optim(lr=3e-3, warmup_steps=20),
        trainer=Trainer(
            plugins=precision_preset("bf16"),
            max_steps=100,
            val_check_interval=50,
            limit_val_batches=4,
        ),
        checkpoint=Checkpoint(every_n_steps=50),
        log=Log(every_n_steps=10),
    )
