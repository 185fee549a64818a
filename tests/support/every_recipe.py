"""Every shipped recipe as a parameter of a test: in `make test` the smallest and the largest of each series, the others in `make test-all`."""

from __future__ import annotations

import re
from itertools import groupby
from typing import Any

import pytest

from fp8cfg.schema.recipe_registry import recipes

NAMES = [name for name in recipes() if name != "from_hf"]
"""Without the recipe whose shape is that of a folder: tests/models/test_hf_checkpoint.py."""


def _series(name: str) -> str:
    """A series of models in sizes, such as qwen25 of qwen25_7b; Llama 3's names are numbered by release and are one."""
    return re.sub(r"^llama3\d*$", "llama3", name.partition("_")[0])


def _ends(names: list[str]) -> set[str]:
    by_size = sorted(
        names,
        key=lambda name: recipes()[name]().model.num_layers * recipes()[name]().model.hidden_size,
    )
    return {by_size[0], by_size[-1]}


QUICK = {
    name
    for _, series in groupby(sorted(NAMES, key=_series), _series)
    for name in _ends(list(series))
}


def every_recipe(*words: str) -> list[Any]:
    """A case for each recipe: the words that compose it, followed by `words`."""
    return [
        pytest.param((f"recipe={name}", *words), marks=() if name in QUICK else pytest.mark.slow)
        for name in NAMES
    ]
