"""Override strategies for Hypothesis: any valid value of any key, and override words that set it."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.report.recipe_export import key_schema
from fp8cfg.schema.keys import short
from fp8cfg.schema.recipe import Recipe

KEYS = sorted(flat(Recipe()))
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,12}", fullmatch=True)


def value(key: str) -> st.SearchStrategy[Any]:
    """Any value that the schema takes for the full `key`, as YAML has it."""
    if key == "log.profile":
        # START is at most END, which a schema of both cannot say.
        ranges = st.tuples(st.integers(1, 10**6), st.integers(0, 10**6))
        return st.none() | ranges.map(lambda pair: [pair[0], pair[0] + pair[1]])
    return NAMES if key == "name" else _of(key_schema(key))


def _of(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if "anyOf" in schema:
        return st.one_of([_of(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "prefixItems" in schema:
        return st.tuples(*map(_of, schema["prefixItems"])).map(list)
    if "items" in schema and schema["items"].get("type") == "object":
        return st.lists(
            st.fixed_dictionaries(
                {name: _of(one) for name, one in schema["items"]["properties"].items()}
            ),
            max_size=3,
        )
    if "enum" in schema.get("items", {}):
        return st.lists(_of(schema["items"]), unique=True, max_size=3)
    if schema["type"] == "integer":
        return st.integers(schema.get("minimum", 0), schema.get("maximum", 10**6))
    if schema["type"] == "number":
        low, high = (
            schema.get("minimum", schema.get("exclusiveMinimum", 0)),
            schema.get("maximum", schema.get("exclusiveMaximum")),
        )
        return st.floats(
            low,
            high,
            exclude_min="exclusiveMinimum" in schema,
            exclude_max="exclusiveMaximum" in schema,
            allow_infinity=False,
            allow_nan=False,
            allow_subnormal=False,
        )
    return {
        "boolean": st.booleans(),
        "null": st.none(),
        "string": st.text("abcé/.*_- '#:", min_size=1, max_size=8),
        "array": st.lists(st.text("abc.*_-", min_size=1, max_size=6), max_size=3),
    }[schema["type"]]


def spelled(given: Any) -> str:
    """`given` as a word of the command line spells it."""
    if given is None or isinstance(given, bool):
        return {None: "null", True: "true", False: "false"}[given]
    if isinstance(given, list):
        return "[" + ",".join(map(spelled, given)) + "]"
    if isinstance(given, dict):
        return "{" + ",".join(f"{key}: {spelled(one)}" for key, one in given.items()) + "}"
    return "'" + given.replace("'", "\\'") + "'" if isinstance(given, str) else repr(given)


@st.composite
def value_words(draw: st.DrawFn, keys: list[str] = KEYS) -> tuple[str, dict[str, Any]]:
    """A word that sets one key, by either of its names or inside a mapping, with the full keys and values that it sets."""
    key = draw(st.sampled_from(keys))
    given = draw(value(key))
    node, _, leaf = draw(st.sampled_from([key, short(key)])).rpartition(".")
    if node and draw(st.booleans()):
        return f"{node}={{{leaf}: {spelled(given)}}}", {key: given}
    return f"{node}.{leaf}={spelled(given)}".lstrip("."), {key: given}
