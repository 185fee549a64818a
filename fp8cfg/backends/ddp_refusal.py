"""Refusal of DistributedDataParallel around the model of a job, where it is wrapped, in words that say what to do instead.

DistributedDataParallel keeps the gradients of a bucket in one dtype, that of the weights, and broadcasts weights as they are. A
job's weights in FP8 have no sums (`Invalid scalar type`), and gradients of another dtype than their weights fail in the first
backward pass (`Expected BFloat16, got Float`). It asks a module for the names of parameters that it is to leave out, as it is made:
that is where it is refused. Seen with torch 2.13; a torch that calls it otherwise goes on to its own errors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from torch import nn

from fp8cfg.config.errors import ConfigError

_ASKED = "_ddp_params_and_buffers_to_ignore"


def refuse_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel refuse `model`, unless the gradient of each parameter that trains has the dtype of the parameter,
    two bytes or more, as in a float32 job."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if any(p.dtype.itemsize < 2 or (p.grad_dtype or p.dtype) != p.dtype for p in trained):
        vars(model)[_ASKED] = Refusal()


def allow_ddp(model: nn.Module) -> None:
    """Undo `refuse_ddp`."""
    if isinstance(vars(model).get(_ASKED), Refusal):
        del vars(model)[_ASKED]


class Refusal:
    """Names of parameters that cannot be told."""

    def __iter__(self) -> Iterator[NoReturn]:
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, and it cannot sum weights in FP8, nor gradients of another dtype than "
            "their weights; leave the model out of it and call job.sum_gradients() before the optimizer's step, or take "
            "fp8cfg.convert_model(model, recipe) and an optimizer of yours")
