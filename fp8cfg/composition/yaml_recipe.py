"""Recipe YAML: the values that a recipe file sets, by their full names; and writing a recipe as YAML.

recipe: llama_8b          # what it builds on: defaults_list.py
precision: bf16_fp8       # presets, by the names that the command line knows
fp8: {margin: 1}          # values, by short or full names
"""

from __future__ import annotations

from typing import Any

from fp8cfg.composition.flatten import deep_merge, listed, nested
from fp8cfg.config.errors import ConfigError, expect
from fp8cfg.config.files import dump_yaml
from fp8cfg.config.key_names import full
from fp8cfg.config.recipe import Recipe

_SCHEMA_LINE = "# A whole recipe of fp8cfg, as composed.\n"


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe as YAML text; `from_yaml` reads it back equal. Raises ConfigError for what is no Recipe."""
    expect("to_yaml", recipe, Recipe, "a Recipe, such as job.recipe")
    return _SCHEMA_LINE + dump_yaml(listed(recipe))


def full_names(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with short names at its top replaced by full ones. Raises ConfigError where one key is given both ways."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        tree = nested({full(key): value})
        twice = _common_leaf(out, tree)
        if twice:
            raise ConfigError(f"{twice}: given twice, under its short and its full name")
        out = deep_merge(out, tree)
    return out


def _common_leaf(a: Any, b: Any, at: str = "") -> str | None:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return at
    return next(
        (
            found
            for k in a
            if k in b and (found := _common_leaf(a[k], b[k], f"{at}.{k}".lstrip(".")))
        ),
        None,
    )
