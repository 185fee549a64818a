"""Backend registry: shipped and installed backends by name; each one's rules and code are imported on first use."""

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
    "names",
    "preference",
    "problem",
    "rules",
    "used",
]


def preference() -> tuple[str, ...]:
    """The order in which backend=auto tries the backends. Backends of installed packages that cannot be loaded are left out."""
    return tuple(name for name in backends.ordered() if exists(name))


def exists(name: str) -> bool:
    """Whether there is a backend `name` whose rules can be loaded."""
    return not problem(name)


def problem(name: str) -> str:
    """The reason why backend `name` cannot be used, without the leading `backend=name`; empty where it can."""
    try:
        rules(name)
    except ConfigError as e:
        return e.problems[0].removeprefix(f"backend={name}: ")
    return ""


def rules(name: str) -> Rules:
    """The rules of backend `name`; loads no torch. Raises ConfigError where an installed package's rules cannot be loaded."""
    found: Rules = backends.part(name, "rules")
    return found


def backend(name: str) -> Backend:
    """The code of backend `name`. Raises ConfigError as `rules` does."""
    found: Backend = backends.part(name, "backend")
    return found


def used() -> Iterator[Backend]:
    """The backends whose code this process has loaded; no model can have layers of any other."""
    return (backend(name) for name in names() if backends.loaded(name))
