"""Backend registry: shipped and installed backends by name, imported on first use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.backends import REFERENCE
from fp8cfg.schema import backends
from fp8cfg.schema.backends import capabilities, gathering, names
from fp8cfg.schema.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.backends.protocol import Backend, Rules

__all__ = [
    "REFERENCE",
    "backend",
    "capabilities",
    "exists",
    "gathering",
    "loaded_backends",
    "names",
    "preference",
    "problem",
    "rules",
]


def preference() -> tuple[str, ...]:
    """Returns the order of the backends for backend=auto.

    Backends with an import error are left out.
    """
    return tuple(name for name in backends.ordered() if exists(name))


def exists(name: str) -> bool:
    """Whether backend `name` exists and its rules can be loaded."""
    return not problem(name)


def problem(name: str) -> str:
    """Returns why backend `name` cannot be loaded, or ""."""
    try:
        rules(name)
    except ConfigError as e:
        # Callers add the setting to the message themselves.
        return e.problems[0].removeprefix(f"backend={name}: ")
    return ""


def rules(name: str) -> Rules:
    """Returns the rules of backend `name`. Does not import torch.

    Raises:
        ConfigError: There is no such backend, or its rules cannot be loaded.
    """
    loaded: Rules = backends.part(name, "rules")
    return loaded


def backend(name: str) -> Backend:
    """Returns the code of backend `name`. Raises ConfigError like `rules`."""
    loaded: Backend = backends.part(name, "backend")
    return loaded


def loaded_backends() -> Iterator[Backend]:
    """Yields the backends loaded by this process.

    A model cannot have layers of any other backend. This is enough to find all converted layers.
    """
    for name in names():
        if backends.loaded(name):
            yield backend(name)
