"""Which package may import which, which files import one another in a circle, and what loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fp8cfg"
API = "the public API"
"""The modules at the root of the package: fp8cfg/__init__.py."""

MAY_IMPORT = {
    "schema": [],
    "models": [],
    "data": [],
    "composition": ["schema"],
    "numerics": ["schema"],
    "recipes": ["schema"],
    "optim": ["numerics"],
    "execution": ["composition"],
    "backends": ["optim", "models"],
    "parallel": ["backends"],
    "planning": ["parallel", "composition"],
    "interop": ["planning"],
    "report": ["planning"],
    "run_folder": ["planning"],
    "conversion": ["interop"],
    "building": ["conversion"],
    "checkpoint": ["building", "run_folder", "data"],
    "training": ["checkpoint"],
    "studies": ["training", "report", "execution"],
    API: ["studies", "recipes"],
    "cli": [API],
    "__main__": ["cli"],
}
"""The packages that each package may import; it may also import what those may import."""

WITHOUT_TORCH = [
    "schema",
    "composition",
    "data",
    "execution",
    "interop",
    "recipes",
    "report",
    "studies.page",
    "studies.parity",
    "studies.parity_page",
    "studies.run_data",
    "models.config",
    "planning.plan_recipe",
    "planning.plan_report",
    "building.builder",
    "building.graph",
    "building.job",
    "cli",
    "__main__",
]
"""Packages and modules that load no torch when they are imported."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def package(module: str) -> str:
    """The first part below fp8cfg, or API for fp8cfg itself."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0] or API


def allowed(name: str) -> set[str]:
    """All packages that the package `name` may import."""
    found = set(MAY_IMPORT[name])
    for below in MAY_IMPORT[name]:
        found |= allowed(below)
    return found


@cache
def imports() -> dict[str, set[str]]:
    """Modules of fp8cfg that each module imports: at its top, in a function or for its types."""
    found = {}
    for module, path in FILES.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found[module] = set(imported_modules(tree)) & FILES.keys() - {module}
    return found


def imported_modules(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in FILES else node.module


@pytest.mark.parametrize("name", sorted({package(module) for module in FILES}))
def test_a_package_imports_only_the_packages_below_it(name: str) -> None:
    for module, targets in imports().items():
        if package(module) != name:
            continue
        packages = {package(target) for target in targets} - {name}
        assert packages <= allowed(name), f"{module} imports {packages - allowed(name)}"


def test_the_table_has_no_circle() -> None:
    TopologicalSorter(MAY_IMPORT).prepare()


def test_no_files_import_one_another_in_a_circle() -> None:
    """Imports inside functions and for type checkers count."""
    assert circles(imports()) == set()


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """Returns the sets of two or more nodes that reach one another."""
    reachable = {node: reached(graph, node) for node in graph}
    found = set()
    for node in graph:
        circle = frozenset(n for n in reachable[node] if node in reachable.get(n, ()))
        if len(circle) > 1:
            found.add(circle)
    return found


def reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    queue = [start]
    while queue:
        new = graph.get(queue.pop(), set()) - found
        found |= new
        queue += new
    return found


def test_imports_are_found_wherever_they_are() -> None:
    text = (
        "import fp8cfg.schema.fp8\n"
        "if TYPE_CHECKING:\n    from fp8cfg.building.job import Job\n"
        "def f():\n    if x:\n        from fp8cfg.planning import remarks\n"
    )
    assert set(imported_modules(ast.parse(text))) == {
        "fp8cfg.schema.fp8",
        "fp8cfg.building.job",
        "fp8cfg.planning.remarks",
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": {"d"}}) == {frozenset("bc")}


def test_compose_lower_and_plan_load_no_torch() -> None:
    """One process imports the modules, one after another, up to the first that loads torch."""
    prefixes = tuple(f"fp8cfg.{name}" for name in WITHOUT_TORCH)
    names = [m for m in FILES if m in prefixes or m.startswith(tuple(f"{p}." for p in prefixes))]
    assert len(names) > 50
    code = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} loads torch')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr
