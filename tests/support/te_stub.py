"""Transformer Engine import stub: its pure-Python files from the wheel, on a machine that cannot load the compiled part.

The wheel's Python is a good oracle: the update of delayed scaling and the reference quantizers are written in torch. Only the
modules around them ask the extension for names when they are imported; those are answered by mocks."""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from unittest import mock

import pytest
import torch  # noqa: F401  the imports below must find it loaded


@functools.cache
def te_module(name: str) -> types.ModuleType:
    """`transformer_engine.pytorch.<name>`, loaded once; skips the calling test where the wheel is not installed. Leaves no trace in
    sys.modules, so that code which asks for a working Transformer Engine does not meet this one."""
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if _is_te(key)}
    try:
        spec = importlib.util.find_spec("transformer_engine")
        if spec is None or spec.origin is None:
            pytest.skip("transformer-engine is not installed")
        root = Path(spec.origin).parent
        for package in (
            "transformer_engine",
            "transformer_engine.common",
            "transformer_engine.pytorch",
        ):
            module = types.ModuleType(package)  # their real __init__ files load the extension
            module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
            module.__getattr__ = lambda _: mock.MagicMock()
            sys.modules[package] = module
        names = re.findall(r"int\(tex\.DType\.(\w+)\)", (root / "pytorch/constants.py").read_text())
        extension = mock.MagicMock(name="transformer_engine_torch")
        extension.DType = enum.IntEnum("DType", names, start=0)
        sys.modules["transformer_engine_torch"] = extension
        sys.modules["transformer_engine.pytorch.export"] = (
            mock.MagicMock()
        )  # would import onnxscript
        with mock.patch.dict(
            os.environ, {"NVTE_TORCH_COMPILE": "0"}
        ):  # plain functions: no compiler in the way
            importlib.import_module(
                "transformer_engine.pytorch.tensor"
            )  # first, or its circular imports do not resolve
            return importlib.import_module(f"transformer_engine.pytorch.{name}")
    finally:
        for key in [key for key in sys.modules if _is_te(key)]:
            del sys.modules[key]
        sys.modules.update(kept)


def _is_te(module: str) -> bool:
    return module.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
