"""Accelerate handler objects: TERecipeKwargs, MSAMPRecipeKwargs, AORecipeKwargs and the older FP8RecipeKwargs."""

from __future__ import annotations

import importlib
from typing import Any

from fp8cfg.config.errors import refuse_if
from fp8cfg.config.recipe import Recipe
from fp8cfg.interop.accelerate import config_file as accelerate
from fp8cfg.interop.accelerate.fp8_keys import (
    BACKENDS,
    DOUBTS,
    HANDLER,
    differs_under_torchao,
    engine,
    first_layer_runs,
    without_effect,
)
from fp8cfg.interop.key_table import (
    Dialect,
    Entry,
    NotHere,
    Read,
    Unsaid,
    Values,
    Written,
    runs_fp8,
)
from fp8cfg.interop.python_calls import call_in
from fp8cfg.interop.torchao.float8_config import TORCHAO, fields_of, made
from fp8cfg.interop.translation import read, write
from fp8cfg.interop.value_spellings import one_of, shown

_CLASSES = {"TERecipeKwargs": "TE", "MSAMPRecipeKwargs": "MSAMP", "AORecipeKwargs": "AO"}
NAMES = ("FP8RecipeKwargs", *_CLASSES)
_GATHER = "enable_fsdp_float8_all_gather"
_NO_FSDP = "has no effect without FSDP, which a handler does not say; here storage.shard=fsdp does"


def _prepare(theirs: dict[str, Any]) -> list[str]:
    own = str(theirs["backend"]).upper() == "AO" and "module_filter_func" not in theirs
    return without_effect(theirs) + (
        [first_layer_runs(shown("backend", theirs["backend"]))] if own else []
    )


def _refuse(ours: Values) -> list[str]:
    off = (
        []
        if runs_fp8(ours)
        else ["fp8.enabled=False: a handler of Accelerate's is for FP8; write precision=bf16_fp8"]
    )
    return off or accelerate.ACCELERATE.refuse(ours)


HANDLERS = Dialect(
    "Accelerate",
    (
        Entry("backend", lambda value: {"fp8.enabled": True, **one_of(value, BACKENDS)}, engine),
        *HANDLER,
    ),
    {
        "optimization_level": "opt_level",
        "amax_history_length": "amax_history_len",
        "amax_compute_algorithm": "amax_compute_algo",
    },
    unsaid={
        "pad_inner_dim": accelerate.ACCELERATE.unsaid["fp8_config.pad_inner_dim"],
        _GATHER: Unsaid(_NO_FSDP, (False,)),
    },
    prepare=_prepare,
    refuse=_refuse,
    why=accelerate.WHY,
    doubts=DOUBTS,
)


def from_handler(handler: Any, base: Recipe | None = None) -> Read:
    """The recipe that one of the four objects means, as `fp8cfg.interop.from_object` says."""
    name = type(handler).__name__
    backend = _CLASSES.get(name) or str(getattr(handler, "backend", None) or "TE").upper()
    if backend == "AO" and getattr(handler, "config", None) is not None:
        fields = fields_of(handler.config)
        gathers = fields.pop(_GATHER, False)
        found = read(TORCHAO, fields, base)
        code = getattr(handler, "module_filter_func", None)
        filtered = (
            "module_filter_func: Python code, which a recipe cannot name"
            if code
            else first_layer_runs("AORecipeKwargs")
        )
        lost = [*found.lost, filtered, *([f"{_GATHER}=True: {_NO_FSDP}"] if gathers else [])]
        return found._replace(lost=tuple(lost))
    given = {
        e.theirs: value for e in HANDLER if (value := getattr(handler, e.theirs, None)) is not None
    }
    if name == "FP8RecipeKwargs" and backend == "MSAMP":  # it fills in what only TE reads
        given = {k: v for k, v in given.items() if k == "opt_level"}
    return _taken(
        read(HANDLERS, {"backend": backend, **given}, base), name, getattr(handler, "backend", None)
    )


def from_call(text: str, base: Recipe | None = None) -> Read:
    """The recipe of the one call of a handler in Python text, which is read and not run; where there is none, that of the mixed
    precision of an Accelerator. Raises ConfigError where there is neither, and for keywords that no handler takes.
    """
    if not any(name in text for name in NAMES) and "Accelerator" in text:
        return read(
            accelerate.ACCELERATE,
            {
                "mixed_precision": (
                    call_in(text, ("Accelerator",), "class", ("mixed_precision",)).get(
                        "mixed_precision", "no"
                    )
                )
            },
            base,
        )
    given = call_in(text, NAMES, "handler of Accelerate")
    name = given.pop("class")
    found = read(HANDLERS, {"backend": _CLASSES.get(name, "TE"), **given}, base)
    refuse_if(found.unknown)
    return _taken(found, name, given.get("backend"))


def _taken(found: Read, name: str, backend: object) -> Read:
    """`found`, with a line on the backend that was taken where the old handler, which is for all three, says none."""
    if name in _CLASSES or backend is not None:
        return found
    line = (
        f"{name}.backend is not given: Accelerate takes the first that is installed; TE is taken"
        " here"
    )
    return found._replace(lost=(*found.lost, line))


def to_handler(recipe: Recipe) -> Written:
    """The handler that says what `recipe` does, as far as Accelerate can. Raises ConfigError as `to_accelerate` does, and
    NotHere where Accelerate, or the library that the handler is for, is not installed."""
    try:
        utils = importlib.import_module("accelerate.utils")
    except ImportError as e:
        raise NotHere(f"accelerate: cannot be imported here ({e})") from None
    written = write(HANDLERS, recipe)
    values = dict(written.value)
    backend = values.pop("backend")
    if backend == "AO":
        written = write(TORCHAO, recipe)
        values, written = (
            {"config": made(written.value)},
            written._replace(lost=(*written.lost, *differs_under_torchao())),
        )
    if "override_linear_precision" in values:
        values["override_linear_precision"] = tuple(values["override_linear_precision"])
    try:
        return Written(
            getattr(utils, next(name for name, of in _CLASSES.items() if of == backend))(**values),
            written.lost,
        )
    except ImportError as e:
        raise NotHere(f"accelerate: {e}") from None
