"""Hugging Face checkpoint: safetensors in one file or sharded, read tensor by tensor; FP8 weights are dequantized as they are read.

A float8_e4m3fn weight has its scales beside it, in float32: `weight_scale_inv` for each 128x128 block or for the whole
(DeepSeek-V3, transformers' `fp8`), or `weight_scale` for the whole or for each row (compressed-tensors). Either multiplies.
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
from fp8cfg.models.weight_files import INDEX, WHOLE, no_weights
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
"""Llama's modules, ours with theirs."""


@dataclass(frozen=True)
class Layout:
    """How a family lays out its weights: the `names` of modules, ours with theirs and `{}` for a layer's number; whether linear
    weights are transposed (`conv1d`); and whether norms are `centered`, differences from 1, None where as ours are.
    """

    names: Mapping[str, tuple[str, ...]]
    conv1d: bool = False
    centered: bool | None = None

    def parts(self, config: TransformerConfig) -> dict[str, Shapes]:
        """Our names, each with the names and shapes of what makes it up at Hugging Face."""
        return {
            name: self._of(name, shape, config) for name, shape in parameter_shapes(config).items()
        }

    def _of(self, name: str, shape: tuple[int, ...], config: TransformerConfig) -> Shapes:
        module, _, leaf = name.rpartition(".")
        at, number = module, ""
        if module.startswith("layers."):
            _, number, rest = module.split(".", 2)
            at = f"layers.{{}}.{rest}"
        names = self.names[at]
        rows: Sequence[int] = shape[:1]
        if len(names) == 3:
            rows = (config.query_size, config.key_size, config.key_size)
        elif len(names) == 2:
            rows = (config.ffn_hidden_size, config.ffn_hidden_size)
        shapes = [(count, *shape[1:]) for count in rows]
        if self.transposes(name):
            shapes = [shape[::-1] for shape in shapes]
        return dict(
            zip((f"{theirs.format(number)}.{leaf}" for theirs in names), shapes, strict=True)
        )

    def transposes(self, name: str) -> bool:
        """Whether the weight that we call `name` is transposed."""
        return self.conv1d and ".linear_" in name and name.endswith(".weight")

    def shift(self, name: str, config: TransformerConfig) -> float:
        """What a norm's weight is more in the checkpoint than here."""
        if self.centered is None or not name.endswith("layernorm.weight"):
            return 0.0
        return float(config.layernorm_zero_centered_gamma) - float(self.centered)

    def fuse(self, name: str, parts: list[Tensor], config: TransformerConfig) -> Tensor:
        """Our parameter of theirs."""
        if self.transposes(name):
            parts = [part.T for part in parts]
        if ".linear_qkv." in name:
            if len(parts) == 1:
                parts = list(
                    parts[0].split_with_sizes((config.query_size, config.key_size, config.key_size))
                )
            return torch.cat([_by_group(part, config) for part in parts], dim=1).flatten(0, 2)
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        shift = self.shift(name, config)
        return (whole.float() - shift).to(whole.dtype) if shift else whole

    def split(self, name: str, ours: Tensor, config: TransformerConfig, count: int) -> list[Tensor]:
        """Their `count` tensors of our parameter."""
        parts = [ours]
        if ".linear_qkv." in name:
            groups = _by_group(ours, config).split_with_sizes((config.heads_per_group, 1, 1), dim=1)
            parts = [part.flatten(0, 2) for part in groups]
            parts = parts if count == 3 else [torch.cat(parts)]
        elif ".linear_fc1." in name and config.activation in GATED:
            parts = list(ours.chunk(2))
        elif shift := self.shift(name, config):
            parts = [(ours.float() + shift).to(ours.dtype)]
        return [part.T.contiguous() for part in parts] if self.transposes(name) else parts


def from_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """A state dict for `Transformer(config)` from one of transformers' model, by default of `LlamaForCausalLM`.

    Dtypes are kept. Under `tie_embeddings`, `lm_head.weight` may be absent. Raises ValueError for missing and
    unexpected names, for shapes that are not the config's, and for a tied `lm_head` that differs from the embedding.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    one = hf_reader(shapes, state_dict.__getitem__, config, layout)
    ours = {name: one(name) for name in parameter_shapes(config)}
    if config.tie_embeddings:
        ours["output_layer.weight"] = ours["embedding.weight"]
    return ours


def hf_reader(
    given: Mapping[str, tuple[int, ...]],
    read: Callable[[str], Tensor],
    config: TransformerConfig,
    layout: Layout,
) -> Callable[[str], Tensor]:
    """What gives each parameter of `Transformer(config)` by name, made of what `read` gives for their names; `given` has the shapes
    that there are. Raises ValueError as `from_hf` does."""
    parts, shapes = layout.parts(config), dict(given)
    head, embedding = (
        f"{layout.names['output_layer'][0]}.weight",
        f"{layout.names['embedding'][0]}.weight",
    )
    tied_head = config.tie_embeddings and shapes.pop(head, None) is not None
    # Llama 2 checkpoints carry the rotary frequencies as buffers, GPT-2's the causal mask; here they follow from the config.
    buffers = ("rotary_emb.inv_freq", ".attn.bias", ".masked_bias")
    shapes = {name: shape for name, shape in shapes.items() if not name.endswith(buffers)}
    _check(shapes, {theirs: shape for named in parts.values() for theirs, shape in named.items()})
    if tied_head and not torch.equal(read(head), read(embedding)):
        raise ValueError(f"{head} differs from {embedding}, but tie_embeddings is true")
    return lambda name: layout.fuse(name, [read(theirs) for theirs in parts[name]], config)


def to_hf(
    state_dict: Mapping[str, Tensor], config: TransformerConfig, layout: Layout = Layout(LLAMA)
) -> dict[str, Tensor]:
    """The inverse of `from_hf`: a state dict for transformers' model, without `lm_head.weight` where it is tied.

    Raises ValueError for missing and unexpected names and for shapes that are not the config's.
    """
    given = dict(state_dict)
    if config.tie_embeddings:
        given.pop("output_layer.weight", None)
    _check({name: tuple(tensor.shape) for name, tensor in given.items()}, parameter_shapes(config))
    theirs: dict[str, Tensor] = {}
    for name, named in layout.parts(config).items():
        theirs.update(zip(named, layout.split(name, given[name], config, len(named)), strict=True))
    return theirs


def _by_group(weight: Tensor, config: TransformerConfig) -> Tensor:
    """[rows, ...] as [groups, heads, head_dim, ...]."""
    return weight.reshape(config.num_query_groups, -1, config.head_dim, *weight.shape[1:])


def _check(given: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    differences = {
        "missing": expected.keys() - given.keys(),
        "unexpected": given.keys() - expected.keys(),
    }
    if any(differences.values()):
        said = [
            f"{len(names)} {what}: {_some(names)}" for what, names in differences.items() if names
        ]
        raise ValueError(f"not the weights of this model: {'; '.join(said)}")
    for name, shape in expected.items():
        if given[name] != shape:
            raise ValueError(f"{name} has shape {list(given[name])}, the config says {list(shape)}")


def _some(names: Set[str], limit: int = 4) -> str:
    return ", ".join(sorted(names)[:limit]) + (", ..." if len(names) > limit else "")


SCALES = ("_scale_inv", "_scale")
IGNORED = (*SCALES, ".input_scale", ".activation_scale", ".k_scale", ".v_scale")
METHODS = {"fp8", "compressed-tensors"}
CONFIG = "config.json"
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
        raise ValueError(no_weights(self.folder))

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


def reader(config: TransformerConfig, folder: Path, layout: Layout) -> Callable[[str], Tensor]:
    """What reads each parameter of a Transformer of `config` by name from `folder`. It and its calls raise ValueError as Checkpoint
    and `hf.reader` do."""
    checkpoint = Checkpoint(folder)
    return hf_reader(checkpoint.shapes, checkpoint.read, config, layout)


@torch.no_grad()
def load(model: torch.nn.Module, config: TransformerConfig, folder: Path, layout: Layout) -> None:
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
