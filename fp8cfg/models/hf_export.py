"""Hugging Face export: the weights of a Transformer as sharded safetensors, in BF16, or with FP8 linear weights and their scales.

FP8 is transformers' `fp8` layout, DeepSeek-V3's: beside each float8_e4m3fn `weight` a float32 `weight_scale_inv` that multiplies,
for blocks of 128x128 or for the whole. Scales of blocks are powers of two, so that weights that were held in FP8 under such scales
are written without rounding, however the rows of the two layouts differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.hf import Layout
from fp8cfg.models.hf_checkpoint import INDEX, WHOLE

BLOCK, LARGEST = 128, 448.0
SHARD = 5 * 10**9
"""Bytes of a file, about."""


def write(
    folder: Path, config: TransformerConfig, said: Mapping[str, Any], layout: Layout, read: Callable[[str], Tensor],
    fp8: str | None = None, quantized: Collection[str] = (), scales: Mapping[str, Tensor] | None = None, shard: int = SHARD,
) -> None:
    """Write `folder`, which is empty: config.json, which is `said`, and the weights that `read` gives by our names, one at a time.
    With `fp8` "block" or "tensor" those of the modules `quantized` in FP8, under the one of `scales` where it is known."""
    kept = sorted({theirs.removesuffix(".weight") for name, named in layout.parts(config).items() for theirs in named
                   if fp8 and ".linear_" in name and name.endswith(".weight") and name.removesuffix(".weight") not in quantized})
    quantization = {"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK] if fp8 == "block" else None,
        "modules_to_not_convert": ["lm_head", *kept]}} if fp8 else {}
    shards, held = list[dict[str, Tensor]]([{}]), 0
    where: dict[str, int] = {}
    for name, named in layout.parts(config).items():
        in_fp8 = bool(fp8) and name.endswith(".weight") and name.removesuffix(".weight") in quantized
        for theirs, part in zip(named, layout.split(name, read(name), config, len(named)), strict=True):
            tensors = {theirs: part.to(torch.bfloat16).contiguous().clone()}
            if in_fp8:
                codes, scale = _quantized(part.float(), fp8 == "block", (scales or {}).get(name))
                tensors = {theirs: codes, f"{theirs}_scale_inv": scale}
            size = sum(t.nbytes for t in tensors.values())
            if held and held + size > shard:
                _save(folder, len(shards), shards[-1])
                shards[-1] = {}
                shards.append({})
                held = 0
            shards[-1] |= tensors
            where |= dict.fromkeys(tensors, len(shards))
            held += size
    _save(folder, len(shards), shards[-1])
    _name_files(folder, where, len(shards))
    text = json.dumps({**said, "dtype": "bfloat16", "torch_dtype": "bfloat16", **quantization}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")


def _quantized(weight: Tensor, blocks: bool, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes of `weight` [rows, columns], float32, and scales that multiply: [row blocks, column blocks], or one: `scale` if any."""
    if not blocks:
        amax = weight.abs().amax()
        whole = scale.reshape(()).float() if scale is not None else torch.where(amax > 0, amax / LARGEST, 1.0)
        return (weight / whole).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), whole.clone()
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.reshape(-(-rows // BLOCK), BLOCK, -1, BLOCK)  # [row blocks, 128, column blocks, 128]
    amax = tiles.abs().amax((1, 3))
    power = torch.exp2(torch.ceil(torch.log2(amax / LARGEST)))
    found = torch.where(amax > 0, power, torch.ones_like(power))
    codes = (tiles / found[:, None, :, None]).flatten(2, 3).flatten(0, 1)[:rows, :columns]
    return codes.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).contiguous(), found


def _save(folder: Path, number: int, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / f"{number}.part", {"format": "pt"})


def _name_files(folder: Path, where: Mapping[str, int], count: int) -> None:
    if count == 1:
        (folder / "1.part").rename(folder / WHOLE)
        return
    names = {n: f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)}
    for number, name in names.items():
        (folder / f"{number}.part").rename(folder / name)
    size = sum((folder / name).stat().st_size for name in names.values())
    index = {"metadata": {"total_size": size}, "weight_map": {tensor: names[n] for tensor, n in where.items()}}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
