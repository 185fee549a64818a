"""Transformer Engine recipe objects, recipes as Python text, and the text that a recipe prints of itself."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from typing import Any

from fp8cfg.config.errors import refuse_if
from fp8cfg.config.recipe import Recipe
from fp8cfg.interop.key_table import NotHere, Read, Written
from fp8cfg.interop.python_calls import call_in
from fp8cfg.interop.te.quantizer_params import FP4, FP8, PRODUCTS, printed, said_by
from fp8cfg.interop.te.recipe import CLASSES, TE
from fp8cfg.interop.translation import read, write

NAMES = (*CLASSES.values(), "CustomRecipe")


def values_of(recipe: Any) -> dict[str, Any]:
    """The fields of a recipe object by name, formats as words, and what the parameters of its quantizers and products say."""
    name, every = type(recipe).__name__, (*FP8, *FP4, *PRODUCTS)
    found = {f.name: getattr(recipe, f.name) for f in dataclasses.fields(recipe)}
    found = {
        k: v.name if isinstance(v, enum.Enum) else v for k, v in found.items() if k not in every
    }
    return {
        "class": name,
        **found,
        **said_by(name, {k: vars(getattr(recipe, k)) for k in every if hasattr(recipe, k)}),
    }


def from_te(recipe: Any, base: Recipe | None = None) -> Read:
    """The recipe that an object of Transformer Engine's means, as `fp8cfg.interop.from_object` says."""
    return read(TE, values_of(recipe), base)


def to_te(recipe: Recipe) -> Written:
    """The genuine object, with power-of-two scales set where TE's layers read them, and every field of it read back. Raises
    NotHere where Transformer Engine cannot be imported, and ConfigError for a field that it did not take.
    """
    try:
        module = importlib.import_module("transformer_engine.common.recipe")
    except (ImportError, RuntimeError, OSError) as e:
        raise NotHere(
            f"transformer_engine: cannot be imported here ({str(e).splitlines()[0][:80]})"
        ) from None
    written = write(TE, recipe)
    given = dict(written.value)
    made = _class(module, given.pop("class"))(
        **{**given, "fp8_format": module.Format[given["fp8_format"]]}
    )
    power = _powers(given)
    for name in FP8 if power is not None else ():
        setattr(made, name, module.QParams(power_2_scale=power))
    back = values_of(made)
    refuse_if(
        [
            f"{k}={v}: Transformer Engine made {back.get(k)} of it"
            for k, v in given.items()
            if back.get(k, False) != v
        ]
    )
    return Written(made, written.lost)


def _class(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise NotHere(f"transformer_engine: this version has no {name}")
    return getattr(module, name)


def _powers(given: dict[str, Any]) -> bool | None:
    """Whether scales are powers of two, where that is a choice."""
    if "use_f32_scales" in given:
        return not given["use_f32_scales"]
    return given.get("use_power_2_scales")


def python_text(given: dict[str, Any]) -> str:
    """Python that makes the recipe of a written table, in TE's own terms."""
    fields = {
        k: f"Format.{v}" if k == "fp8_format" else repr(v) for k, v in given.items() if k != "class"
    }
    unusual = (
        _powers(given) is not (given["class"] == CLASSES["block"]) and _powers(given) is not None
    )
    names = [given["class"], "Format", *(["QParams"] if unusual else [])]
    lines = [
        f"from transformer_engine.common.recipe import {', '.join(names)}",
        "",
        f"recipe = {given['class']}(",
    ]
    lines += [*(f"    {k}={v}," for k, v in fields.items()), ")"]
    if unusual:
        lines.append("# TE's layers read these, not the switch above")
        lines += [f"recipe.{name} = QParams(power_2_scale={_powers(given)})" for name in FP8]
    return "\n".join(lines) + "\n"


def from_text(text: str) -> dict[str, Any]:
    """The fields of the recipe in Python text, which is read and not run, or of the line that a recipe prints of itself. Raises
    ConfigError where there is none, or where a value is no literal."""
    if "recipe_type=" in text:
        return printed(text)
    return call_in(text, NAMES, "recipe of Transformer Engine")
