"""Effect of a key under a recipe: the validation rules are run with the key changed on a copy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fp8cfg.backends.backend_choice import Hardware, choose
from fp8cfg.composition.flatten import assigned, flat
from fp8cfg.config import rules
from fp8cfg.config.errors import ConfigError
from fp8cfg.config.key_names import PLUGIN, short
from fp8cfg.config.recipe import Recipe
from fp8cfg.config.storage import as_sharded, resolved, sharding
from fp8cfg.layer_plan import plan
from fp8cfg.report.schema_json import key_schema

HARDWARE = (Hardware("cpu"), Hardware("cuda", (9, 0), (13, 0)), Hardware("cuda", (10, 0), (13, 0)))
"""A CPU, Hopper and Blackwell: what one of them can run is no fault of a recipe."""
_INERT, _LATER = ": has no effect", "not in this version"


def refusals(recipe: Recipe, written: Collection[str] = ()) -> list[str]:
    """Every reason, on whatever hardware, against `recipe`: its rules, its layer patterns, and what this version does not
    have. `written` are the keys, by their short names, that the user wrote."""
    lines = _problems(lambda: rules.check(recipe, written))
    if not lines:  # a plan needs a model that can be
        lines += _problems(lambda: plan(recipe))
    return lines + min((_refused_on(recipe, hardware) for hardware in HARDWARE), key=len)


def _refused_on(recipe: Recipe, hardware: Hardware) -> list[str]:
    every, adapters = recipe.log.fp8_stats_every_n_steps, recipe.lora.enabled
    precision = as_sharded(recipe.precision, _ranks(recipe))
    return _problems(
        lambda: choose(precision, hardware, statistics=every, adapters=adapters, here=False)
    )


def effect(recipe: Recipe, key: str, written: Collection[str] = ()) -> str:
    """What the full `key` does under `recipe`, of which the user wrote the keys `written`, in one line."""
    said = [line for line in refusals(recipe, written) if _about(line, key)]
    if said:
        return f"refused: {said[0]}"
    value = flat(recipe)[key]
    if value != flat(Recipe())[key]:  # what did nothing would be refused, if the user wrote it
        tacit = _answer(recipe, key, value) or ""
        return _none(tacit) if _INERT in tacit else "takes effect"
    others, complete = _others(key_schema(key), value)
    answers = [line for other in others if (line := _answer(recipe, key, other)) is not None]
    if answers and all(_INERT in line for line in answers):
        return _none(answers[0])
    if _resolved(recipe, key) or not all(answers) or not complete:
        return _resolved(recipe, key) or "takes effect"
    reasons = [line.partition(": ")[2] for line in answers if _LATER not in line]
    return f"other values are refused: {reasons[0]}" if reasons else f"other values are {_LATER}"


def _ranks(recipe: Recipe) -> int:
    """The ranks that hold the same parameters where the recipe is meant to run."""
    t = recipe.trainer
    return max(
        1,
        t.num_nodes
        * t.devices
        // (t.strategy.tensor_model_parallel_size * t.strategy.pipeline_model_parallel_size),
    )


def _none(line: str) -> str:
    return "no effect" + line.partition(_INERT)[2].replace("; drop it or ", "; ")


def _answer(recipe: Recipe, key: str, value: Any) -> str | None:
    """The line about `key` once it is changed to `value`, that it does nothing before others: an empty one where there is
    none, None where the schema refuses the value."""
    try:
        lines = [
            line
            for line in refusals(assigned(recipe, {key: value}), {short(key)})
            if _about(line, key)
        ]
    except ConfigError:
        return None
    return next((line for line in lines if _INERT in line), lines[0] if lines else "")


def _problems(check: Callable[[], object]) -> list[str]:
    try:
        check()
    except ConfigError as e:
        return e.problems
    return []


def _about(line: str, key: str) -> bool:
    return line.startswith((f"{short(key)}=", f"{short(key)}:"))


def _others(schema: dict[str, Any], value: Any) -> tuple[list[Any], bool]:
    """Other values than `value` that a key could have, and whether they are all; some may be out of its bounds."""
    if "anyOf" in schema:
        found = [_others(one, value) for one in schema["anyOf"] if one != {"type": "null"}]
        return [v for values, _ in found for v in values], all(complete for _, complete in found)
    if "enum" in schema:
        return [v for v in schema["enum"] if v != value], True
    if schema["type"] == "boolean":
        return [not value], True
    if schema["type"] in ("integer", "number"):
        base = value or 1
        return [base * 2, base + 1, base / 2], False
    return [v for v in ("x", ("*",), (0.5, 0.5)) if v != value], False


def _resolved(recipe: Recipe, key: str) -> str:
    """What a value that leaves the choice open comes to, or an empty string."""
    columns = {
        f"{PLUGIN}.storage.{column}": codec for column, codec in resolved(recipe.precision).items()
    }
    if key in columns and flat(recipe)[key] == "auto":
        return f"auto is {columns[key]} under this recipe"
    m, o = recipe.model, recipe.optim
    if key == f"{PLUGIN}.storage.shard" and recipe.storage.shard == "auto":
        ranks = _ranks(recipe)
        return (
            f"auto is {sharding(recipe.precision, ranks)} on {ranks} data-parallel"
            f" rank{'s' * (ranks > 1)} under this recipe"
        )
    if key == "model.kv_channels" and m.kv_channels is None:
        return (
            f"null is {m.head_dim}, model.hidden_size={m.hidden_size} /"
            f" model.num_attention_heads={m.num_attention_heads}"
        )
    if key == "optim.min_lr" and o.min_lr is None:
        return f"null is {o.end_lr:g}, 0.1 x optim.lr={o.lr:g}"
    return ""
