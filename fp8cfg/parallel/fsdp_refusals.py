"""FSDP2 refusals: what a job whose parameters FSDP2 has cannot do, and what to do instead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from torch import nn

from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.numerics.stored_state import in_stored_form
from fp8cfg.schema.backends import capabilities
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import gathered

_PARTS = (
    "a rank has parts of it; for an average (EMA) keep {name: p.detach().clone() for name, p in "
    "job.model.named_parameters()}, and for whole weights save a checkpoint"
)
_ONE = (
    "FSDP2 has its parameters; fp8cfg.averaged(job) is an average (EMA), and job.model.state_dict()"
    " has the weights"
)


def refuse_uneven(
    plan: Sequence[PlannedLinear], precision: Precision, backend: str, ranks: int
) -> None:
    """Raise ConfigError where torchao's FP8 all-gather would get shards of different sizes over `ranks`, which nothing pads."""
    uneven = [p for p in plan if p.fp8 and p.out_features % ranks]
    if (
        uneven
        and capabilities(backend).fp8_gather == "cast"
        and gathered(precision, backend) == "fp8"
    ):
        raise ConfigError(
            f"storage.gather=fp8: {uneven[0].name} has out_features={uneven[0].out_features}, which"
            f" {ranks} ranks do not divide; write storage.gather={precision.compute}, or start"
            " another number of ranks"
        )


def refuse_shards(shard: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Raise where weights are asked for that anyone could use: a rank has shards, which `torch.save` would take for whole ones."""
    if not in_stored_form():
        raise RuntimeError(
            f"under storage.shard={shard} no rank has whole weights; save a checkpoint with"
            " fp8cfg.fit, or write storage.shard=none"
        )


def copy_refusal(shard: str) -> str:
    """Why a model is not copied under storage.shard, and what to do."""
    return f"under storage.shard={shard} {_ONE if shard == 'none' else _PARTS}"


def refuse_copy(module: nn.Module, shard: str, memo: dict[int, Any]) -> NoReturn:
    """In the place of a module's __deepcopy__: raise TypeError."""
    raise TypeError(f"the model cannot be copied: {copy_refusal(shard)}")


def refuse_after_error(module: nn.Module, args: Any) -> NoReturn:
    """Forward hook of a module that an error has left in the midst of a step: raise RuntimeError."""
    raise RuntimeError(
        "a step was broken off, and before torch 2.13 FSDP2 does not drop what it left: build"
        " another job"
    )
