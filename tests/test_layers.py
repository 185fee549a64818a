"""Who may import whom, and what importing loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "fp8cfg"
ALLOWED = {  # room -> rooms that its modules may import at their top
    "config": set(), "composition": {"config"}, "numerics": set(), "models": set(), "data": set(), "optim": {"numerics"},
    "backends": {"numerics", "config"}, "job": {"backends", "config"}, "fiddle_targets": {"backends", "config", "job", "models"},
    "conversion": {"backends", "config"},
    "layer_plan": {"backends", "config", "models"}, "builder": {"backends", "config", "fiddle_targets", "job", "layer_plan", "models", "optim"},
    "report": {"backends", "composition", "config", "layer_plan", "models"}, "interop": {"config"},
    "training": {"backends", "builder", "composition", "config", "data", "job", "layer_plan", "numerics", "optim", "report"},
    "run_plan": {"builder", "config", "report"},
    "cli": {"backends", "builder", "composition", "config", "interop", "job", "report", "run_plan", "training"},
}


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def top_imports(path: Path) -> set[str]:
    """Modules imported when `path` is: not those inside functions or under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names if node.module == "fp8cfg"}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return found


FILES = [p for p in sorted(ROOT.rglob("*.py")) if p.name not in ("__main__.py",) and p != ROOT / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_rooms_import_only_what_stands_below_them(path: Path) -> None:
    mine = room(path)
    for module in top_imports(path):
        parts = module.split(".")
        if parts[0] == "fp8cfg" and len(parts) > 1 and parts[1] not in ("__version__", mine):
            assert parts[1] in ALLOWED[mine], f"{path.name} imports {module}"


@pytest.mark.parametrize("rooms", ["config", "composition", "data", "models", "job", "fiddle_targets", "builder", "report", "run_plan", "interop"])
def test_what_is_left_of_build_loads_no_torch(rooms: str) -> None:
    names = [m for p in FILES if room(p) == rooms and (m := _module(p)) not in LATE]
    subprocess.run([sys.executable, "-c", f"import sys, {', '.join(names)}; assert 'torch' not in sys.modules"], check=True, cwd=ROOT.parent)


LATE = {"fp8cfg.models.transformer", "fp8cfg.models.layers", "fp8cfg.models.rotary", "fp8cfg.models.hf"}


def _module(path: Path) -> str:
    return ".".join(["fp8cfg", *path.relative_to(ROOT).with_suffix("").parts]).removesuffix(".__init__")
