"""Python API reference: signature and docstring of each public name of `fp8cfg`."""

from __future__ import annotations

import inspect
from typing import Any

import fp8cfg
from fp8cfg.schema.node import Node
from tools.reference.markdown import code, plain, table

NO_OWN = ("Node", "BaseModel")


def page() -> str:
    found = {name: getattr(fp8cfg, name) for name in fp8cfg.__all__}
    functions = {n: o for n, o in found.items() if inspect.isfunction(o) and not _preset(n)}
    nodes = {n: o for n, o in found.items() if inspect.isclass(o) and issubclass(o, Node)}
    classes = {n: o for n, o in found.items() if inspect.isclass(o) and n not in nodes}
    presets = [n for n in found if _preset(n)]
    modules = {n: o for n, o in found.items() if inspect.ismodule(o)}
    return "\n\n".join(
        [
            "# Python",
            "The names of `fp8cfg.__all__`. `import fp8cfg` loads neither torch, Hydra nor Fiddle; each name is imported on first "
            "use. `fp8cfg.recipes` has a function for each [recipe](presets.md#recipe).",
            "## Functions",
            *(_function(n, o) for n, o in functions.items()),
            "## Classes",
            *(_class(n, o) for n, o in classes.items()),
            "## Nodes of a recipe",
            "Typed, checked at construction and at assignment; their fields are the [keys](keys.md).",
            table(["class", "contents"], [[code(n), _first(o)] for n, o in nodes.items()]),
            "## Precision presets",
            "Functions without arguments that return a `Precision`: "
            + ", ".join(code(n) for n in presets)
            + ". [What each sets](presets.md#precision).",
            *(
                [
                    "## Modules",
                    table(
                        ["module", "what it has"],
                        [[code(n), _first(o)] for n, o in modules.items()],
                    ),
                ]
                if modules
                else []
            ),
        ]
    )


def _preset(name: str) -> bool:
    from fp8cfg.schema.presets import PRESETS

    return name in PRESETS


def _function(name: str, function: Any) -> str:
    return f"### {name}\n\n```text\n{name}{_signature(function)}\n```\n\n{plain(inspect.getdoc(function) or '')}"


def _class(name: str, cls: Any) -> str:
    own = {
        n: o
        for n, o in vars(cls).items()
        if not n.startswith("_") and (inspect.isfunction(o) or isinstance(o, property))
    }
    rows = [
        [code(n if isinstance(o, property) else f"{n}{_signature(o)}"), _first(o)]
        for n, o in own.items()
        if inspect.getdoc(o)
    ]
    text = f"### {name}\n\n{plain(inspect.getdoc(cls) or '')}"
    return f"{text}\n\n{table(['member', 'what it does'], rows)}" if rows else text


def _signature(function: Any) -> str:
    found = inspect.signature(function)
    return str(
        found.replace(parameters=[p for p in found.parameters.values() if p.name != "self"])
    ).replace("'", "")


def _first(thing: Any) -> str:
    """The first sentence of a docstring."""
    text = " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())
    return plain(text.partition(". ")[0].rstrip(".:"))
