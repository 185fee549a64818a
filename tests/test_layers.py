"""Who may import whom, what importing loads, and which files import one another in a circle.

A room is a folder or a module of fp8cfg/; training/distributed is one by itself, for it stands below the job. Modules that are
imported by name at run time (a verb's, a backend's, a recipe's) are not among these arrows.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "fp8cfg"
NESTED = {"training.distributed"}
"""Folders inside a room that are rooms by themselves."""

TOP = {  # room -> rooms that its modules may import at their top
    "models": set(),
    "data": set(),
    "scalings": set(),
    "config": {"scalings"},
    "numerics": {"scalings"},
    "optim": {"numerics"},
    "parallel": {"config", "models", "numerics"},
    "composition": {"config"},
    "backends": {"config", "numerics", "scalings"},
    "layer_plan": {"backends", "config", "models"},
    "tensor_limits": {"backends", "config", "layer_plan", "scalings"},
    "pipeline_limits": {"backends", "config"},
    "state_limits": {"config", "tensor_limits"},
    "report": {
        "backends",
        "composition",
        "config",
        "layer_plan",
        "models",
        "pipeline_limits",
        "scalings",
        "smoke",
        "state_limits",
        "tensor_limits",
    },
    "interop": {"composition", "config", "layer_plan", "scalings"},
    "training.distributed": {"backends", "config", "numerics", "optim", "parallel", "report"},
    "job": {"backends", "report"},
    "job_parts": {"backends", "config", "models"},
    "job_weights": {"config", "layer_plan", "models"},
    "job_optimizer": {"backends", "config"},
    "conversion": {
        "backends",
        "composition",
        "config",
        "job_parts",
        "job_weights",
        "job",
        "layer_plan",
        "numerics",
        "optim",
        "report",
        "scalings",
    },
    "smoke": {
        "composition",
        "config",
        "layer_plan",
        "models",
        "pipeline_limits",
        "state_limits",
        "tensor_limits",
    },
    "graph_tags": set(),
    "graph_nodes": {"config", "graph_tags"},
    "builder": {
        "backends",
        "config",
        "job_optimizer",
        "job_parts",
        "job_weights",
        "job",
        "layer_plan",
        "optim",
        "smoke",
    },
    "run_plan": {"builder", "config", "report", "smoke"},
    "training": {
        "backends",
        "builder",
        "composition",
        "config",
        "data",
        "job_parts",
        "job_weights",
        "job",
        "layer_plan",
        "models",
        "numerics",
        "optim",
        "parallel",
        "report",
        "scalings",
        "smoke",
        "training.distributed",
    },
    "execution": {"composition", "config"},
    "cli": {"backends", "config", "execution", "report", "training"},
    "__main__": {"cli"},
}
TORCH = "its modules import torch, and this one is imported without"
"""Why most imports stand inside functions: what stands left of `build` loads no torch."""
INSIDE = {  # room -> rooms that its functions may import, and why not at the top
    "backends": {
        "models": "TE builds its own modules in the place of our Transformer's layers, and only where a model has these",
        "optim": "MS-AMP's optimizer checks saved state as the low-bit ones do, and only where it loads one",
    },
    "report": {
        "backends": TORCH,
        "config": "`list` prints the text of values, no places, and is quick",
    },
    "conversion": {"interop": "objects of other projects are read where one is given"},
    "job": {
        "backends": TORCH,
        "interop": "words of a Trainer are looked at where one runs",
        "numerics": TORCH,
        "optim": TORCH,
        "training.distributed": TORCH,
    },
    "job_parts": {
        "backends": TORCH,
        "models": TORCH,
        "numerics": TORCH,
        "training.distributed": TORCH,
    },
    "job_optimizer": {
        "backends": TORCH,
        "numerics": TORCH,
        "optim": TORCH,
        "training.distributed": TORCH,
    },
    "job_weights": {"models": TORCH},
    "graph_nodes": {"composition": "`lower` reads the keys of a recipe that is composed"},
    "builder": {
        "backends": TORCH,
        "composition": "`import fp8cfg.builder` reads no YAML",
        "conversion": TORCH,
        "parallel": TORCH,
        "training.distributed": TORCH,
        "graph_nodes": "it loads Fiddle",
        "report": "`lower` makes the graph alone; the machine and its memory are looked at by `build`",
    },
    "training": {
        "composition": "readers of a run folder that want no recipe from it load no YAML",
        "training.distributed": "FSDP2 is loaded where storage.shard=fsdp asks for it",
        "parallel": "so is torch's pipelining where there are stages",
    },
    "cli": dict.fromkeys(
        (
            "builder",
            "composition",
            "config",
            "data",
            "execution",
            "interop",
            "job_weights",
            "layer_plan",
            "models",
            "report",
            "run_plan",
            "smoke",
            "training",
            "training.distributed",
        ),
        "a verb loads what it needs when it runs: help and completion read its module without",
    ),
    "__main__": {
        "cli": "what the verb at hand does not need is not loaded",
        "config": "as above: errors alone need it",
        "training": "signals are heeded from the start of a verb that trains",
    },
}
TYPES = {  # room -> rooms of which it names types alone, under TYPE_CHECKING
    "cli": {"job"},
    "job": {"config"},
    "graph_nodes": {"job"},
    "builder": {"models"},
    "training.distributed": {"models"},
}
CIRCLES = {  # files that import one another, and why
    frozenset(
        {"numerics.attention", "numerics.fp8_state_dict", "numerics.linear"}
    ): "types alone: loading completes the state of the layers that call it",
    frozenset(
        {"report.plan_report", "report.plan_text"}
    ): "str(plan) is its text, which is made from its fields",
    frozenset(
        {"backends.te.engine", "backends.te.layers"}
    ): "types alone: each layer knows its engine, and the engine its layers",
    frozenset(
        {"config.node", "config.validation_errors"}
    ): "types alone: a line is about a class of nodes",
    frozenset(
        {
            "config.fsdp_sharding",
            "config.recipe",
            "config.rules",
            "config.rules_fsdp",
            "config.rules_lora",
            "config.rules_precision",
            "config.rules_strategy",
        }
    ): "Recipe.check() runs the rules, and names them when it does; of it they take the type alone",
}


class Import(NamedTuple):
    """`module` imports `target` at its "top", "inside" a function, or for "types" alone."""

    module: str
    target: str
    where: str


def room(module: str) -> str:
    """The room of the module fp8cfg.ROOM..."""
    _, *parts = module.split(".")
    return ".".join(parts[:2]) if ".".join(parts[:2]) in NESTED else parts[0]


def _module(path: Path) -> str:
    return ".".join(["fp8cfg", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(
        ".__init__"
    )


FILES = {_module(p): p for p in sorted(ROOT.rglob("*.py")) if p != ROOT / "__init__.py"}
ROOMS = sorted({room(m) for m in FILES})


@cache
def imports() -> list[Import]:
    """Every import of a module of fp8cfg by another."""
    return [
        Import(m, t, where)
        for m, p in FILES.items()
        for t, where in _imports(ast.parse(p.read_text(encoding="utf-8")), "top")
        if t in FILES and t != m
    ]


def _imports(tree: ast.AST, where: str) -> Iterator[tuple[str, str]]:
    """The modules that `tree` imports, and where."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield (name if name in FILES else node.module), where
        elif isinstance(node, ast.Import):
            yield from ((alias.name, where) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from _imports(ast.Module(node.body, []), "types")
            yield from _imports(ast.Module(node.orelse, []), where)
        else:
            inside = where == "top" and isinstance(
                node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
            )
            yield from _imports(node, "inside" if inside else where)


def arrows(where: str) -> dict[str, set[str]]:
    """Room -> other rooms that it imports there."""
    found: dict[str, set[str]] = defaultdict(set)
    for i in imports():
        if i.where == where and room(i.module) != room(i.target):
            found[room(i.module)].add(room(i.target))
    return found


@pytest.mark.parametrize("mine", ROOMS)
def test_rooms_import_only_what_stands_below_them(mine: str) -> None:
    """The tables hold what is imported, no more: an arrow that is gone leaves them too."""
    above, inside = TOP.get(mine, set()), set(INSIDE.get(mine, {}))
    assert arrows("top")[mine] == above
    assert arrows("inside")[mine] == inside
    assert arrows("types")[mine] - above - inside == TYPES.get(mine, set())


def test_no_rooms_import_one_another_in_a_circle() -> None:
    TopologicalSorter(
        {r: TOP.get(r, set()) | set(INSIDE.get(r, {})) | TYPES.get(r, set()) for r in ROOMS}
    ).prepare()


def test_files_that_import_one_another_in_a_circle_say_why() -> None:
    """Imports inside functions and under TYPE_CHECKING are counted."""
    graph: dict[str, set[str]] = defaultdict(set)
    for i in imports():
        graph[i.module].add(i.target)
    assert {frozenset(m.removeprefix("fp8cfg.") for m in c) for c in circles(graph)} == set(CIRCLES)


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of two or more nodes that reach one another."""
    reach = {node: _reached(graph, node) for node in graph}
    return {
        c
        for node in graph
        if len(c := frozenset(n for n in reach[node] if node in reach.get(n, ()))) > 1
    }


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, left = set[str](), [start]
    while left:
        new = graph.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def test_circles_are_found_wherever_the_import_stands() -> None:
    text = (
        "import a\nif TYPE_CHECKING:\n    from fp8cfg.job import Job\nelse:\n    import b\n"
        "def f():\n    if x:\n        from fp8cfg.report import chart\nclass C:\n    def g(self):\n        import c\n    import d\n"
    )
    assert list(_imports(ast.parse(text), "top")) == [
        ("a", "top"),
        ("fp8cfg.job", "types"),
        ("b", "top"),
        ("fp8cfg.report.chart", "inside"),
        ("c", "inside"),
        ("d", "top"),
    ]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}}) == {frozenset("bc")}


def test_what_is_left_of_build_loads_no_torch() -> None:
    """One process imports the rooms, one after another, to the first module that loads it."""
    rooms = (
        "config",
        "composition",
        "data",
        "models",
        "layer_plan",
        "job",
        "job_parts",
        "job_optimizer",
        "job_weights",
        "graph_nodes",
        "builder",
        "report",
        "run_plan",
        "interop",
    )
    names = [m for r in rooms for m in FILES if room(m) == r and m not in LATE]
    code = f"import importlib, sys; print(next((m for m in {names} if importlib.import_module(m) and 'torch' in sys.modules), None))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert {*rooms} == {room(m) for m in names} and done.stdout == "None\n", (
        f"{done.stdout}loads torch"
    )


LATE = {
    f"fp8cfg.models.{name}"
    for name in (
        "attention",
        "cross_entropy",
        "hf",
        "hf_checkpoint",
        "hf_export",
        "layers",
        "lora",
        "norms",
        "peft",
        "rotary",
        "safetensors_file",
        "sdpa_backend",
        "selective_recompute",
        "tensor_shard",
        "transformer",
        "weight_init",
    )
}
