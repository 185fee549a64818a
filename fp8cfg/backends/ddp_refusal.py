"""Refusal of DistributedDataParallel around the model of a job, where it is wrapped, in words that say what to do instead.

DistributedDataParallel keeps the gradients of a bucket in one dtype, that of the weights, and broadcasts weights as they are. A
job's weights in FP8 have no sums (`Invalid scalar type`), and gradients of another dtype than their weights fail in the first
backward pass (`Expected BFloat16, got Float`). A script may wrap the model itself or a module that holds it, and a library may do
so: what they all do is to register a module in a DistributedDataParallel, which torch lets be watched.
"""

from __future__ import annotations

import functools

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from fp8cfg.config.errors import ConfigError

_JOB = "fp8cfg_job_model"
"""Attribute of a job's model."""


def refuse_ddp(model: nn.Module) -> None:
    """Let DistributedDataParallel refuse `model`, and whatever module holds it, unless each of its parameters is whole, of two
    bytes or more, and has, where it trains, a gradient of its own dtype, as in a float32 job of one rank or of a model of one's
    own."""
    vars(model)[_JOB] = True
    _watch()


def allow_ddp(model: nn.Module) -> None:
    """Undo `refuse_ddp`."""
    vars(model).pop(_JOB, None)


@functools.cache
def _watch() -> None:
    """Once in a process."""
    register_module_module_registration_hook(_registered)


def _registered(owner: nn.Module, name: str, module: nn.Module | None) -> None:
    if module is None or not isinstance(owner, DistributedDataParallel):
        return
    of_jobs = [p for part in module.modules() if _JOB in vars(part) for p in part.parameters()]
    if any(hasattr(p, "placements") for p in of_jobs):
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, and FSDP2 has its parameters and sums"
            " their gradients; leave the model out of it"
        )
    if any(
        p.dtype.itemsize < 2 or (p.requires_grad and (p.grad_dtype or p.dtype) != p.dtype)
        for p in of_jobs
    ):
        raise ConfigError(
            "DistributedDataParallel: this model is a job's, and it cannot sum weights in FP8, nor"
            " gradients of another dtype than their weights; leave the model out of it and call"
            " job.sum_gradients() before the optimizer's step, or take fp8cfg.convert_model(model,"
            " recipe) and an optimizer of yours"
        )
