"""PEFT's format of adapters: adapter_model.safetensors and adapter_config.json, read and written.

PEFT names a matrix `base_model.model.MODULE.lora_A.weight`, with MODULE as transformers calls the projection. It has an adapter for
each, and so do layers here: matrices go over as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fp8cfg.models.hf_checkpoint import json_object
from fp8cfg.models.lora import Adapter
from fp8cfg.models.lora_shapes import Projection

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
            raise ValueError(f"{CONFIG} says {key}={said.get(key)}; write {ours}={said.get(key)}")
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
