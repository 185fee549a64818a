"""Hugging Face checkpoints: reads safetensors, one file or shards, tensor by tensor.

FP8 weights are dequantized as they are read. A float8_e4m3fn weight has float32 scales next to it,
which multiply it:

    weight_scale_inv   per 128x128 block, or one per tensor (DeepSeek-V3, transformers' `fp8`)
    weight_scale       per row, or one per tensor (compressed-tensors)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fp8cfg.models.config import GATED, TransformerConfig, parameter_shapes
from fp8cfg.models.weight_files import INDEX, SINGLE_FILE, missing_weights
from fp8cfg.models.weight_init import TensorShard, local_parts

Shapes = dict[str, tuple[int, ...]]
_LAYER = "model.layers.{}."
LLAMA = {
    "embedding": ("model.embed_tokens",),
    "final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
    "layers.{}.input_layernorm": (f"{_LAYER}input_layernorm",),
    "layers.{}.self_attention.linear_qkv": tuple(f"{_LAYER}self_attn.{x}_proj" for x in "qkv"),
    "layers.{}.self_attention.linear_proj": (f"{_LAYER}self_attn.o_proj",),
    "layers.{}.pre_mlp_layernorm": (f"{_LAYER}post_attention_layernorm",),
    "layers.{}.mlp.linear_fc1": (f"{_LAYER}mlp.gate_proj", f"{_LAYER}mlp.up_proj"),
    "layers.{}.mlp.linear_fc2": (f"{_LAYER}mlp.down_proj",),
}
"""Llama's modules, our names with theirs."""


@dataclass(frozen=True)
class Layout:
    """How transformers lays out the weights of a model family.

    Attributes:
        names: Our module names with theirs. `{}` is the number of a layer.
        conv1d: Whether linear weights are transposed, as in GPT-2's Conv1D.
        centered: Whether norm weights are differences from 1. None means as in our model.
    """

    names: Mapping[str, tuple[str, ...]]
    conv1d: bool = False
    centered: bool | None = None

    def hf_shapes(self, config: TransformerConfig) -> dict[str, Shapes]:
        """Returns the Hugging Face tensors of each of our parameters, names with shapes."""
        return {
            name: self._hf_shapes(name, shape, config)
            for name, shape in parameter_shapes(config).items()
        }

    def _hf_shapes(self, name: str, shape: tuple[int, ...], config: TransformerConfig) -> Shapes:
        module, _, leaf = name.rpartition(".")
        key, number = module, ""
        if module.startswith("layers."):
            _, number, suffix = module.split(".", 2)
            key = f"layers.{{}}.{suffix}"
        hf_modules = self.names[key]
        rows: Sequence[int] = shape[:1]
        if len(hf_modules) == 3:  # queries, keys, values
            rows = (config.query_size, config.key_size, config.key_size)
        elif len(hf_modules) == 2:  # gate and up projection
            rows = (config.ffn_hidden_size, config.ffn_hidden_size)
        shapes = {}
        for hf_module, num_rows in zip(hf_modules, rows, strict=True):
            hf_shape = (num_rows, *shape[1:])
            if self.transposes(name):
                hf_shape = hf_shape[::-1]
            shapes[f"{hf_module.format(number)}.{leaf}"] = hf_shape
        return shapes

    def transposes(self, name: str) -> bool:
        """Returns whether transformers stores our parameter `name` transposed."""
        return self.conv1d and ".linear_" in name and name.endswith(".weight")

    def shift(self, name: str, config: TransformerConfig) -> float:
        """Returns what to add to our norm weight for the checkpoint: -1, 0 or 1."""
        if self.centered is None or not name.endswith("layernorm.weight"):
            return 0.0
        return float(config.layernorm_zero_centered_gamma) - float(self.centered)

    def fuse(self, name: str, tensors: list[Tensor], config: TransformerConfig) -> Tensor:
        """Makes our parameter `name` from Hugging Face's tensors, in the order of `hf_shapes`."""
        if self.transposes(name):
            tensors = [tensor.T for tensor in tensors]
        if ".linear_qkv." in name:
            if len(tensors) == 1:  # GPT-2 has one matrix: all queries, all keys, all values
                sizes = (config.query_size, config.key_size, config.key_size)
                tensors = list(tensors[0].split_with_sizes(sizes))
            # Our rows alternate: queries, key and value of the first group, then of the second.
            groups = [_split_heads(tensor, config) for tensor in tensors]
            return torch.cat(groups, dim=1).flatten(0, 2)
        # torch.cat of one tensor would copy it.
        fused = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
        shift = self.shift(name, config)
        if shift:
            return (fused.float() - shift).to(fused.dtype)
        return fused

    def split(
        self, name: str, tensor: Tensor, config: TransformerConfig, num_tensors: int
    ) -> list[Tensor]:
        """Splits our parameter `name` into Hugging Face's tensors, in the order of `hf_shapes`.

        Args:
            name: Name of the parameter.
            tensor: Its value.
            config: The model's shapes.
            num_tensors: Number of Hugging Face's tensors.
        """
        tensors = [tensor]
        shift = self.shift(name, config)
        if ".linear_qkv." in name:
            heads = (config.heads_per_group, 1, 1)
            groups = _split_heads(tensor, config).split_with_sizes(heads, dim=1)
            tensors = [group.flatten(0, 2) for group in groups]
            if num_tensors != 3:
                tensors = [torch.cat(tensors)]
        elif ".linear_fc1." in name and config.activation in GATED:
            tensors = list(tensor.chunk(2))
        elif shift:
            tensors = [(tensor.float() + shift).to(tensor.dtype)]
        if self.transposes(name):
            tensors = [part.T.contiguous() for part in tensors]
        return tensors


def from_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """Converts a state dict of a transformers model for `Transformer(config)`.

    Args:
        state_dict: The state dict. With `tie_embeddings`, `lm_head.weight` may be missing.
        config: The model's shapes.
        layout: The family's layout. Default that of `LlamaForCausalLM`.

    Returns:
        Our state dict, with the dtypes of `state_dict`.

    Raises:
        ValueError: Names are missing or unexpected, shapes differ from the config, or a tied
            `lm_head` differs from the embedding.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    read_parameter = parameter_reader(shapes, state_dict.__getitem__, config, layout)
    parameters = {name: read_parameter(name) for name in parameter_shapes(config)}
    if config.tie_embeddings:
        parameters["output_layer.weight"] = parameters["embedding.weight"]
    return parameters


def to_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """Converts a state dict of `Transformer(config)` for transformers. The inverse of `from_hf`.

    Args:
        state_dict: Our state dict.
        config: The model's shapes.
        layout: The family's layout. Default that of `LlamaForCausalLM`.

    Returns:
        The state dict, without `lm_head.weight` if it is tied.

    Raises:
        ValueError: Names are missing or unexpected, or shapes differ from the config.
    """
    parameters = dict(state_dict)
    if config.tie_embeddings:
        parameters.pop("output_layer.weight", None)
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    _check_shapes(shapes, parameter_shapes(config))
    hf_state: dict[str, Tensor] = {}
    for name, hf_shapes in layout.hf_shapes(config).items():
        tensors = layout.split(name, parameters[name], config, len(hf_shapes))
        hf_state.update(zip(hf_shapes, tensors, strict=True))
    return hf_state


@torch.no_grad()
def load(model: torch.nn.Module, config: TransformerConfig, folder: Path, layout: Layout) -> None:
    """Reads a checkpoint into a model, one full parameter at a time.

    Args:
        model: A Transformer or a pipeline stage. Ranks with parts of parameters load their parts.
        config: The model's shapes.
        folder: The checkpoint.
        layout: The family's layout.

    Raises:
        ValueError: See `checkpoint_reader`.
    """
    read_parameter = checkpoint_reader(config, folder, layout)
    parameters = dict(model.named_parameters())
    shards: Mapping[str, TensorShard] = getattr(model, "shards", {})
    for name in parameter_shapes(config):
        if name not in parameters:  # on another pipeline stage
            continue
        tensor = read_parameter(name)
        for part, offset in local_parts(parameters[name], shards.get(name)):
            if part.numel():
                slices = [
                    slice(start, start + size)
                    for start, size in zip(offset, part.shape, strict=True)
                ]
                part.copy_(tensor[tuple(slices)])
        del tensor  # before the next one is read


def checkpoint_reader(
    config: TransformerConfig, folder: Path, layout: Layout
) -> Callable[[str], Tensor]:
    """Returns a function that reads one of our parameters from a checkpoint by its name.

    Args:
        config: The model's shapes.
        folder: The checkpoint.
        layout: The family's layout.

    Raises:
        ValueError: See `Checkpoint` and `parameter_reader`. The function raises it, too.
    """
    checkpoint = Checkpoint(folder)
    return parameter_reader(checkpoint.shapes, checkpoint.read, config, layout)


def parameter_reader(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    config: TransformerConfig,
    layout: Layout,
) -> Callable[[str], Tensor]:
    """Returns a function that makes one of our parameters from Hugging Face's tensors.

    Args:
        shapes: Shapes of Hugging Face's tensors by name.
        read: Reads one of these tensors.
        config: The model's shapes.
        layout: The family's layout.

    Raises:
        ValueError: See `from_hf`.
    """
    hf_shapes = layout.hf_shapes(config)
    head = f"{layout.names['output_layer'][0]}.weight"
    embedding = f"{layout.names['embedding'][0]}.weight"
    # Llama 2 checkpoints have the rotary frequencies as buffers, GPT-2's the causal mask. Here both
    # follow from the config.
    buffers = ("rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
    weights = {name: shape for name, shape in shapes.items() if not name.endswith(buffers)}
    has_tied_head = config.tie_embeddings and head in weights
    if has_tied_head:
        del weights[head]
    expected: Shapes = {}
    for tensors in hf_shapes.values():
        expected.update(tensors)
    _check_shapes(weights, expected)
    if has_tied_head and not torch.equal(read(head), read(embedding)):
        raise ValueError(
            f"{head} differs from {embedding}, but model.share_embeddings_and_output_weights=true"
        )

    def read_parameter(name: str) -> Tensor:
        tensors = [read(hf_name) for hf_name in hf_shapes[name]]
        return layout.fuse(name, tensors, config)

    return read_parameter


def _split_heads(weight: Tensor, config: TransformerConfig) -> Tensor:
    """Views rows of heads [rows, ...] as [groups, heads of a group, head_dim, ...]."""
    return weight.reshape(config.num_query_groups, -1, config.head_dim, *weight.shape[1:])


def _check_shapes(
    shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """Raises ValueError if names or shapes differ from the expected ones."""
    differences = []
    missing = expected.keys() - shapes.keys()
    if missing:
        differences.append(f"{len(missing)} missing: {_list_names(missing)}")
    unexpected = shapes.keys() - expected.keys()
    if unexpected:
        differences.append(f"{len(unexpected)} unexpected: {_list_names(unexpected)}")
    if differences:
        raise ValueError(f"not the weights of this model: {'; '.join(differences)}")
    for name, shape in expected.items():
        if shapes[name] != shape:
            raise ValueError(
                f"{name} has shape {list(shapes[name])}, the config says {list(shape)}"
            )


def _list_names(names: Set[str], limit: int = 4) -> str:
    text = ", ".join(sorted(names)[:limit])
    if len(names) > limit:
        text += ", ..."
    return text


SCALES = ("_scale_inv", "_scale")
# Tensors without a parameter here. Scales of activations serve inference engines.
IGNORED = (*SCALES, ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
METHODS = {"fp8", "compressed-tensors"}
CONFIG = "config.json"
# A JSON file is read up to this size, so that a wrong file cannot fill the memory.
MAX_JSON_BYTES = 1 << 26


class Checkpoint:
    """The weights of a folder with safetensors files.

    Files are opened at once and memory-mapped; tensors are read on demand.
    """

    def __init__(self, folder: Path) -> None:
        """Opens the files of a folder.

        Raises:
            ValueError: The folder has no safetensors, a damaged file or index, or a quantization
                that is not supported.
        """
        self.folder = folder
        self.files: dict[str, Any] = {}  # the open file of each tensor
        for name in self._file_names():
            file = self._open(name)
            # safetensors' file is no mapping, so it must be asked for its keys.
            for tensor in file.keys():  # noqa: SIM118
                self.files[tensor] = file
        self._block = self._read_block_size()

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights by name, without scales."""
        return {
            name: tuple(file.get_slice(name).get_shape())
            for name, file in self.files.items()
            if not name.endswith(IGNORED)
        }

    def read(self, name: str) -> Tensor:
        """Reads a weight to the CPU, in its dtype. FP8 weights are dequantized to float32.

        Raises:
            ValueError: The weight has values that are not finite, no float dtype, or FP8 without
                supported scales.
        """
        tensor: Tensor = self.files[name].get_tensor(name)
        if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
            scale_names = [name + suffix for suffix in SCALES if name + suffix in self.files]
            if tensor.dtype != torch.float8_e4m3fn or not scale_names:
                raise ValueError(f"{name}: {_dtype_name(tensor)} without supported scales")
            scale = self.files[scale_names[0]].get_tensor(scale_names[0])
            tensor = dequantize(tensor, scale.float(), self._block)
        _check_values(name, tensor)
        return tensor

    def _file_names(self) -> list[str]:
        if (self.folder / INDEX).is_file():
            weight_map = read_json_object(self.folder, INDEX).get("weight_map")
            files = list(weight_map.values()) if isinstance(weight_map, dict) else []
            for name in files:
                # An index from the Hub could point outside the folder.
                if not isinstance(name, str) or not name or Path(name).name != name:
                    raise ValueError(f"{INDEX}: {str(name)[:60]!r} is not a file of this folder")
            if not files:
                raise ValueError(
                    f"{INDEX}: has no weight_map, so the files of the tensors are unknown"
                )
            return sorted(set(files))
        if (self.folder / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        raise ValueError(missing_weights(self.folder))

    def _open(self, name: str) -> Any:
        path = self.folder / name
        try:
            # Opening a pipe would block.
            if path.exists() and not path.is_file():
                raise OSError("not a regular file")
            return safe_open(path, framework="pt")
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{name[:60]} cannot be read ({error})") from None

    def _read_block_size(self) -> tuple[int, int]:
        """Returns rows and columns of the blocks of scales, from config.json."""
        quantization = None
        if (self.folder / CONFIG).is_file():
            quantization = read_json_object(self.folder, CONFIG).get("quantization_config")
        if not quantization:
            return 128, 128
        method = quantization
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        if not isinstance(method, str) or method not in METHODS:
            raise ValueError(
                f"quant_method={method}: not supported; use a checkpoint with one of"
                f" {', '.join(sorted(METHODS))}, or in high precision"
            )
        if not isinstance(quantization, dict):
            return 128, 128
        block = quantization.get("weight_block_size") or (128, 128)
        is_pair = isinstance(block, (list, tuple)) and len(block) == 2
        if not is_pair or any(type(size) is not int or size < 1 for size in block):
            raise ValueError(f"weight_block_size={block}: expected two whole numbers")
        return block[0], block[1]


def read_json_object(folder: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file of a folder from elsewhere.

    Raises:
        ValueError: The file can't be read, or is not a JSON object.
    """
    try:
        with (folder / name).open("rb") as file:
            data = json.loads(file.read(MAX_JSON_BYTES))
    # Deeply nested lists exceed Python's recursion limit.
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{name} cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{name} is not a JSON object")
    return data


def _check_values(name: str, weight: Tensor) -> None:
    """Raises ValueError for a weight that training cannot start from."""
    if not weight.is_floating_point():
        raise ValueError(f"{name}: {_dtype_name(weight)} is not a dtype of weights")
    if not weight.isfinite().all():
        raise ValueError(f"{name}: has values that are not finite")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def dequantize(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Multiplies an FP8 weight by its scales.

    Args:
        weight: float8 [rows, columns].
        scale: float32: one value, [rows, 1], or [row blocks, column blocks].
        block: Rows and columns of a block.

    Returns:
        float32 [rows, columns].

    Raises:
        ValueError: The weight is no matrix, or the scales have another shape.
    """
    if weight.dim() != 2:
        raise ValueError(
            f"FP8 weight with shape {list(weight.shape)} is not supported; only matrices are"
        )
    rows, columns = weight.shape
    wide = weight.float()
    if scale.numel() == 1 or tuple(scale.shape) == (rows, 1):
        return wide * scale.reshape(-1, 1)
    if block:
        # Rounded up: the last blocks may be cut off.
        num_blocks = (-(-rows // block[0]), -(-columns // block[1]))
        if tuple(scale.shape) == num_blocks:
            # Cut before the second repeat, for memory.
            scale_rows = scale.repeat_interleave(block[0], 0)[:rows]
            return wide.mul_(scale_rows.repeat_interleave(block[1], 1)[:, :columns])
    raise ValueError(
        f"scales of shape {list(scale.shape)} do not fit a weight of {rows} x {columns}"
    )
