"""Recipes: per-model functions that each return a complete, typed Recipe.

    from fp8cfg.recipes import llama_8b
    recipe = llama_8b()

Each module of this folder is a model family. This package has all of their recipe functions by
name. To add a family, write its module and import it below.
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


# A type checker would accept any name from a module with __getattr__.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Suggests the nearest recipe for an unknown name."""
        similar = None
        if not name.startswith("_"):
            similar = nearest(name, __all__)
        if similar:
            # `from fp8cfg.recipes import NAME` would replace the text of an AttributeError.
            raise ImportError(f"fp8cfg.recipes has no recipe {name!r}; did you mean {similar!r}?")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*(name for name in globals() if name.startswith("__")), *__all__])
