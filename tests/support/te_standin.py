"""Transformer Engine's genuine Python on a CPU: its recipes, modules, quantizers and state, over te_tex in place of its kernels.

Its source is changed in three ways as it is loaded: "cuda" devices become the CPU, and the two checks that ask for a GPU are
answered yes."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support import te_tex

REPLACED = {
    "torch.cuda.is_available()": "True",
    "inp.is_cuda": "True",
    "_layer.is_cuda": "_layer.is_cpu",
    'torch.device("cuda")': 'torch.device("cpu")',
    "torch.cuda.is_current_stream_capturing()": "False",
    "torch.cuda.synchronize()": "None",
    "torch.Tensor().cuda()": "torch.Tensor()",
    "torch.cuda.get_device_capability()": "(9, 0)",
    "torch.cuda.current_device()": '"cpu"',
    'device="cuda"': 'device="cpu"',
    "torch.is_autocast_enabled()": 'torch.is_autocast_enabled("cpu")',
}
FROM = {
    "module": ("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP"),
    "quantization": (
        "autocast",
        "fp8_autocast",
        "quantized_model_init",
        "fp8_model_init",
        "FP8GlobalStateManager",
        "RecipeState",
    ),
    "tensor": (
        "Float8Tensor",
        "Float8Quantizer",
        "Float8CurrentScalingQuantizer",
        "Float8BlockQuantizer",
        "MXFP8Quantizer",
        "NVFP4Quantizer",
    ),
    "quantized_tensor": ("QuantizedTensor",),
    "constants": ("DType",),
    "attention.dot_product_attention.dot_product_attention": ("DotProductAttention",),
    "transformer": ("TransformerLayer",),
}
_made: dict[str, types.ModuleType] = {}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> Any:
        source = Path(self.path).read_text(encoding="utf-8")
        for old, new in REPLACED.items():
            source = source.replace(old, new)
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname.split(".")[0] != "transformer_engine":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec and spec.origin:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


@contextmanager
def transformer_engine(environ: dict[str, str] | None = None) -> Iterator[Any]:
    """`transformer_engine.pytorch` as an import gives it while this lasts. With `environ`, loaded anew under these variables.
    Skips the calling test where the wheel is not installed."""
    outside = {key: sys.modules.pop(key) for key in list(sys.modules) if _is_te(key)}
    try:
        made = _load(environ) if environ is not None else _made or _made.update(_load({})) or _made
        sys.modules.update(made)
        te = made["transformer_engine.pytorch"]
        te.FP8GlobalStateManager.reset()
        yield te
    finally:
        for key in [key for key in sys.modules if _is_te(key)]:
            del sys.modules[key]
        sys.modules.update(outside)


def _load(environ: dict[str, str]) -> dict[str, types.ModuleType]:
    spec = importlib.util.find_spec("transformer_engine")
    if spec is None or spec.origin is None:
        pytest.skip("transformer-engine is not installed")
    root = Path(spec.origin).parent
    for package in (
        "transformer_engine",
        "transformer_engine.common",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.triton",
        "transformer_engine.pytorch.attention",
    ):
        module = types.ModuleType(package)  # their real __init__ files load the extension
        module.__path__ = [str(root.joinpath(*package.split(".")[1:]))]
        module.__getattr__ = partial(_submodule, package)
        sys.modules[package] = module
    sys.modules["transformer_engine"].__version__ = metadata.version("transformer-engine")
    sys.modules["transformer_engine_torch"] = te_tex.extension(root)
    # Not needed, and they import onnxscript or triton, or compare enums of the extension.
    for name in (
        "export",
        "cpp_extensions.fused_attn",
        "attention.inference",
        "triton.pad",
        "triton.mhc",
        "triton.permutation",
        "triton.cross_entropy",
        "triton.grouped_dbias_dscales",
    ):
        module = types.ModuleType(f"transformer_engine.pytorch.{name}")
        module.__getattr__ = te_tex.missing
        sys.modules[module.__name__] = module
    sys.modules["transformer_engine.pytorch.export"].is_in_onnx_export_mode = lambda: False
    fused_attn = sys.modules["transformer_engine.pytorch.cpp_extensions.fused_attn"]
    fused_attn.QKVFormat = te_tex.QKV_FORMAT
    fused_attn.FusedAttnBackend = te_tex.FusedAttnBackend
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        with mock.patch.dict(os.environ, {"NVTE_TORCH_COMPILE": "0", **environ}):
            importlib.import_module(
                "transformer_engine.pytorch.tensor"
            )  # first, or its circular imports do not resolve
            te = sys.modules["transformer_engine.pytorch"]
            for name, attributes in FROM.items():
                found = importlib.import_module(f"transformer_engine.pytorch.{name}")
                for attribute in attributes:
                    setattr(te, attribute, getattr(found, attribute))
            _on_cpu()
    finally:
        sys.meta_path.remove(finder)
    return {key: module for key, module in sys.modules.items() if _is_te(key)}


def _on_cpu() -> None:
    """What asks the driver: the GPU is an H200, workspaces are nothing."""
    modules = sys.modules
    for name, module in list(modules.items()):
        if _is_te(name) and "get_device_compute_capability" in vars(module):
            module.get_device_compute_capability = lambda: (9, 0)
        if _is_te(name) and "get_cublas_workspace" in vars(module):
            module.get_cublas_workspace = lambda *_: torch.empty(1, dtype=torch.uint8)
    state = modules["transformer_engine.pytorch.quantization"]
    for what in ("FP8", "MXFP8", "NVFP4", "FP8_BLOCK_SCALING"):
        setattr(state, f"_{what}_SUPPORT", (True, ""))


def _submodule(package: str, name: str) -> Any:
    found = f"{package}.{name}"
    if not name.startswith("__") and (found in sys.modules or importlib.util.find_spec(found)):
        return importlib.import_module(found)
    return te_tex.missing(name)


def _is_te(module: str) -> bool:
    return module.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
