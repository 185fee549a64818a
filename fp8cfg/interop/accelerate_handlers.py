"""Accelerate's FP8 handlers: objects of TERecipeKwargs and its siblings, and calls in Python text."""

from __future__ import annotations

import importlib
from typing import Any

from fp8cfg.interop.accelerate import ACCELERATE
from fp8cfg.interop.accelerate_backends import (
    BACKENDS,
    CAVEATS,
    HANDLER_ENTRIES,
    PAD_INNER_DIM,
    REASONS,
    drop_fields_of_other_backends,
    find_backend,
    find_export_errors,
    first_layer_remark,
    list_torchao_remarks,
)
from fp8cfg.interop.key_table import (
    Entry,
    KeyTable,
    NotHere,
    Read,
    Unsupported,
    Values,
    Written,
    format_setting,
    parse_choice,
    runs_fp8,
    unread_remark,
)
from fp8cfg.interop.python_source import list_unread_besides_call, read_call
from fp8cfg.interop.torchao import TORCHAO, make_config, read_config_fields
from fp8cfg.interop.translation import export_recipe, import_settings
from fp8cfg.schema.errors import refuse_if
from fp8cfg.schema.recipe import Recipe

_BACKENDS = {"TERecipeKwargs": "TE", "MSAMPRecipeKwargs": "MSAMP", "AORecipeKwargs": "AO"}
_OLD_HANDLER = "FP8RecipeKwargs"  # the older class for all three backends
CLASS_NAMES = (_OLD_HANDLER, *_BACKENDS)
_GATHER = "enable_fsdp_float8_all_gather"
_NEEDS_FSDP = "has no effect without FSDP, which a handler does not set; set storage.shard=fsdp"


def _prepare(settings: dict[str, Any]) -> list[str]:
    remarks = drop_fields_of_other_backends(settings)
    # A filter from the user replaces the one that skips the first layer.
    is_torchao = str(settings["backend"]).upper() == "AO"
    if is_torchao and "module_filter_func" not in settings:
        remarks.append(first_layer_remark(format_setting("backend", settings["backend"])))
    return remarks


def _find_export_errors(values: Values) -> list[str]:
    if not runs_fp8(values):
        return ["fp8.enabled=False: Accelerate's handlers are for FP8; set precision=bf16_fp8"]
    return find_export_errors(values)


HANDLERS = KeyTable(
    "Accelerate",
    (
        Entry(
            "backend",
            lambda setting: {"fp8.enabled": True, **parse_choice(setting, BACKENDS)},
            find_backend,
        ),
        *HANDLER_ENTRIES,
    ),
    aliases={
        "optimization_level": "opt_level",
        "amax_history_length": "amax_history_len",
        "amax_compute_algorithm": "amax_compute_algo",
    },
    unsupported={
        "pad_inner_dim": PAD_INNER_DIM,
        _GATHER: Unsupported(_NEEDS_FSDP, (False,)),
    },
    prepare=_prepare,
    export_errors=_find_export_errors,
    reasons=REASONS,
    caveats=CAVEATS,
)


def from_handler(handler: Any, base: Recipe | None = None) -> Read:
    """Imports a handler object. See `fp8cfg.interop.from_object`."""
    class_name = type(handler).__name__
    handler_backend = getattr(handler, "backend", None)
    backend = _BACKENDS.get(class_name) or str(handler_backend or "TE").upper()
    if backend == "AO" and getattr(handler, "config", None) is not None:
        return _from_torchao_handler(handler, base)
    settings: dict[str, Any] = {"backend": backend}
    for entry in HANDLER_ENTRIES:
        value = getattr(handler, entry.key, None)
        # FP8RecipeKwargs fills in TE's fields for each backend.
        is_filled_in = (
            class_name == _OLD_HANDLER and backend == "MSAMP" and entry.key != "opt_level"
        )
        if value is not None and not is_filled_in:
            settings[entry.key] = value
    imported = import_settings(HANDLERS, settings, base)
    return _with_remarks(imported, _missing_backend_remark(class_name, handler_backend))


def _from_torchao_handler(handler: Any, base: Recipe | None) -> Read:
    fields = read_config_fields(handler.config)
    gather = fields.pop(_GATHER, False)
    imported = import_settings(TORCHAO, fields, base)
    remarks = [first_layer_remark("AORecipeKwargs")]
    if getattr(handler, "module_filter_func", None):
        remarks = ["module_filter_func: is Python code, which a recipe cannot name"]
    if gather:
        remarks.append(f"{_GATHER}=True: {_NEEDS_FSDP}")
    return _with_remarks(imported, remarks)


def read_handler_call(text: str, base: Recipe | None = None) -> Read:
    """Imports the call of a handler, or of an Accelerator if there is no handler.

    Args:
        text: Python with exactly one such call.
        base: The recipe for all other values. Its precision is replaced.

    Raises:
        ConfigError: There is no call or several, or the handler has no such keyword.
    """
    has_handler = any(name in text for name in CLASS_NAMES)
    if "Accelerator" in text and not has_handler:
        classes, only = ("Accelerator",), ("mixed_precision",)
        settings = read_call(text, classes, "class", only)
        precision = settings.get("mixed_precision", "no")
        imported = import_settings(ACCELERATE, {"mixed_precision": precision}, base)
        return _with_remarks(imported, unread_remark(list_unread_besides_call(text, classes, only)))
    settings = read_call(text, CLASS_NAMES, "handler of Accelerate")
    class_name = settings.pop("class")
    backend = settings.get("backend")
    imported = import_settings(
        HANDLERS, {"backend": _BACKENDS.get(class_name, "TE"), **settings}, base
    )
    refuse_if(imported.unknown)
    remarks = _missing_backend_remark(class_name, backend)
    remarks += unread_remark(list_unread_besides_call(text, CLASS_NAMES))
    return _with_remarks(imported, remarks)


def _with_remarks(imported: Read, remarks: list[str]) -> Read:
    return imported._replace(lost=(*imported.lost, *remarks))


def _missing_backend_remark(class_name: str, backend: object) -> list[str]:
    if class_name in _BACKENDS or backend is not None:
        return []
    return [
        f"{class_name}.backend is missing: Accelerate uses the first installed backend; imported as"
        " TE"
    ]


def to_handler(recipe: Recipe) -> Written:
    """Exports a recipe as a handler object.

    Raises:
        ConfigError: Accelerate cannot express the recipe.
        NotHere: Accelerate or the library of the handler is not installed.
    """
    try:
        utils = importlib.import_module("accelerate.utils")
    except ImportError as error:
        raise NotHere(f"accelerate: cannot be imported ({error})") from None
    written = export_recipe(HANDLERS, recipe)
    arguments = dict(written.value)
    backend = arguments.pop("backend")
    lost = written.lost
    if backend == "AO":
        config = export_recipe(TORCHAO, recipe)
        arguments = {"config": make_config(config.value)}
        lost = (*config.lost, *list_torchao_remarks())
    if "override_linear_precision" in arguments:
        arguments["override_linear_precision"] = tuple(arguments["override_linear_precision"])
    class_name = {name: cls for cls, name in _BACKENDS.items()}[backend]
    try:
        handler = getattr(utils, class_name)(**arguments)
    except ImportError as error:
        raise NotHere(f"accelerate: {error}") from None
    return Written(handler, lost)
