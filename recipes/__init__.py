"""Recipes: per-model functions that each return a complete, typed Recipe.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b()

A module of this folder is a family; every function that it registers is here by name. A new family needs its line below.
"""

from typing import TYPE_CHECKING

from fp8cfg.recipes.from_hf import *  # noqa: F403
from fp8cfg.recipes.gemma import *  # noqa: F403
from fp8cfg.recipes.gpt import *  # noqa: F403
from fp8cfg.recipes.llama import *  # noqa: F403
from fp8cfg.recipes.mistral import *  # noqa: F403
from fp8cfg.recipes.nemotron import *  # noqa: F403
from fp8cfg.recipes.olmo import *  # noqa: F403
from fp8cfg.recipes.qwen import *  # noqa: F403
from fp8cfg.schema import recipe_registry
from fp8cfg.schema.errors import nearest

__all__ = recipe_registry.of_package(__name__)


if not TYPE_CHECKING:  # to a type checker a module with __getattr__ has every attribute

    def __getattr__(name: str) -> object:
        near = None if name.startswith("_") else nearest(name, __all__)
        if near:  # of an AttributeError, `from fp8cfg.recipes import` would lose the text
            raise ImportError(f"fp8cfg.recipes has no recipe {name!r}; did you mean {near!r}?")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
