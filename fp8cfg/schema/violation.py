"""Violations: the reasons why a recipe cannot run, and values to fix them.

The rules between keys, the backends and the parallel layout all report violations. A violation lists
keys and new values to choose from. Composition knows the origin of each value. It changes presets
and defaults in conflict with the user's overrides (composition/precedence.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Violation:
    """A setting that a rule, a backend or the parallel layout rejects.

    Attributes:
        setting: The setting as the user writes it, such as `fp8.margin=1`.
        message: The problem and what to do.
        fixes: Short names of keys to change, with the nearest legal value of each. Composition
            changes the first key with a lower rank than the conflicting keys.
        caused_by: Short names of the conflicting keys.
        source: Origin of the violation. A "layout" is never changed for the user.
        is_harmless: Whether the setting only has no effect. In a preset it is then no error. It is
            an error if the user wrote a key of `fixes`.
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
        """Returns whether it rejects the recipe.

        Args:
            written: Short names of the user's keys.
        """
        # Presets set keys for the general case. Only the user can mean a setting without effect.
        return not self.is_harmless or any(key in written for key, _ in self.fixes)
