"""The backends by name, shipped and from installed packages; the rules and the code of each are imported when first asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fp8cfg.backends import REFERENCE
from fp8cfg.config import backend_capabilities
from fp8cfg.config.backend_capabilities import capabilities, gathering, names
from fp8cfg.config.errors import ConfigError

if TYPE_CHECKING:
    from fp8cfg.backends.protocol import Backend, Rules

__all__ = ["REFERENCE", "backend", "capabilities", "exists", "gathering", "names", "preference", "problem", "rules", "used"]


def preference() -> tuple[str, ...]:
    """The order in which backend=auto tries them. One of an installed package that cannot be loaded is left out."""
    return tuple(name for name in backend_capabilities.ordered() if exists(name))


def exists(name: str) -> bool:
    """Whether there is a backend `name`, and its rules can be loaded."""
    return not problem(name)


def problem(name: str) -> str:
    """Why there is no backend `name`: a line without the word that names it; empty where there is one."""
    try:
        rules(name)
    except ConfigError as e:
        return e.problems[0].removeprefix(f"backend={name}: ")
    return ""


def rules(name: str) -> Rules:
    """What backend `name` can do; loads no torch. Raises ConfigError where that of an installed package cannot be loaded."""
    found: Rules = backend_capabilities.part(name, "rules")
    return found


def backend(name: str) -> Backend:
    """The code of backend `name`. Raises ConfigError as `rules` does."""
    found: Backend = backend_capabilities.part(name, "backend")
    return found


def used() -> Iterator[Backend]:
    """The backends whose code this process has loaded: no model has layers of another one."""
    return (backend(name) for name in names() if backend_capabilities.loaded(name))
