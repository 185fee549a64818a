"""Each shipped backend has the whole protocol, and no other room names one."""

from __future__ import annotations

import ast
import inspect
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8cfg.backends import SHIPPED, protocol, registry

ROOT = Path(__file__).parents[2] / "fp8cfg"
ELSEWHERE = [
    p
    for p in sorted(ROOT.rglob("*.py"))
    if p.relative_to(ROOT).parts[0] not in ("backends", "interop", "recipes", "conf")
]


def functions(kind: type) -> list[str]:
    return [name for name in vars(kind) if not name.startswith("_")]


def takes(function: object) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_backend_has_the_protocol(name: str) -> None:
    """The functions, with the parameters by name; `skip` where the capabilities say that it is taken."""
    parts = [(registry.rules(name), protocol.Rules)]
    if name != "torchao" or find_spec("torchao"):
        parts.append((registry.backend(name), protocol.Backend))
    for module, kind in parts:
        expected = {f: takes(getattr(kind, f)) for f in functions(kind)}
        if kind is protocol.Backend and registry.capabilities(name).skips_on_device:
            expected["after_step"].append("skip")
        assert {f: takes(getattr(module, f)) for f in functions(kind)} == expected


@pytest.mark.parametrize("path", ELSEWHERE, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_other_room_names_a_backend(path: Path) -> None:
    """No comparison with a backend's name, and no import of a backend's folder. first_step has an option of the name te."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare) and "first_step" not in ast.unparse(node):
            named = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant)} & set(SHIPPED)
            assert not named, (
                f"line {node.lineno}: {ast.unparse(node)}; ask fp8cfg.schema.backends, or a function of the protocol"
            )
        if isinstance(node, ast.ImportFrom) and node.module:
            assert not node.module.startswith(
                tuple(f"fp8cfg.backends.{name}" for name in SHIPPED)
            ), f"line {node.lineno}: {node.module}"
