"""The backends by name; each is imported when it is first asked for."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from fp8cfg.backends.protocol import Backend, Rules

PREFERENCE = ("msamp", "te", "torchao", "native")
"""The order in which backend=auto tries them."""
OWN_OPTIMIZER = ("msamp",)
"""Those that hold weights in layers of their own and step them too: their code has `optimizer`."""


def exists(name: str) -> bool:
    """Whether this version has backend `name`."""
    return (Path(__file__).parent / name / "rules.py").is_file()


def rules(name: str) -> Rules:
    """What backend `name` can do; loads no torch."""
    return cast("Rules", importlib.import_module(f"fp8cfg.backends.{name}.rules"))


def backend(name: str) -> Backend:
    """The code of backend `name`."""
    return cast("Backend", importlib.import_module(f"fp8cfg.backends.{name}.backend"))
