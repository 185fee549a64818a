"""Low-rank adapters (LoRA, arXiv 2106.09685): trained matrices A and B beside the frozen weights of linear layers.

    y = W x + alpha / rank B A dropout(x)        A [rank, in]    B [out, rank]

Under tensor parallelism a rank has its rows of B beside its rows of W (column-parallel), and all of A; or its columns of A beside
its columns of W (row-parallel), and all of B. It multiplies as one rank does, with its part of y or a share of the sum y.

Adapters are a child `lora` of the layer that they stand beside, whoever multiplies there, and a forward hook adds what they make.
A layer of several projections has an adapter for each, as PEFT has. First weights are PEFT's: A from uniform(-1 / sqrt(in), 1 /
sqrt(in)), which is kaiming_uniform with a = sqrt(5), and B 0, so that a model begins as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fp8cfg.models.config import Projection
from fp8cfg.models.hf_checkpoint import json_object
from fp8cfg.models.weight_init import TensorShard, block_seed, local_parts


class LowRank(nn.Module):
    """One projection's adapter, float32 until it is cast: [..., in] to [..., out], both in the dtype of its weights."""

    def __init__(
        self,
        projection: Projection,
        rank: int,
        scaling: float,
        dropout: float,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.rank, self.scaling, self.dropout = rank, scaling, dropout
        self.in_features, self.out_features = projection.in_features, projection.out_features
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
        """What it adds to the weight [out, in], float32."""
        return (self.lora_B.detach().float() @ self.lora_A.detach().float()).mul_(self.scaling)

    def extra_repr(self) -> str:
        return f"rank={len(self.lora_A)}, scaling={self.scaling:g}" + (
            f", dropout={self.dropout:g}" if self.dropout else ""
        )


class Adapter(nn.ModuleDict):
    """The adapters of one linear layer by the names of its `projections`, of which some may have none. `groups` are the key-value
    groups in which the rows of queries, keys and values alternate; 1 where a projection's rows stand together.
    """

    def __init__(
        self, found: Mapping[str, LowRank], projections: Mapping[str, int], groups: int = 1
    ) -> None:
        super().__init__(found)
        self.projections, self.groups = dict(projections), groups

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(next(self.parameters()).dtype)  # once for all of them, which keep it
        if len(self.projections) == 1:
            return next(iter(self.values()))(x)  # type: ignore[no-any-return]
        parts: list[Tensor | None] = [
            self[name](x) if name in self else None for name in self.projections
        ]
        like = next(part for part in parts if part is not None)
        made = [
            like.new_zeros(*x.shape[:-1], size) if part is None else part
            for part, size in zip(parts, self.projections.values(), strict=True)
        ]
        return torch.cat([part.view(*x.shape[:-1], self.groups, -1) for part in made], -1).flatten(
            -2
        )

    def merge_into(self, weight: Tensor) -> None:
        """Add to the layer's `weight` [out, in], float32 and contiguous, in place, what they add to its product."""
        low: dict[str, Any] = dict(self.items())
        sizes = {name: size // self.groups for name, size in self.projections.items()}
        parts = weight.view(self.groups, -1, weight.shape[1]).split_with_sizes(
            list(sizes.values()), 1
        )
        for (name, size), part in zip(sizes.items(), parts, strict=True):
            part.add_(low[name].delta().view(self.groups, size, -1) if name in low else 0.0)


@dataclass(frozen=True)
class Adapters:
    """The adapters of a model: the projections that have one, among `every` one; `groups` are the key-value groups."""

    found: Sequence[Projection]
    every: Sequence[Projection]
    groups: int
    rank: int
    alpha: float
    dropout: float = 0.0

    first: Callable[[str], tuple[Tensor, Tensor]] | None = None
    """First A and B by the name of a projection in full, MODULE.lora.NAME; None draws them."""

    def freeze(self, model: nn.Module, linears: Collection[str], dtype: torch.dtype) -> None:
        """Let no parameter of `model`, which is on the meta device, be trained, and let `linears` have their weights in `dtype`:
        what is frozen needs no float32 original. A weight that an embedding has too stays as it is.
        """
        model.requires_grad_(False)
        shared = {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        for linear in map(model.get_submodule, linears):
            assert isinstance(linear, nn.Linear)
            if id(linear.weight) not in shared:
                linear.weight.data = linear.weight.data.to(dtype)

    def of(self, module: str, device: torch.device | str) -> Adapter:
        """The adapters of the layer `module`, one at least, without first weights."""
        low = {
            p.name: LowRank(p, self.rank, self.alpha / self.rank, self.dropout, device)
            for p in self.found
            if p.module == module
        }
        sizes = {p.name: p.out_features for p in self.every if p.module == module}
        return Adapter(low, sizes, self.groups if module.endswith("linear_qkv") else 1)

    @torch.no_grad()
    def attach(self, model: nn.Module, seed: int) -> None:
        """Put them beside the layers of `model`, which may be a pipeline stage and have parts of matrices, float32, with first
        weights where the layers have memory (`fill`)."""
        layers = dict(model.named_modules())
        for module in dict.fromkeys(p.module for p in self.found):
            if module not in layers:
                continue
            layer: Any = layers[module]
            layer.lora = self.of(module, next(layer.parameters()).device)
            layer.lora.train(layer.training)
            layer.register_forward_hook(_add)
            if f"{module}.weight" in _shards(model):
                _keep_part(model, module, layer.lora)
        self.fill(model, seed)
        # Recomputation repeats what it drew.
        model.draws = self.dropout > 0  # type: ignore[assignment]

    @torch.no_grad()
    def fill(self, model: nn.Module, seed: int) -> None:
        """Write the first weights of the adapters of `model`, or this rank's parts of them; those that are drawn come from `seed`
        and their names."""
        shards = _shards(model)
        for module, _, adapter in adapted(model):
            low: dict[str, Any] = dict(adapter.items())
            for name, one in low.items():
                full = f"{module}.lora.{name}"
                given = (
                    self.first(full)
                    if self.first
                    else (
                        _drawn((one.rank, one.in_features), seed, f"{full}.lora_A"),
                        torch.zeros(one.out_features, one.rank, dtype=torch.float32),
                    )
                )
                for matrix, whole in zip(("lora_A", "lora_B"), given, strict=True):
                    shard = shards.get(f"{full}.{matrix}")
                    for part, (row, column) in local_parts(getattr(one, matrix), shard):
                        if not part.is_meta:
                            part.copy_(
                                whole[row : row + part.shape[0], column : column + part.shape[1]]
                            )


def _shards(model: nn.Module) -> dict[str, TensorShard]:
    """Which part of each parameter of `model` this rank has, by name, where matrices are split over ranks."""
    return getattr(model, "shards", {})


def _keep_part(model: nn.Module, module: str, adapter: Adapter) -> None:
    """Leave of the `adapter` of the layer `module` what belongs to this rank's part of its weight."""
    shards = _shards(model)
    shard = shards[f"{module}.weight"]
    matrix = "lora_B" if shard.dim == 0 else "lora_A"
    of_matrix = TensorShard(shard.rank, shard.ranks, shard.dim)
    for name, one in adapter.items():
        whole = getattr(one, matrix)
        setattr(one, matrix, nn.Parameter(of_matrix.part(whole.detach()).clone()))
        shards[f"{module}.lora.{name}.{matrix}"] = of_matrix
    if shard.dim == 0:
        if adapter.groups > 1:
            adapter.groups //= shard.ranks
        adapter.projections = {
            name: size // shard.ranks for name, size in adapter.projections.items()
        }


def _add(layer: nn.Module, args: Any, out: Tensor) -> Tensor:
    """The forward hook of a layer with adapters."""
    made: Tensor = layer.lora(args[0])  # type: ignore[operator]
    return out + made.to(out.dtype)


def adapted(model: nn.Module) -> Iterator[tuple[str, nn.Module, Adapter]]:
    """The layers of `model` with adapters, by name."""
    for name, layer in model.named_modules():
        if isinstance(adapter := layer._modules.get("lora"), Adapter):
            yield name, layer, adapter


def _drawn(shape: tuple[int, int], seed: int, name: str) -> Tensor:
    """The first A of that shape [rank, in]."""
    bound, random = shape[1] ** -0.5, torch.Generator().manual_seed(block_seed(seed, name, 0))
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=random)


WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_OTHER = (
    "use_dora",
    "use_rslora",
    "fan_in_fan_out",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "lora_bias",
    "trainable_token_indices",
)
"""Settings of PEFT under which an adapter computes something else; false or empty elsewhere."""


def their_module(projection: Projection, names: Mapping[str, tuple[str, ...]]) -> str:
    """What transformers calls `projection` in a family whose modules have `names`, ours with theirs. Raises ValueError where it has
    no module of its own there, as in GPT-2, whose queries, keys and values are one Conv1D."""
    at, number = projection.module, ""
    if at.startswith("layers."):
        _, number, rest = at.split(".", 2)
        at = f"layers.{{}}.{rest}"
    found = [
        name.format(number) for name in names[at] if name.rpartition(".")[2] == projection.name
    ]
    if not found:
        raise ValueError(
            f"{projection.names[1]}: no layer of its own in transformers' models of this family,"
            " for PEFT to adapt"
        )
    return found[0]


def write(
    folder: Path,
    adapters: Mapping[str, Adapter],
    every: Sequence[Projection],
    names: Mapping[str, tuple[str, ...]],
    rank: int,
    alpha: float,
    dropout: float,
    base: str | None,
    revision: str | None = None,
) -> int:
    """Write `adapters`, by layer, of a model whose projections are `every` one, into `folder`, which is there, in float32; `base`
    is the folder or the id of the weights that they belong to, and `revision` the commit of an id. Returns how many there are.
    Raises ValueError as `their_module` does."""
    low = {
        (name, projection): one
        for name, adapter in adapters.items()
        for projection, one in adapter.items()
    }
    modules = {key: their_module(p, names) for p in every if (key := (p.module, p.name)) in low}
    tensors = {
        f"base_model.model.{modules[key]}.{part}.weight": matrix.detach().float().cpu().contiguous()
        for key, one in low.items()
        for part, matrix in one.named_parameters()
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    leaves = sorted({name for _, name in low})
    whole = all((p.module, p.name) in low for p in every if p.name in leaves)
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": leaves if whole else sorted(modules.values()),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
    }
    (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
    return len(modules)


def read(
    folder: Path,
    found: Sequence[Projection],
    names: Mapping[str, tuple[str, ...]],
    rank: int,
    alpha: float,
) -> Callable[[str], tuple[Tensor, Tensor]]:
    """First A and B of the projections `found`, by MODULE.lora.NAME, from `folder`. Raises ValueError for a folder without them,
    adapters of other layers, another rank or alpha, or another kind than plain LoRA."""
    said = json_object(folder, CONFIG)
    if (
        said.get("peft_type") != "LORA"
        or any(said.get(key) for key in _OTHER)
        or said.get("bias", "none") != "none"
    ):
        odd = [key for key in _OTHER if said.get(key)] or [
            "bias" if said.get("peft_type") == "LORA" else "peft_type"
        ]
        raise ValueError(f"{CONFIG}: {odd[0]}={said.get(odd[0])} is not read here, plain LoRA is")
    for key, ours, wanted in (("r", "lora.rank", rank), ("lora_alpha", "lora.alpha", alpha)):
        if said.get(key) != wanted:
            raise ValueError(f"{CONFIG} says {key}={said.get(key)}; set {ours}={said.get(key)}")
    try:
        tensors = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{WEIGHTS} cannot be read ({e})") from None
    expected = {
        f"{p.module}.lora.{p.name}": f"base_model.model.{their_module(p, names)}" for p in found
    }
    shapes = {
        f"{expected[f'{p.module}.lora.{p.name}']}.{part}.weight": shape
        for p in found
        for part, shape in (("lora_A", (rank, p.in_features)), ("lora_B", (p.out_features, rank)))
    }
    if missing := sorted(shapes.keys() - tensors.keys()):
        raise ValueError(
            f"{WEIGHTS}: {len(missing)} matrices are missing, among them {missing[0]}; lora.targets"
            " names the layers"
        )
    if more := sorted(tensors.keys() - shapes.keys()):
        raise ValueError(
            f"{WEIGHTS}: {len(more)} matrices are of other layers than lora.targets, among them"
            f" {more[0]}"
        )
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape or not tensors[name].isfinite().all():
            raise ValueError(f"{WEIGHTS}: {name} is not a finite matrix of {shape[0]} x {shape[1]}")

    def first(name: str) -> tuple[Tensor, Tensor]:
        return (
            tensors[f"{expected[name]}.lora_A.weight"],
            tensors[f"{expected[name]}.lora_B.weight"],
        )

    return first
