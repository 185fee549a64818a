"""Sharded masters in checkpoints: the float32 shards that FSDP2 keeps, and the unsharded run's weights and masters.

A parameter is its own master there, and its weight is made as it is gathered. Under zero1, zero2 and none a checkpoint has what the
unsharded run has, the weight as storage.weight says and `<name>.master`; under fsdp float32 weights. Either goes on with any
layout: a master is taken for a float32 weight, and a float32 weight for a master, from which the weight is made.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fp8cfg.backends.stored_weights import DTYPES
from fp8cfg.job import Job
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS
from fp8cfg.numerics.shard_scales import FLOAT32, stored_bytes
from fp8cfg.training.distributed.unsharded_form import narrow

PLAIN = (torch.bfloat16, torch.float16)
"""Dtypes that a weight is cast to."""


def exchange_masters(
    job: Job, model: dict[str, Tensor], optimizer: dict[str, Tensor], otherwise: bool
) -> bool:
    """Let what this rank keeps of a checkpoint, in place, have float32 values where `job` has them: in `model` where a parameter is
    its own master, else in `optimizer`; and in both beside plain weights, where these are stored `otherwise` in the checkpoint.
    Masters of other ranks are left. Whether any master comes from a weight, which is to be made from it.
    """
    own, first, made = job.optimizer.state_tensors(), dict[Tensor, str](), False
    for name, p in job.model.named_parameters(remove_duplicate=False):
        key = f"{first.setdefault(p, name)}.master"
        master, weight = optimizer.get(key), model.get(name)
        cast = weight is not None and weight.dtype != p.dtype and p.dtype in PLAIN
        if master is not None and key not in own:
            model[name] = master
            for buffer in WEIGHT_BUFFERS:
                model.pop(f"{name.rpartition('.')[0]}.{buffer}", None)
        elif master is None and key in own and weight is not None and weight.dtype == torch.float32:
            optimizer[key], made = weight, True
        elif otherwise and cast and master is not None and master.dtype == torch.float32:
            model[name] = master
    for key in [key for key in optimizer if key.endswith(".master") and key not in own]:
        del optimizer[key]
    return made


def weight_bytes(job: Job) -> int:
    """Bytes of the weights, in all shards, that a checkpoint has beside their masters; with their scales."""
    named, count = dict(job.model.named_parameters()), 0
    for name in set(narrow(job.prepared).values()):
        shape, column = named[name].shape, job.prepared.columns[name]["weight"]
        layer: Any = job.model.get_submodule(name.rpartition(".")[0])
        if column in DTYPES:
            count += prod(shape) * DTYPES[column].itemsize
        elif (codec := layer.shard_codec) is not None:
            count += prod(shape) * codec.format.dtype.itemsize + FLOAT32
        else:
            count += stored_bytes(layer.scaling, *shape)
    return count
