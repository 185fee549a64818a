"""Hugging Face export: the weights of a Transformer as sharded safetensors, in BF16, FP16 or FP32, or with FP8 linear weights and their
scales.

FP8 is transformers' `fp8` layout, DeepSeek-V3's: beside each float8_e4m3fn `weight` a float32 `weight_scale_inv` that multiplies,
for blocks of 128x128 or for the whole. Scales of blocks are powers of two, so that weights that were held in FP8 under such scales
are written without rounding, however the rows of the two layouts differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.hf_checkpoint import Layout
from fp8cfg.models.weight_files import INDEX, WHOLE

Form = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}
"""In the order in which their tensors stand."""
CHUNK = 1 << 26
"""Bytes of a tensor that are copied to the CPU at a time."""


class WeightOverflow(Exception):
    """A weight has larger values than the dtype it is to be written in."""


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


BLOCK, LARGEST = 128, 448.0
SHARD = 5 * 10**9
"""Bytes of a file, about."""
Weight = tuple[Tensor, Tensor | None]
"""A parameter, and the scale [] that multiplies it where it is held in E4M3 under one."""


def write(
    folder: Path,
    config: TransformerConfig,
    said: Mapping[str, Any],
    layout: Layout,
    read: Callable[[str], Weight],
    fp8: str | None = None,
    quantized: Collection[str] = (),
    shard: int = SHARD,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write `folder`, which is empty: config.json, which is `said`, and the weights that `read` gives by our names in `dtype`, each
    written before the next is read. With `fp8` "block" or "tensor" those of the modules `quantized` in FP8. Raises WeightOverflow if
    a weight does not fit in float16.
    """
    parts = layout.parts(config)
    in_fp8 = {
        name
        for name in parts
        if fp8 and name.endswith(".weight") and name.removesuffix(".weight") in quantized
    }
    kept = sorted(
        {
            theirs.removesuffix(".weight")
            for name, named in parts.items()
            for theirs in named
            if fp8 and ".linear_" in name and name.endswith(".weight") and name not in in_fp8
        }
    )
    quantization = (
        {
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK, BLOCK] if fp8 == "block" else None,
                "modules_to_not_convert": ["lm_head", *kept],
            }
        }
        if fp8
        else {}
    )
    files = _files(
        folder,
        [
            _forms(theirs, shape, fp8 if name in in_fp8 else None, dtype)
            for name, named in parts.items()
            for theirs, shape in named.items()
        ],
        shard,
    )
    for name, named in parts.items():
        for theirs, tensor in _tensors(
            name, list(named), config, layout, read, fp8 if name in in_fp8 else None, dtype
        ):
            files[theirs].write(theirs, tensor)
    dtype_name = str(dtype).removeprefix("torch.")
    text = json.dumps(
        {**said, "dtype": dtype_name, "torch_dtype": dtype_name, **quantization}, indent=2
    )
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _tensors(
    name: str,
    named: Sequence[str],
    config: TransformerConfig,
    layout: Layout,
    read: Callable[[str], Weight],
    fp8: str | None,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """What is written of our parameter `name`, whose parts are `named`."""
    weight, scale = read(name)
    if (
        weight.dim() > 1 and not fp8
    ):  # a vector may be that of a norm, which is shifted in its own dtype
        weight = weight.to(dtype)
    for theirs, part in zip(named, layout.split(name, weight, config, len(named)), strict=True):
        if fp8:
            codes, scale_inv = _quantized(part.float(), fp8 == "block", scale)
            yield from ((theirs, codes), (f"{theirs}_scale_inv", scale_inv))
        else:
            stored = part.to(dtype)
            if dtype == torch.float16 and not stored.isfinite().all():
                raise WeightOverflow(f"{theirs} has values beyond 65504, the largest of fp16")
            yield theirs, stored


def _forms(
    theirs: str, shape: tuple[int, ...], fp8: str | None, dtype: torch.dtype
) -> dict[str, Form]:
    """What is written of a part by their names."""
    if not fp8:
        return {theirs: (dtype, shape)}
    scales = tuple(-(-size // BLOCK) for size in shape) if fp8 == "block" else ()
    return {theirs: (torch.float8_e4m3fn, shape), f"{theirs}_scale_inv": (torch.float32, scales)}


def _quantized(weight: Tensor, blocks: bool, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of `weight` [rows, columns], float32, and scales that multiply: [row blocks, column blocks], or one: `scale` if any. A
    row of blocks at a time, for it takes several tensors of float32."""
    bands = torch.split(weight, BLOCK)
    if not blocks:
        amax = torch.stack([band.abs().amax() for band in bands]).amax()
        whole = (
            scale.reshape(()).float()
            if scale is not None
            else torch.where(amax > 0, amax / LARGEST, 1.0)
        )
        return torch.cat([_codes(band / whole) for band in bands]), whole
    made = [_in_blocks(band) for band in bands]
    return torch.cat([codes for codes, _ in made]), torch.cat([scales for _, scales in made])


def _in_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.reshape(
        -(-rows // BLOCK), BLOCK, -1, BLOCK
    )  # [row blocks, 128, column blocks, 128]
    amax = tiles.abs().amax((1, 3))
    power = torch.exp2(torch.ceil(torch.log2(amax / LARGEST)))
    found = torch.where(amax > 0, power, torch.ones_like(power))
    return (
        _codes((tiles / found[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]),
        found,
    )


def _codes(scaled: Tensor) -> Tensor:
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def _files(
    folder: Path, forms: Sequence[dict[str, Form]], shard: int
) -> dict[str, SafetensorsFile]:
    """The files of `forms` by the tensors in them, about `shard` bytes each, and the index where there are several. What is of one
    part stands in one file."""
    shards, held = list[dict[str, Form]]([{}]), 0
    for tensors in forms:
        size = sum(map(nbytes, tensors.values()))
        if held and held + size > shard:
            shards.append({})
            held = 0
        shards[-1] |= tensors
        held += size
    count = len(shards)
    names = (
        [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
        if count > 1
        else [WHOLE]
    )
    files = [
        SafetensorsFile(folder / name, tensors) for name, tensors in zip(names, shards, strict=True)
    ]
    if count > 1:
        index = {
            "metadata": {"total_size": sum(file.size for file in files)},
            "weight_map": {
                tensor: name
                for name, tensors in zip(names, shards, strict=True)
                for tensor in tensors
            },
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return {tensor: file for file, tensors in zip(files, shards, strict=True) for tensor in tensors}
