"""Operators of torchvision where its wheel cannot load them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch
from torch import library

_OPERATORS: list[library.Library] = []


def without_operators() -> None:
    """torchvision's wheel on PyPI is linked with CUDA (0.28.0): beside a CPU's torch its operators do not load, and importing it, which
    transformers and timm do, stops at the first of these. With the wheel of download.pytorch.org/whl/cpu this does nothing."""
    found = importlib.util.find_spec("torchvision")
    folder = Path(found.origin or "").parents[1] / "torchvision.libs" if found else None
    if folder and torch.version.cuda is None and any(folder.glob("libcudart*")):
        _OPERATORS.append(library.Library("torchvision", "DEF"))  # which end with it
        for name in ("nms", "qnms"):
            _OPERATORS[0].define(
                f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            )
