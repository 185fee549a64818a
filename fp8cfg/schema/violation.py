"""Violations: the reasons why a recipe cannot run, and the values that would fix them.

The rules between keys, the backends and the parallel layout all report violations. A violation says
which values could change and to what. Composition knows who wrote each value and changes a preset
or a default that conflicts with what the user wrote (composition/precedence.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Violation:
    """A setting that a rule, a backend or the parallel layout rejects.

    Attributes:
        setting: The setting as the user writes it, `fp8.margin=1`.
        message: What is wrong with it and what to do.
        fixes: Short names of the keys that could change, each with its nearest legal value. The
            first key that may change does.
        caused_by: Short names of the keys that these values conflict with.
        source: What rejects the setting. A "layout" is never changed for the user.
        is_harmless: Whether the setting only does nothing, so that it is no mistake if a preset
            has it. It is one if the user wrote a key of `fixes`.
    """

    setting: str
    message: str
    fixes: Sequence[tuple[str, Any]] = ()
    caused_by: Sequence[str] = ()
    source: Literal["rule", "backend", "layout"] = "rule"
    is_harmless: bool = False

    def __str__(self) -> str:
        return f"{self.setting}: {self.message}"

    def is_error(self, written: Collection[str]) -> bool:
        """Whether it rejects a recipe in which the user wrote these keys, by their short names."""
        return not self.is_harmless or any(key in written for key, _ in self.fixes)
