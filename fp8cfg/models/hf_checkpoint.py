"""Hugging Face checkpoint: safetensors in one file or sharded, read tensor by tensor; FP8 weights are dequantized as they are read.

A float8_e4m3fn weight has its scales beside it, in float32: `weight_scale_inv` for each 128x128 block or for the whole
(DeepSeek-V3, transformers' `fp8`), or `weight_scale` for the whole or for each row (compressed-tensors). Either multiplies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8cfg.models import hf
from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.shapes import parameter_shapes
from fp8cfg.models.tensor_shard import TensorShard
from fp8cfg.models.weight_init import local_parts

SCALES = ("_scale_inv", "_scale")
IGNORED = (*SCALES, ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
METHODS = {"fp8", "compressed-tensors"}
INDEX, WHOLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
MAX_BYTES = 1 << 26
"""A larger index is none."""


class Checkpoint:
    """The tensors of a folder. Raises ValueError for a folder without safetensors, an index that does not fit, or a quantization
    other than those above."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.opened = {name: self._open(name) for name in self._files()}
        self.where: dict[str, Any] = {
            tensor: file
            for file in self.opened.values()
            for tensor in file.keys()  # noqa: SIM118, safetensors' file is no mapping
        }
        self.block = self._block()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight by name; of scales none."""
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self.where.items()
            if not name.endswith(IGNORED)
        }

    def read(self, name: str) -> Tensor:
        """A weight, on the CPU: in its dtype, or in float32 where it is quantized."""
        tensor: Tensor = self.where[name].get_tensor(name)
        if not tensor.is_floating_point() or tensor.dtype.itemsize > 1:
            return _finite(name, tensor)
        scales = [name + end for end in SCALES if name + end in self.where]
        if tensor.dtype != torch.float8_e4m3fn or not scales:
            raise ValueError(
                f"{name}: {str(tensor.dtype).removeprefix('torch.')} without scales that are known"
            )
        return _finite(
            name,
            dequantized(tensor, self.where[scales[0]].get_tensor(scales[0]).float(), self.block),
        )

    def _files(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            where = json_object(self.folder, INDEX).get("weight_map")
            files = list(where.values()) if isinstance(where, dict) else []
            if strange := [
                name
                for name in files
                if not isinstance(name, str) or not name or Path(name).name != name
            ]:
                raise ValueError(f"{INDEX}: {str(strange[0])[:60]!r} is no file of this folder")
            if not files:
                raise ValueError(f"{INDEX}: has no weight_map, which says what is in which file")
            return sorted(set(files))
        if (self.folder / WHOLE).is_file():
            return [WHOLE]
        if any(self.folder.glob("pytorch_model*.bin")) or any(self.folder.glob("*.pt*")):
            line = (
                "from transformers import AutoModelForCausalLM as A; "
                f"A.from_pretrained('{self.folder}').save_pretrained('{self.folder}')"
            )
            raise ValueError(
                "has pickled weights, which can run code and are not read; write them as"
                " safetensors: "
                f'python -c "{line}"'
            )
        raise ValueError(f"has neither {WHOLE} nor {INDEX}")

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            if path.exists() and not path.is_file():
                raise OSError("is no file")  # a pipe would be waited for
            return safe_open(path, framework="pt")
        except (OSError, ValueError, SafetensorError) as e:
            raise ValueError(f"{name[:60]} cannot be read ({e})") from None

    def _block(self) -> tuple[int, int] | None:
        said = (
            json_object(self.folder, CONFIG).get("quantization_config")
            if (self.folder / CONFIG).is_file()
            else None
        )
        method = said.get("quant_method") if isinstance(said, dict) else said
        if said and (not isinstance(method, str) or method not in METHODS):
            raise ValueError(
                f"quant_method={method}: not read here; {' and '.join(sorted(METHODS))} are"
            )
        block = (said or {}).get("weight_block_size") or (128, 128)
        if (
            not isinstance(block, (list, tuple))
            or len(block) != 2
            or any(type(size) is not int or size < 1 for size in block)
        ):
            raise ValueError(f"weight_block_size={block}: expected two whole numbers")
        return block[0], block[1]


def json_object(folder: Path, name: str) -> dict[str, Any]:
    """The file `name` of a folder that somebody else wrote. Raises ValueError for one that is no JSON object."""
    try:
        with (folder / name).open("rb") as file:
            said = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{name} cannot be read ({e})") from None
    if not isinstance(said, dict):
        raise ValueError(f"{name} is no JSON object")
    return said


def _finite(name: str, weight: Tensor) -> Tensor:
    """`weight`, unless it holds what no training goes on from."""
    if not weight.is_floating_point():
        raise ValueError(
            f"{name}: {str(weight.dtype).removeprefix('torch.')} is no dtype of weights"
        )
    if not weight.isfinite().all():
        raise ValueError(f"{name}: has values that are not finite")
    return weight


def dequantized(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """`weight` float8 [rows, columns] x `scale`, in float32: one for the whole, one for each row [rows, 1], or one for each block.
    Raises ValueError where the scales fit none of these."""
    if weight.dim() != 2:
        raise ValueError(
            f"a weight of {weight.dim()} dimension{'s' * (weight.dim() != 1)} in FP8: not read here"
        )
    wide, (rows, columns) = weight.float(), weight.shape
    if scale.numel() == 1 or tuple(scale.shape) == (rows, 1):
        return wide * scale.reshape(-1, 1)
    if block and tuple(scale.shape) == (-(-rows // block[0]), -(-columns // block[1])):
        spread = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[
            :, :columns
        ]
        return wide.mul_(spread)
    raise ValueError(f"scales {list(scale.shape)} fit no weight of {rows} x {columns}")


def reader(config: TransformerConfig, folder: Path, layout: hf.Layout) -> Callable[[str], Tensor]:
    """What reads each parameter of a Transformer of `config` by name from `folder`. It and its calls raise ValueError as Checkpoint
    and `hf.reader` do."""
    checkpoint = Checkpoint(folder)
    return hf.reader(checkpoint.shapes, checkpoint.read, config, layout)


@torch.no_grad()
def load(
    model: torch.nn.Module, config: TransformerConfig, folder: Path, layout: hf.Layout
) -> None:
    """Fill the parameters of `model`, a Transformer of `config`, or this rank's parts of them, from `folder`, one whole tensor
    of ours at a time. Raises ValueError as `reader` does."""
    one, parameters = reader(config, folder, layout), dict(model.named_parameters())
    shards: Mapping[str, TensorShard] = getattr(model, "shards", {})
    for name in parameter_shapes(config):
        tensor = one(name)
        for part, first in local_parts(parameters[name], shards.get(name)):
            if part.numel():
                part.copy_(
                    tensor[
                        tuple(
                            slice(start, start + size)
                            for start, size in zip(first, part.shape, strict=True)
                        )
                    ]
                )
        del tensor  # before the next one is read
