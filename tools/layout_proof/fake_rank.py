"""Fake rank: the job of a recipe as rank R of W builds it, with torch's fake process group and tensors on the meta device.

The builder, the model, FSDP2, the schedules and the optimizer are the program's own. Tensors have shapes, dtypes and strides and no
numbers, and a collective returns at once. What needs numbers is stood in for, below: first weights are not drawn, a number that
the host reads is 1, and whether products ran in FP8 is not looked at. Quantizers take whole tensors, as on a GPU; autocast, which the
meta device does not have, is left out, and nothing of a recipe's own Transformer is in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # shapes of collectives on the meta device
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass_type,
)

from fp8cfg.backends.any_model import checks
from fp8cfg.building import builder
from fp8cfg.building import model as model_building
from fp8cfg.building.job import Job
from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics import codecs
from fp8cfg.parallel import quantized_allreduce
from fp8cfg.parallel.process_group import SENT, current
from fp8cfg.planning import job_plan
from fp8cfg.schema.recipe import Recipe
from fp8cfg.training.step import train_step
from tools.layout_proof.shape_cache import ShapeCache

META = torch.device("meta")
MUCH = 1 << 60
"""More bytes, or elements of a piece, than anything here has."""


class WithoutNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes tensors that are meant for a CPU on the meta device, and gives 1 for a number that is read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = ShapeCache()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(t) for t in types):
            return NotImplemented  # what a DTensor does with the tensors inside of it is seen
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return (
                1.0 if args[0].is_floating_point() else True if args[0].dtype == torch.bool else 1
            )
        if (device := kwargs.get("device")) is not None and device.type == "cpu":
            kwargs = {**kwargs, "device": META}
        return self._shapes.run(func, args, kwargs)


class _Samples:
    masked = False


class NoBatches:
    """Batches of tokens without numbers."""

    samples = _Samples()

    def __init__(self, recipe: Recipe) -> None:
        self._shape = recipe.trainer.micro_batch_size, recipe.model.seq_length
        self._documents = recipe.data.resets

    def batch(self, *_: int) -> tuple[Tensor, ...]:
        """A microbatch: tokens, targets, and documents where they are told apart."""
        tokens, targets = (
            torch.empty(self._shape, dtype=torch.long, device=META) for _ in range(2)
        )
        return (
            (tokens, targets, torch.empty(self._shape, dtype=torch.int32, device=META))
            if self._documents
            else (tokens, targets)
        )


@contextmanager
def fake_rank(rank: int, ranks: int, messages: bool = False) -> Iterator[None]:
    """This process as `rank` of `ranks`, whose jobs have no memory. ZeRO's messages to owners are cut to their size where it is these
    `messages` that are looked at: to a thousand ranks they are tens of thousands."""
    environment = {"WORLD_SIZE": str(ranks), "RANK": str(rank)}
    no_autocast = {
        "autocast": lambda *_, **__: nullcontext(),
        "is_autocast_enabled": lambda *_: False,
    }
    with ExitStack() as modes, mock.patch.dict(os.environ, environment):
        to_empty = Transformer.to_empty

        def without_memory(model: Transformer, *, device: Any, recurse: bool = True) -> Transformer:
            modes.enter_context(WithoutNumbers())
            modes.enter_context(META)  # from here on: the device mesh before has numbers
            return to_empty(model, device=META, recurse=recurse)

        for target, name, instead in (
            (Transformer, "to_empty", without_memory),
            (model_building, "first_weights", lambda *_: lambda model: None),
            (job_plan, "free_memory", lambda device: MUCH),
            (checks, "check", lambda model: False),
            (FSDPParamGroup, "_validate_no_meta_params", lambda group: None),
            (import_module("torch.optim.adam"), "_device_dtype_check_for_fused", lambda *_: None),
            *((torch, name, instead) for name, instead in no_autocast.items()),
            (codecs, "CHUNK", MUCH),
            (quantized_allreduce, "MESSAGE", quantized_allreduce.MESSAGE if messages else MUCH),
        ):
            modes.enter_context(mock.patch.object(target, name, instead))
        SENT.clear()
        dist.init_process_group(
            "cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=ranks
        )
        modes.callback(dist.destroy_process_group)
        yield


def stepped(recipe: Recipe, counter: TorchDispatchMode | None = None) -> Job:
    """The job of `recipe` on this rank after one optimizer step, inside of `fake_rank`; with a `counter` after another one, inside of
    that: the first sets scales, and moments are made in it."""
    job = builder.build(recipe)
    train_step(job, NoBatches(recipe), 0, current())  # type: ignore[arg-type]
    if counter is not None:
        with counter:
            train_step(job, NoBatches(recipe), 1, current())  # type: ignore[arg-type]
    return job
