"""Recipes: per-model functions that each return a complete, typed Recipe.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b()
"""

from fp8cfg.recipes.llama import (
    llama2_7b,
    llama2_13b,
    llama2_70b,
    llama3_8b,
    llama3_70b,
    llama31_8b,
    llama31_70b,
    llama31_405b,
    llama32_1b,
    llama32_3b,
    llama_1b,
    llama_3b,
    llama_8b,
    llama_70b,
    llama_405b,
    llama_tiny,
)

__all__ = [
    "llama2_7b", "llama2_13b", "llama2_70b", "llama3_8b", "llama3_70b", "llama31_8b", "llama31_70b", "llama31_405b",
    "llama32_1b", "llama32_3b", "llama_1b", "llama_3b", "llama_8b", "llama_70b", "llama_405b", "llama_tiny",
]
