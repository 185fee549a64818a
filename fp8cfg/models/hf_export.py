"""Hugging Face export: writes a Transformer's weights as sharded safetensors.

Weights are BF16, FP16 or FP32. Linear weights can be FP8 with scales instead. FP8 has the layout of
DeepSeek-V3 and of transformers' `fp8`: each float8_e4m3fn `weight` has a float32
`weight_scale_inv`, one factor per 128x128 block or per tensor. Block scales are powers of two. So
FP8 weights with such scales are exported without rounding, although the rows of the two layouts
differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8cfg.models.config import TransformerConfig
from fp8cfg.models.hf_checkpoint import Layout
from fp8cfg.models.weight_files import INDEX, SINGLE_FILE

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""
# safetensors' names. Tensors are stored in this order, so wide types come first and stay aligned.
DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
}
CHUNK = 1 << 26
"""Bytes of a tensor that are copied to the CPU at a time."""
BLOCK, E4M3_MAX = 128, 448.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Smaller scales could be 0, and weights divided by them NaN."""
MAX_FILE_BYTES = 5 * 10**9
"""Size of a file, about."""
Weight = tuple[Tensor, Tensor | None]
"""A parameter, and the factor [] of an E4M3 weight with one scale per tensor, or None."""


class WeightOverflow(Exception):
    """A weight has larger values than the dtype of the export."""


def write_model(
    folder: Path,
    config: TransformerConfig,
    hf_config: Mapping[str, Any],
    layout: Layout,
    read: Callable[[str], Weight],
    fp8: str | None = None,
    quantized: Collection[str] = (),
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes config.json and the weights. Each weight is written before the next one is read.

    Args:
        folder: An existing empty folder.
        config: The model's shapes.
        hf_config: The content of config.json.
        layout: The family's layout.
        read: Reads a weight by our name.
        fp8: Scales of FP8 weights: "block", "tensor", or None for no FP8.
        quantized: Our names of the modules with FP8 weights.
        max_file_bytes: Size of a file, about.
        dtype: Dtype of the other weights.

    Raises:
        WeightOverflow: A weight does not fit in float16.
    """
    hf_shapes = layout.hf_shapes(config)
    fp8_weights = set()
    unquantized_modules: set[str] = set()  # Hugging Face's names of linear layers in high precision
    if fp8:
        for name, tensors in hf_shapes.items():
            if not name.endswith(".weight"):
                continue
            if name.removesuffix(".weight") in quantized:
                fp8_weights.add(name)
            elif ".linear_" in name:
                unquantized_modules.update(hf_name.removesuffix(".weight") for hf_name in tensors)

    specs = []
    for name, tensors in hf_shapes.items():
        tensor_fp8 = fp8 if name in fp8_weights else None
        for hf_name, shape in tensors.items():
            specs.append(_stored_specs(hf_name, shape, tensor_fp8, dtype))
    files = _create_files(folder, specs, max_file_bytes)
    for name, tensors in hf_shapes.items():
        tensor_fp8 = fp8 if name in fp8_weights else None
        for hf_name, tensor in _stored_tensors(
            name, list(tensors), config, layout, read, tensor_fp8, dtype
        ):
            files[hf_name].write(hf_name, tensor)

    dtype_name = str(dtype).removeprefix("torch.")
    # transformers 5 reads `dtype`, earlier versions and vLLM `torch_dtype`.
    content = {**hf_config, "dtype": dtype_name, "torch_dtype": dtype_name}
    if fp8:
        content["quantization_config"] = {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK] if fp8 == "block" else None,
            "modules_to_not_convert": ["lm_head", *sorted(unquantized_modules)],
        }
    text = json.dumps(content, indent=2) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")


def _stored_tensors(
    name: str,
    hf_names: Sequence[str],
    config: TransformerConfig,
    layout: Layout,
    read: Callable[[str], Weight],
    fp8: str | None,
    dtype: torch.dtype,
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors to write for our parameter `name`, with their names."""
    weight, scale = read(name)
    # Cast matrices before the split, which may copy them. A vector may be a norm's weight, which is
    # shifted in its own dtype.
    if weight.dim() > 1 and not fp8:
        weight = weight.to(dtype)
    parts = layout.split(name, weight, config, len(hf_names))
    for hf_name, part in zip(hf_names, parts, strict=True):
        if fp8:
            if fp8 == "block":
                data, scale_inv = _quantize_blocks(part.float())
            else:
                data, scale_inv = _quantize_tensor(part.float(), scale)
            yield hf_name, data
            yield f"{hf_name}_scale_inv", scale_inv
            continue
        stored = part.to(dtype)
        if dtype == torch.float16 and not stored.isfinite().all():
            raise WeightOverflow(f"{hf_name} has values beyond 65504, the largest of fp16")
        yield hf_name, stored


def _stored_specs(
    hf_name: str, shape: tuple[int, ...], fp8: str | None, dtype: torch.dtype
) -> dict[str, TensorSpec]:
    """Returns dtype and shape of the tensors that `_stored_tensors` yields for one part."""
    if not fp8:
        return {hf_name: (dtype, shape)}
    scale_shape: tuple[int, ...] = ()
    if fp8 == "block":
        scale_shape = tuple(-(-size // BLOCK) for size in shape)  # rounded up
    return {
        hf_name: (torch.float8_e4m3fn, shape),
        f"{hf_name}_scale_inv": (torch.float32, scale_shape),
    }


def _quantize_tensor(weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix with one scale.

    Args:
        weight: float32 [rows, columns].
        scale: The scale of training, [], so that the same FP8 values result. None computes one.

    Returns:
        E4M3 [rows, columns] and the scale, float32 [], that multiplies it.
    """
    # Some rows at a time: the temporaries are float32.
    bands = torch.split(weight, BLOCK)
    if scale is not None:
        scale_inv = scale.reshape(()).float()
    else:
        amax = torch.stack([band.abs().amax() for band in bands]).amax()
        scale_inv = (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
        scale_inv = torch.where(amax > 0, scale_inv, 1.0)
    return torch.cat([_cast_to_e4m3(band / scale_inv) for band in bands]), scale_inv


def _quantize_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantizes a matrix with a power of two per 128x128 block.

    Args:
        weight: float32 [rows, columns].

    Returns:
        E4M3 [rows, columns] and the scales, float32 [row blocks, column blocks], that multiply it.
    """
    data = []
    scales = []
    # One row of blocks at a time: the temporaries are float32.
    for band in torch.split(weight, BLOCK):
        num_rows, num_columns = band.shape
        padded = F.pad(band, (0, -num_columns % BLOCK, 0, -num_rows % BLOCK))
        blocks = padded.reshape(1, BLOCK, -1, BLOCK)  # [1, 128, column blocks, 128]
        amax = blocks.abs().amax((1, 3))
        smallest = (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE)
        scale = torch.exp2(torch.ceil(torch.log2(smallest)))  # rounded up to a power of two
        scale = torch.where(amax > 0, scale, torch.ones_like(scale))  # [1, column blocks]
        scaled = (blocks / scale[:, None, :, None]).flatten(2, 3).flatten(0, 1)
        data.append(_cast_to_e4m3(scaled[:num_rows, :num_columns]))
        scales.append(scale)
    return torch.cat(data), torch.cat(scales)


def _cast_to_e4m3(scaled: Tensor) -> Tensor:
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _create_files(
    folder: Path, specs: Sequence[dict[str, TensorSpec]], max_bytes: int
) -> dict[str, SafetensorsFile]:
    """Creates the safetensors files, and their index if there are several.

    Args:
        folder: Their folder.
        specs: Tensors that belong together, such as a weight and its scales, share a file.
        max_bytes: Size of a file, about.

    Returns:
        The file of each tensor, by the tensor's name.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    shard_bytes = 0
    for tensors in specs:
        size = sum(tensor_bytes(spec) for spec in tensors.values())
        if shard_bytes and shard_bytes + size > max_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1].update(tensors)
        shard_bytes += size

    count = len(shards)
    files: dict[str, SafetensorsFile] = {}
    total_bytes = 0
    for number, shard in enumerate(shards, 1):
        name = SINGLE_FILE
        if count > 1:
            name = f"model-{number:05d}-of-{count:05d}.safetensors"
        file = SafetensorsFile(folder / name, shard)
        files.update(dict.fromkeys(shard, file))
        total_bytes += file.size
    if count > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {tensor: file.path.name for tensor, file in files.items()},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return files


class SafetensorsFile:
    """A new safetensors file. Its header is written first, its tensors later in any order.

    safetensors' own writer needs all tensors of a file in memory.

    Attributes:
        path: The file.
        size: Bytes of the complete file.
    """

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Creates the file for tensors with these names, dtypes and shapes."""
        dtype_order = list(DTYPES)
        names = sorted(specs, key=lambda name: (dtype_order.index(specs[name][0]), name))
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts: dict[str, int] = {}
        offset = 0
        for name in names:
            dtype, shape = specs[name]
            starts[name] = offset
            offset += tensor_bytes(specs[name])
            entries[name] = {
                "dtype": DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [starts[name], offset],
            }
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)  # the format aligns data to 8 bytes
        data_start = 8 + len(header)
        self.path = path
        self.size = data_start + offset
        self._specs = dict(specs)
        self._starts = {name: data_start + start for name, start in starts.items()}
        path.write_bytes(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Writes one tensor. Raises OSError."""
        assert (tensor.dtype, tuple(tensor.shape)) == self._specs[name], name
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        with self.path.open("r+b") as file:
            file.seek(self._starts[name])
            for chunk in torch.split(data, CHUNK):
                file.write(chunk.cpu().numpy().data)


def tensor_bytes(spec: TensorSpec) -> int:
    """Returns the bytes of a tensor."""
    dtype, shape = spec
    return dtype.itemsize * prod(shape)
