"""Summary of a recipe's training data, and a check against large models on toy data."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from fp8cfg.models.config import parameter_shapes
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema.data import SHIPPED, Data
from fp8cfg.schema.hub import BYTES, TOKENIZER, chosen_tokenizer
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.tables import amount

LARGE = 100_000_000
"""Parameters above which training on bytes or on a shipped corpus is probably a mistake.

The tiny recipes have 3 million.
"""
CORPORA = {
    "stdlib": "the source of Python's standard library",
    "tiny": "a small text that fp8cfg ships",
}
"""Corpora without data.path, and their description."""


def summarize_data(recipe: Recipe) -> dict[str, Any]:
    """Returns the training data as plain data: kind, paths, weights of a mixture and tokenizer.

    A smoke run trains on the shipped text.
    """
    data = recipe.data
    # `fp8cfg check` does not cut a smoke run, so that data.name may still be the full corpus.
    if recipe.trainer.smoke:
        data = Data(name="tiny", tokenizer=data.tokenizer)
    paths = [part["path"] for part in data.mixture]
    if data.path:
        paths.append(data.path)
    return {
        "name": data.name,
        "paths": paths,
        "weights": [part["weight"] for part in data.mixture],
        "validation_path": data.validation_path,
        "tokenizer": tokenizer_name(recipe),
    }


def data_line(recipe: Recipe) -> str:
    """Returns the `data:` line of a report, without reading the data."""
    data = summarize_data(recipe)
    place = ", ".join(data["paths"]) or "data.path=null"
    if data["paths"] and data["name"] != "tokens":
        place += " (rows not read)"
    return describe_data(recipe, CORPORA.get(data["name"], place))


def describe_data(recipe: Recipe, place: str) -> str:
    """Returns the `data:` line of a report.

    Args:
        recipe: The recipe.
        place: Description of the data, such as its paths or its number of rows.
    """
    data = summarize_data(recipe)
    name = data["tokenizer"]
    line = f"data: {data['name']}, {place}"
    if not name:
        return line
    if _lacks_tokenizer(name):
        return f"{line}, no {TOKENIZER[0]} in {name}"
    return f"{line}, tokenizer {name}"


def _lacks_tokenizer(name: str) -> bool:
    """Whether `name` is a local folder without a tokenizer."""
    # A path that does not exist here may exist on the cluster. It is not reported.
    folder = Path(name).expanduser()
    return name != BYTES and folder.is_dir() and not (folder / TOKENIZER[0]).is_file()


def tokenizer_name(recipe: Recipe) -> str | None:
    """Returns the name of the tokenizer, None if it is unknown.

    Token files do not record their tokenizer. Other data without a tokenizer trains on bytes.
    """
    is_unknown = recipe.data.name == "tokens" and recipe.data.tokenizer is None
    tokenizer = chosen_tokenizer(recipe)
    if not tokenizer and not is_unknown:
        return BYTES
    return tokenizer


def unintended_data(recipe: Recipe) -> list[str]:
    """Returns an error line if a large model would train on toy data by default.

    Toy data is a shipped corpus, or bytes without data.tokenizer=bytes. Smoke runs are exempt.
    """
    if not _uses_default(recipe):
        return []
    data = recipe.data
    model = f"a model of {amount(_parameters(recipe))} parameters would train on"
    instead = f"(data.tokenizer={BYTES} if you mean bytes, trainer.smoke=true for a small run)"
    if data.name not in SHIPPED:
        return [f"data.tokenizer=null: {model} bytes; set data.tokenizer=FOLDER {instead}"]
    overrides = " ".join(missing_overrides(recipe))
    return [f"data={data.name}: {model} {CORPORA[data.name]}; set {overrides} {instead}"]


def missing_overrides(recipe: Recipe) -> list[str]:
    """Returns the overrides for real training data, with PATH and FOLDER to fill in.

    Empty if the recipe's own data is accepted.
    """
    if not _uses_default(recipe):
        return []
    overrides = []
    if recipe.data.name in SHIPPED:
        overrides += ["data=jsonl", "data.path=PATH"]
    if not (recipe.data.tokenizer or recipe.model.path or recipe.model.weights):
        overrides.append("data.tokenizer=FOLDER")
    return overrides


def _uses_default(recipe: Recipe) -> bool:
    """Whether a large model would train on a shipped corpus, or on bytes by default."""
    data = recipe.data
    if recipe.trainer.smoke or data.tokenizer == BYTES or data.name == "tokens":
        return False
    if data.name not in SHIPPED and chosen_tokenizer(recipe):
        return False
    return _parameters(recipe) > LARGE


def _parameters(recipe: Recipe) -> int:
    """Number of parameters of the model, without adapters."""
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))
