"""Safetensors file, written tensor by tensor under a header that is made first, so that no more than one is in memory.

safetensors' own writer (0.8) takes all tensors of a file at once. The bytes are its bytes: the widest dtypes first, by name within
one. Format: https://huggingface.co/docs/safetensors, eight bytes with the length of a JSON header, the header, the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float8_e4m3fn: "F8_E4M3"}
"""In the order in which their tensors stand."""
CHUNK = 1 << 26
"""Bytes of a tensor that are copied to the CPU at a time."""


def nbytes(form: Form) -> int:
    """Bytes of a tensor."""
    return form[0].itemsize * prod(form[1])


class SafetensorsFile:
    """The new file `path` of tensors of these `forms` by name, each of which is to be written once, in any order; `size` is in
    bytes."""

    def __init__(self, path: Path, forms: Mapping[str, Form]) -> None:
        order = list(DTYPES)
        names = sorted(forms, key=lambda name: (order.index(forms[name][0]), name))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at, begins = 0, dict[str, int]()
        for name in names:
            (dtype, shape), begins[name] = forms[name], at
            at += nbytes(forms[name])
            entries[name] = {
                "dtype": DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [begins[name], at],
            }
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.size, self._forms = path, 8 + len(text) + at, dict(forms)
        self._begins = {name: 8 + len(text) + begin for name, begin in begins.items()}
        path.write_bytes(len(text).to_bytes(8, "little") + text)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the tensor `name`. Raises OSError."""
        assert (tensor.dtype, tuple(tensor.shape)) == self._forms[name], name
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with self.path.open("r+b") as file:
            file.seek(self._begins[name])
            for chunk in torch.split(data, CHUNK):
                file.write(chunk.cpu().numpy().data)
