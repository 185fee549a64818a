"""Unsharded form of what FSDP2 keeps: the weights that a run without it stores, made of float32 shards, which are their own
masters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8cfg.backends.prepared_model import PreparedModel
from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, Stored
from fp8cfg.numerics.shard_scales import split_fields
from fp8cfg.numerics.stored_form import stored_state_dict
from fp8cfg.optim.low_bit.shards import local


def as_unsharded(
    prepared: PreparedModel, stored: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`stored`, the stored form of the model with its Parameters, with weights as the unsharded run has them; and the masters."""
    weights, masters, made = dict(stored), dict[str, Tensor](), dict[str, Tensor]()
    for name, first in narrow(prepared).items():
        p: Any = stored[name]
        masters[f"{first}.master"] = p
        owner = first.rpartition(".")[0]
        if prepared.columns[first]["weight"] not in DTYPES:
            layer: Any = prepared.model.get_submodule(owner)
            data, *beside = layer.quantized_shard(local(p))
            split = split_fields(layer.shard_scaling, layer.shard_place)
            for field, buffer, t in zip(Stored._fields[1:], WEIGHT_BUFFERS, beside, strict=True):
                if t is not None:  # in rows as the weight, or whole on all ranks
                    weights[f"{owner}.{buffer}"] = (
                        distributed(t, p, (split[field], t.shape[1])) if field in split else t
                    )
        else:
            data = local(p).to(DTYPES[prepared.columns[first]["weight"]])
        if first not in made:  # a tied weight has two names
            made[first] = distributed(data, p, tuple(p.shape))
        weights[name] = made[first]
    return weights, masters


def coded_weights(prepared: PreparedModel) -> dict[str, Tensor]:
    """The weights of one shard (storage.shard=none) that the unsharded run stores in FP8 or in a codec, as it does, with their
    scales: by their names in its stored form."""
    stored = stored_state_dict(prepared.model, keep_vars=True)
    weights, _ = as_unsharded(prepared, stored)
    coded = {
        name
        for name, first in narrow(prepared).items()
        if prepared.columns[first]["weight"] not in DTYPES
    }
    return {
        name: local(t).detach()
        for name, t in weights.items()
        if name in coded or name not in stored
    }


def narrow(prepared: PreparedModel) -> dict[str, str]:
    """The names of sharded parameters that the unsharded run stores in fewer bits, each with the optimizer's name of it."""
    if not prepared.fsdp2 or prepared.shard == "fsdp":
        return {}
    first = {p: name for name, p in prepared.model.named_parameters() if p.requires_grad}
    return {
        name: first[p]
        for name, p in prepared.model.named_parameters(remove_duplicate=False)
        if p in first and prepared.columns[first[p]]["weight"] != "fp32"
    }


def distributed(local: Tensor, like: Any, shape: tuple[int, ...]) -> Tensor:
    """This rank's part `local` of a tensor of `shape`, which is split as `like` is."""
    from torch.distributed.tensor import DTensor

    whole = torch.empty(shape, dtype=local.dtype, device="meta")
    local = local.contiguous().to(like.device)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
