"""Signatures of the stand-in for Transformer Engine's compiled part: those of its source, and those that its own Python calls.

te_extension.pyi is what tools/make_te_signatures.py wrote from csrc/extensions/pybind.cpp of the version that it names, the one whose
Python the stand-in runs under."""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.support import te_tex

STUB = Path(te_tex.__file__).with_name("te_extension.pyi")
BOUND_IN_PARTS = {
    "CommOverlap",
    "CommOverlapHelper",
    "CommOverlapP2P",
    "LayerNorm",
    "device_supports_multicast",
    "get_stream_priority_range",
    "ubuf_built_with_mpi",
}
"""Called by the wheel, and not bound by `m.def`: classes, what a macro of common/util/pybind_helper.h binds."""
CLASSES = {
    "CommOverlapType",
    "DType",
    "FP8BwdTensors",
    "FP8FwdTensors",
    "FP8TensorMeta",
    "NVTEQBHistogramMode",
    "NVTERoutingMapFormat",
    "NVTEScalingMode",
    "NVTE_Bias_Type",
    "NVTE_Fused_Attn_Backend",
    "NVTE_Mask_Type",
    "NVTE_QKV_Format",
    "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
    "grouped_mlp_experimental",
}
"""Named by the wheel, and never called: enums, structures, and a module."""
EXTENSION = "transformer_engine_torch"


@cache
def recorded() -> dict[str, inspect.Signature]:
    """The signature of each function of the extension."""
    return {
        node.name: _signature(node.args)
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def _signature(args: ast.arguments) -> inspect.Signature:
    kinds = inspect.Parameter
    positional = [*args.posonlyargs, *args.args]
    defaults: list[Any] = [kinds.empty] * (len(positional) - len(args.defaults)) + [
        ast.literal_eval(d) for d in args.defaults
    ]
    found = [
        inspect.Parameter(
            a.arg,
            kinds.POSITIONAL_ONLY if a in args.posonlyargs else kinds.POSITIONAL_OR_KEYWORD,
            default=d,
        )
        for a, d in zip(positional, defaults, strict=True)
    ]
    found += [
        inspect.Parameter(
            a.arg, kinds.KEYWORD_ONLY, default=kinds.empty if d is None else ast.literal_eval(d)
        )
        for a, d in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.vararg:
        found.append(inspect.Parameter(args.vararg.arg, kinds.VAR_POSITIONAL))
    return inspect.Signature(found)


def test_the_record_is_of_the_version_that_tests_run_under() -> None:
    try:
        installed = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        pytest.skip("transformer-engine is not installed")
    assert (
        STUB.read_text(encoding="utf-8")
        .splitlines()[0]
        .endswith(f"transformer_engine_torch {installed}")
        and len(recorded()) > 150
    )


@pytest.mark.parametrize("function", te_tex.FUNCTIONS, ids=lambda f: f.__name__)
def test_a_stand_in_takes_what_the_compiled_function_takes(function: Any) -> None:
    """Names, their order, which of them go by position alone, and defaults."""
    mine = [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]
    assert mine == [
        (p.name, p.kind, p.default) for p in recorded()[function.__name__].parameters.values()
    ]


def nodes() -> Iterator[tuple[str, ast.AST]]:
    """Each node of the wheel's Python for torch that may name the extension: where, and the node."""
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        return
    root = Path(spec.origin).parent
    for path in sorted((root / "pytorch").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "tex." in text or EXTENSION in text else ():
            yield f"{path.relative_to(root)}:{getattr(node, 'lineno', 0)}", node


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Each call tex.NAME(...) in the wheel's Python: where, NAME, the call."""
    for where, node in nodes():
        if isinstance(node, ast.Call) and (name := _named(node.func)):
            yield where, name, node


def _named(node: ast.AST) -> str:
    """NAME of tex.NAME; empty for what is not one."""
    return (
        node.attr
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "tex"
        else ""
    )


def names() -> Iterator[tuple[str, str]]:
    """Each name of the extension in the wheel's Python, called or handed on: in tables of activations and norms, by optimizers."""
    for where, node in nodes():
        if name := _named(node):
            yield where, name
        if isinstance(node, ast.ImportFrom) and node.module == EXTENSION:
            yield from ((where, alias.name) for alias in node.names if alias.name != "*")


def test_every_name_in_the_wheel_is_in_the_record() -> None:
    every = list(names())
    if not every:
        pytest.skip("transformer-engine is not installed")
    unknown = {name: where for where, name in every if name not in recorded()}
    assert unknown.keys() == BOUND_IN_PARTS | CLASSES, unknown
    handed_on = {name for _, name in every} - {name for _, name, _ in calls()} - CLASSES
    assert {"dbias_dgelu", "rmsnorm_fwd", "multi_tensor_adam"} <= handed_on, (
        "the names that are not called are seen"
    )


def test_every_call_in_the_wheel_fits_the_record() -> None:
    every = list(calls())
    if not every:
        pytest.skip("transformer-engine is not installed")
    wrong = [
        f"{where}: tex.{name}: {problem}"
        for where, name, call in every
        if name in recorded() and (problem := _misfit(call, recorded()[name]))
    ]
    assert not wrong and len(every) > 150


def _misfit(call: ast.Call, signature: inspect.Signature) -> str:
    """Why a call does not bind; of one with * or ** the rest alone is looked at."""
    given, named = len(call.args), [k.arg for k in call.keywords if k.arg]
    spread = any(isinstance(a, ast.Starred) for a in call.args) or len(named) < len(call.keywords)
    try:
        bind = signature.bind_partial if spread else signature.bind
        bind(
            *[None] * (sum(not isinstance(a, ast.Starred) for a in call.args) if spread else given),
            **dict.fromkeys(named),
        )
    except TypeError as e:
        return str(e)
    return ""


def test_a_call_that_does_not_fit_is_found() -> None:
    signature = recorded()["quantize"]
    for text, fits in (
        ("f(x, q)", True),
        ("f(x, q, out, noop=n)", True),
        ("f(x)", False),
        ("f(x, q, out=o)", False),
        ("f(*a)", True),
        ("f(*a, out=o)", False),
    ):
        assert (not _misfit(ast.parse(text, mode="eval").body, signature)) == fits, text  # type: ignore[arg-type]
