"""Low-rank adapters (LoRA, arXiv 2106.09685) for the frozen weights of linear layers.

    y = W x + alpha / rank B A dropout(x)        A [rank, in]    B [out, rank]

Only A and B are trained. Under tensor parallelism an adapter is split like its layer. A
column-parallel layer has this rank's rows of W and B, and all of A. A row-parallel layer has this
rank's columns of W and A, and all of B.

The adapters of a layer are its child `lora`. A forward hook adds their output, so any backend can
run the layer's GEMM. A layer with several projections has one adapter for each, as in PEFT. Initial
weights are PEFT's: A from uniform(-1 / sqrt(in), 1 / sqrt(in)), which is kaiming_uniform with a =
sqrt(5), and B is 0, so training starts from the unchanged model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8cfg.models.config import Projection
from fp8cfg.models.hf_checkpoint import read_json_object
from fp8cfg.models.weight_init import TensorShard, block_seed, local_parts

InitialWeights = Callable[[str], tuple[Tensor, Tensor]]
"""Returns the initial A and B of a projection by its name MODULE.lora.NAME."""


@dataclass(frozen=True)
class Adapters:
    """Settings of a model's adapters. `attach` puts the adapters into a model.

    Attributes:
        projections: The projections with an adapter.
        all_projections: All projections of the model.
        num_groups: Key-value groups.
        rank: Rows of A and columns of B.
        alpha: Adapters are multiplied by alpha / rank.
        dropout: Probability of dropping an input of the adapters.
        initial_weights: Reads the initial weights. None draws them.
    """

    projections: Sequence[Projection]
    all_projections: Sequence[Projection]
    num_groups: int
    rank: int
    alpha: float
    dropout: float = 0.0
    initial_weights: InitialWeights | None = None

    def freeze(self, model: nn.Module, linears: Collection[str], dtype: torch.dtype) -> None:
        """Freezes all parameters of a model, before the adapters are attached.

        Frozen weights need no float32 originals, so linear weights are cast. A weight shared with
        an embedding keeps its dtype.

        Args:
            model: On the meta device.
            linears: Names of the linear layers.
            dtype: Dtype for their weights.
        """
        model.requires_grad_(False)
        embedding_weights = set()
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                embedding_weights.add(id(module.weight))
        for name in linears:
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            if id(linear.weight) not in embedding_weights:
                linear.weight.data = linear.weight.data.to(dtype)

    @torch.no_grad()
    def attach(self, model: nn.Module, seed: int) -> None:
        """Adds the float32 adapters to the layers of a model and initializes them.

        Adapters on the meta device are not initialized. Call `init_weights` later.

        Args:
            model: A Transformer, a pipeline stage, or one that is split for tensor parallelism.
            seed: See `init_weights`.
        """
        layers = dict(model.named_modules())
        for name in dict.fromkeys(projection.module for projection in self.projections):
            if name not in layers:  # on another pipeline stage
                continue
            layer: Any = layers[name]
            layer.lora = self.build(name, next(layer.parameters()).device)
            layer.lora.train(layer.training)
            layer.register_forward_hook(_add_adapter_output)
            if f"{name}.weight" in _tensor_shards(model):
                _shard_adapter(model, name, layer.lora)
        self.init_weights(model, seed)
        # Full recomputation must then repeat the dropout masks.
        model.draws = self.dropout > 0  # type: ignore[assignment]

    def build(self, module: str, device: torch.device | str) -> Adapter:
        """Builds the unsplit adapters of a layer, without initial weights.

        Args:
            module: Name of the layer. At least one of its projections has an adapter.
            device: Device of the parameters.
        """
        adapters = {}
        for projection in self.projections:
            if projection.module == module:
                scaling = self.alpha / self.rank
                adapters[projection.name] = LowRank(
                    projection, self.rank, scaling, self.dropout, device
                )
        sizes = {}
        for projection in self.all_projections:
            if projection.module == module:
                sizes[projection.name] = projection.out_features
        num_groups = self.num_groups if module.endswith("linear_qkv") else 1
        return Adapter(adapters, sizes, num_groups)

    @torch.no_grad()
    def init_weights(self, model: nn.Module, seed: int) -> None:
        """Initializes the adapters of a model, or this rank's parts of them.

        Args:
            model: A model with attached adapters.
            seed: Seed of the random numbers. These depend on nothing else but the adapter's name.
        """
        shards = _tensor_shards(model)
        for module, _, adapter in adapted_layers(model):
            for name, child in adapter.items():
                low_rank = cast(LowRank, child)
                full_name = f"{module}.lora.{name}"
                if self.initial_weights:
                    lora_a, lora_b = self.initial_weights(full_name)
                else:
                    lora_a = _draw_lora_a(low_rank, seed, f"{full_name}.lora_A")
                    shape = (low_rank.out_features, low_rank.rank)
                    lora_b = torch.zeros(shape, dtype=torch.float32)
                _copy_local(low_rank.lora_A, lora_a, shards.get(f"{full_name}.lora_A"))
                _copy_local(low_rank.lora_B, lora_b, shards.get(f"{full_name}.lora_B"))


class LowRank(nn.Module):
    """Adapter of one projection, [..., in] to [..., out], in the dtype of its weights."""

    def __init__(
        self,
        projection: Projection,
        rank: int,
        scaling: float,
        dropout: float,
        device: torch.device | str,
    ) -> None:
        """Builds an adapter with float32 parameters. A is uninitialized, B is 0."""
        super().__init__()
        self.rank = rank
        self.scaling = scaling
        self.dropout = dropout
        self.in_features = projection.in_features
        self.out_features = projection.out_features
        self.lora_A = nn.Parameter(
            torch.empty(rank, projection.in_features, dtype=torch.float32, device=device)
        )
        self.lora_B = nn.Parameter(
            torch.zeros(projection.out_features, rank, dtype=torch.float32, device=device)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.dropout:
            x = F.dropout(x, self.dropout, self.training)
        return F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling

    def delta(self) -> Tensor:
        """Returns the change of the weight, float32 [out, in]."""
        product = self.lora_B.detach().float() @ self.lora_A.detach().float()
        return product.mul_(self.scaling)

    def extra_repr(self) -> str:
        text = f"rank={len(self.lora_A)}, scaling={self.scaling:g}"
        if self.dropout:
            text += f", dropout={self.dropout:g}"
        return text


class Adapter(nn.ModuleDict):
    """Adapters of one linear layer, a LowRank by the name of its projection.

    Attributes:
        projections: Output channels of each projection of the layer. Some may have no adapter.
        groups: Key-value groups of linear_qkv. Its rows alternate between queries, keys and values
            of a group. 1 for other layers.
    """

    def __init__(
        self, adapters: Mapping[str, LowRank], projections: Mapping[str, int], groups: int = 1
    ) -> None:
        super().__init__(adapters)
        self.projections = dict(projections)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        """Computes the change of the layer's output, [..., in] to [..., out]."""
        # Cast once, because each LowRank saves its input.
        x = x.to(next(self.parameters()).dtype)
        if len(self.projections) == 1:
            return next(iter(self.values()))(x)  # type: ignore[no-any-return]
        outputs: dict[str, Tensor] = {
            name: self[name](x) for name in self.projections if name in self
        }
        example = next(iter(outputs.values()))
        leading = x.shape[:-1]
        parts = []
        for name, size in self.projections.items():
            output = outputs.get(name)
            if output is None:
                output = example.new_zeros(*leading, size)
            parts.append(output.view(*leading, self.groups, -1))
        # [..., groups, channels of a group], the order of the rows of linear_qkv
        return torch.cat(parts, -1).flatten(-2)

    def merge_into(self, weight: Tensor) -> None:
        """Adds the adapters to the layer's weight, in place.

        Args:
            weight: float32 [out, in], contiguous.
        """
        rows = [size // self.groups for size in self.projections.values()]
        groups = weight.view(self.groups, -1, weight.shape[1])
        parts = groups.split_with_sizes(rows, 1)
        for name, num_rows, part in zip(self.projections, rows, parts, strict=True):
            if name in self:
                low_rank = cast(LowRank, self[name])
                part.add_(low_rank.delta().view(self.groups, num_rows, -1))
            else:
                # x + 0.0 turns -0.0 into 0.0, as adding the zeros of `forward` does.
                part.add_(0.0)


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """Yields each layer of a model with adapters: its name, the layer, and its adapters."""
    for name, layer in model.named_modules():
        adapter = layer._modules.get("lora")
        if isinstance(adapter, Adapter):
            yield name, layer, adapter


def _add_adapter_output(layer: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook of a layer with adapters."""
    delta: Tensor = layer.lora(args[0])  # type: ignore[operator]
    return output + delta.to(output.dtype)


def _tensor_shards(model: nn.Module) -> dict[str, TensorShard]:
    """Returns this rank's part of each parameter that tensor parallelism splits, by name."""
    return getattr(model, "shards", {})


def _shard_adapter(model: nn.Module, module: str, adapter: Adapter) -> None:
    """Keeps this rank's parts of the adapters of a tensor-parallel layer, in place.

    Args:
        model: The model. Its `shards` get the adapters' parts.
        module: Name of the layer.
        adapter: The layer's adapters, unsplit.
    """
    shards = _tensor_shards(model)
    layer_shard = shards[f"{module}.weight"]
    is_column_parallel = layer_shard.dim == 0
    matrix = "lora_B" if is_column_parallel else "lora_A"
    # One piece: unlike the layer's weight, each adapter belongs to one projection.
    shard = TensorShard(layer_shard.rank, layer_shard.ranks, layer_shard.dim)
    for name, low_rank in adapter.items():
        full: Tensor = getattr(low_rank, matrix)
        # A clone: a view would keep the memory of the full matrix.
        setattr(low_rank, matrix, nn.Parameter(shard.part(full.detach()).clone()))
        shards[f"{module}.lora.{name}.{matrix}"] = shard
    if is_column_parallel:
        if adapter.groups > 1:
            adapter.groups //= shard.ranks
        for name, size in adapter.projections.items():
            adapter.projections[name] = size // shard.ranks


def _draw_lora_a(low_rank: LowRank, seed: int, name: str) -> Tensor:
    """Draws the initial A, float32 [rank, in], on the CPU."""
    bound = low_rank.in_features**-0.5
    generator = torch.Generator().manual_seed(block_seed(seed, name, 0))
    matrix = torch.empty(low_rank.rank, low_rank.in_features, dtype=torch.float32)
    return matrix.uniform_(-bound, bound, generator=generator)


def _copy_local(parameter: Tensor, full: Tensor, shard: TensorShard | None) -> None:
    """Copies this rank's part of a full matrix into a parameter. Skips the meta device."""
    for part, (row, column) in local_parts(parameter, shard):
        if not part.is_meta:
            part.copy_(full[row : row + part.shape[0], column : column + part.shape[1]])


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# PEFT's settings for other adapters than plain LoRA. Plain LoRA has them false, empty or missing.
_UNSUPPORTED_SETTINGS = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "trainable_token_indices",
)


def hf_module(projection: Projection, names: Mapping[str, tuple[str, ...]]) -> str:
    """Returns the name of a projection in transformers' model.

    Args:
        projection: The projection.
        names: A family's modules, our names with theirs. See `hf_checkpoint.Layout`.

    Raises:
        ValueError: The family has no module for the projection, such as GPT-2, where queries, keys
            and values are one Conv1D.
    """
    name, number = projection.module, ""
    if name.startswith("layers."):
        _, number, suffix = name.split(".", 2)
        name = f"layers.{{}}.{suffix}"
    for hf_name in names[name]:
        if hf_name.rpartition(".")[2] == projection.name:
            return hf_name.format(number)
    raise ValueError(
        f"{projection.names[1]}: transformers' models of this family have no separate layer for it,"
        " so PEFT cannot adapt it; remove it from lora.targets"
    )


def write_peft(
    folder: Path,
    adapters: Mapping[str, Adapter],
    projections: Sequence[Projection],
    names: Mapping[str, tuple[str, ...]],
    rank: int,
    alpha: float,
    dropout: float,
    base: str | None,
    revision: str | None = None,
) -> int:
    """Writes adapters in PEFT's format, in float32.

    Args:
        folder: An existing folder.
        adapters: The adapters by the name of their layer.
        projections: All projections of the model.
        names: See `hf_module`.
        rank: LoRA's rank.
        alpha: LoRA's alpha.
        dropout: LoRA's dropout.
        base: Folder or Hub id of the base weights.
        revision: Commit of a Hub id.

    Returns:
        The number of adapted projections.

    Raises:
        ValueError: See `hf_module`.
    """
    modules: dict[str, str] = {}  # PEFT's target modules by MODULE.lora.NAME
    for projection in projections:
        adapter = adapters.get(projection.module)
        if adapter is not None and projection.name in adapter:
            modules[_lora_name(projection)] = hf_module(projection, names)

    tensors = {}
    for module, adapter in adapters.items():
        for name, low_rank in adapter.items():
            prefix = f"base_model.model.{modules[f'{module}.lora.{name}']}"
            for matrix, parameter in low_rank.named_parameters():
                data = parameter.detach().float().cpu().contiguous()
                tensors[f"{prefix}.{matrix}.weight"] = data
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})

    # PEFT matches target modules by their last component. Full names are needed only if some layers
    # have an adapter and others do not.
    targets = sorted({name for adapter in adapters.values() for name in adapter})
    matching = [projection for projection in projections if projection.name in targets]
    if not all(_lora_name(projection) in modules for projection in matching):
        targets = sorted(modules.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": targets,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return len(modules)


def read_peft(
    folder: Path,
    projections: Sequence[Projection],
    names: Mapping[str, tuple[str, ...]],
    rank: int,
    alpha: float,
) -> InitialWeights:
    """Reads adapters in PEFT's format.

    Args:
        folder: The folder with adapter_config.json and adapter_model.safetensors.
        projections: The projections with an adapter in this run.
        names: See `hf_module`.
        rank: lora.rank of this run.
        alpha: lora.alpha of this run.

    Returns:
        A function of MODULE.lora.NAME that returns A [rank, in] and B [out, rank].

    Raises:
        ValueError: The folder has no adapters, other layers, another rank or alpha, or another kind
            than plain LoRA.
    """
    _check_config(read_json_object(folder, CONFIG), rank, alpha)
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{WEIGHTS} cannot be read ({error})") from None
    prefixes = {}
    shapes = {}
    for projection in projections:
        prefix = f"base_model.model.{hf_module(projection, names)}"
        prefixes[_lora_name(projection)] = prefix
        shapes[f"{prefix}.lora_A.weight"] = (rank, projection.in_features)
        shapes[f"{prefix}.lora_B.weight"] = (projection.out_features, rank)
    _check_tensors(tensors, shapes)

    def initial_weights(name: str) -> tuple[Tensor, Tensor]:
        prefix = prefixes[name]
        return tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]

    return initial_weights


def _lora_name(projection: Projection) -> str:
    return f"{projection.module}.lora.{projection.name}"


def _check_config(config: Mapping[str, Any], rank: int, alpha: float) -> None:
    """Raises ValueError unless adapter_config.json is plain LoRA of this rank and alpha."""
    unsupported = [key for key in _UNSUPPORTED_SETTINGS if config.get(key)]
    if config.get("peft_type") != "LORA":
        unsupported.append("peft_type")
    if config.get("bias", "none") != "none":
        unsupported.append("bias")
    if unsupported:
        key = unsupported[0]
        raise ValueError(
            f"{CONFIG}: {key}={config.get(key)} is not supported; only plain LoRA can be read"
        )
    for key, our_key, value in (("r", "lora.rank", rank), ("lora_alpha", "lora.alpha", alpha)):
        if config.get(key) != value:
            raise ValueError(
                f"{CONFIG} has {key}={config.get(key)}; set {our_key}={config.get(key)}"
            )


def _check_tensors(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raises ValueError unless a file has finite tensors with exactly these names and shapes."""
    missing = sorted(shapes.keys() - tensors.keys())
    if missing:
        raise ValueError(
            f"{WEIGHTS}: {len(missing)} matrices are missing, such as {missing[0]}; set"
            " lora.targets to the layers in the file"
        )
    unexpected = sorted(tensors.keys() - shapes.keys())
    if unexpected:
        raise ValueError(
            f"{WEIGHTS}: {len(unexpected)} matrices belong to layers without adapters in this run,"
            f" such as {unexpected[0]}; add their layers to lora.targets"
        )
    for name, (rows, columns) in shapes.items():
        tensor = tensors[name]
        if tuple(tensor.shape) != (rows, columns) or not tensor.isfinite().all():
            raise ValueError(f"{WEIGHTS}: {name} is not a finite matrix of {rows} x {columns}")
