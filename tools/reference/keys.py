"""Key reference: type and unit, default, example, meaning and source of every key."""

from __future__ import annotations

import re
from typing import Any

from fp8cfg.composition.recipe_yaml import is_node
from fp8cfg.report.key_examples import example
from fp8cfg.report.key_explanation import shown, type_text
from fp8cfg.report.recipe_export import key_schema
from fp8cfg.schema.fp8 import ONLY_UNDER
from fp8cfg.schema.recipe import ALIASES, fields, short
from tools.reference.markdown import code, table

UNITS = {
    r"\boptimizer steps?\b|\bsteps of\b|\boverflowing steps\b": "optimizer steps",
    r"^samples\b": "samples",
    r"\btokens\b": "tokens",
    r"^GPUs\b|^machines\b": "",
    r"^transformer layers\b": "layers",
    r"\bshare of\b": "share, 0 to 1",
    r"\bglobal batches\b": "batches",
    r"^checkpoints\b|^newest checkpoints\b": "checkpoints",
    r"\bdivided by 2\^margin\b": "powers of two",
}
"""Words of a description that say what a number counts, the first that is found."""
SOURCE = re.compile(r"\bDefault .*?\((?!\d+x\d+)([^()]*)\)")
PLAIN_DEFAULT = re.compile(r"\s*Default [^\s:;]+( \([^()]*\))?\.?$")
"""A default that says no more than the columns of the table do."""


HEAD = """# Keys

All keys of a recipe. `fp8cfg explain KEY` prints one key, its effect in your recipe, and who set it.
You can use short names: {aliases}.

An example is a value other than the default. Write it as `key=value` on the command line, as
`recipe.key = value` in Python, or nested in a YAML file. The project or paper after a default is its
source.
"""


def page() -> str:
    aliases = ", ".join(f"`{alias}` for `{name}`" for alias, name in ALIASES.items())
    parts = [HEAD.format(aliases=aliases)]
    for node in ["", *(key for key in fields() if is_node(key))]:
        if rows := [
            _row(key) for key in fields() if key.rpartition(".")[0] == node and not is_node(key)
        ]:
            about = (
                " ".join((fields()[node].description or "").split())
                if node
                else "The recipe itself."
            )
            parts.append(
                f"## {short(node) or 'top level'}\n\n{about}\n\n"
                + table(["key", "meaning", "type and default", "example"], rows)
                + "\n"
            )
    return "\n".join(parts)


def _row(key: str) -> list[str]:
    schema = key_schema(key)
    meaning, source = described(" ".join(schema["description"].split()))
    node, _, leaf = key.rpartition(".")
    if short(node) == "fp8" and leaf in ONLY_UNDER:
        meaning += f" Only under `fp8.scaling` {' or '.join(ONLY_UNDER[leaf])}."
    counted = unit(schema, meaning)
    parts = [_type(schema)]
    if counted:
        parts.append(counted)
    default = f"default {code(shown(schema['default']))}"
    parts.append(default if source == "fp8cfg" else f"{default} ({_code_free(source)})")
    return [
        code(short(key)),
        _code_free(meaning),
        "; ".join(parts),
        code((example(key) or "").partition("=")[2]),
    ]


def _type(schema: dict[str, Any]) -> str:
    """Returns the type in words, with choices as code."""
    text = type_text(schema)
    for part in [*schema.get("anyOf", [schema]), schema.get("items", {})]:
        choices = [shown(choice) for choice in part.get("enum", [])]
        text = text.replace(", ".join(choices), " ".join(map(code, choices)))
    return text


def described(text: str) -> tuple[str, str]:
    """The meaning in a description, and the source of its default, which stands in parentheses after it."""
    found = SOURCE.search(text)
    return PLAIN_DEFAULT.sub("", text), found[1] if found else "fp8cfg"


def unit(schema: dict[str, Any], meaning: str) -> str:
    """What the number counts; empty for what has no unit, and for what is no number."""
    kinds = {one.get("type") for one in schema.get("anyOf", [schema])}
    if not kinds & {"integer", "number"}:
        return ""
    return next(
        (name for words, name in UNITS.items() if re.search(words, meaning, re.IGNORECASE)), ""
    )


def _code_free(text: str) -> str:
    return text.replace("*", "\\*").replace("<", "\\<")
