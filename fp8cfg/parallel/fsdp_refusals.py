"""Errors for operations not supported under FSDP2, with alternatives."""

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

_SHARDS_HINT = (
    "each rank has shards; for an average (EMA) keep {name: p.detach().clone() for name, p in "
    "job.model.named_parameters()}, and for full weights save a checkpoint"
)
_ONE_SHARD_HINT = (
    "FSDP2 manages its parameters; use fp8cfg.averaged(job) for an average (EMA) and"
    " job.model.state_dict() for the weights"
)


def refuse_uneven(
    plan: Sequence[PlannedLinear], precision: Precision, backend: str, ranks: int
) -> None:
    """Rejects an FP8 all-gather of shards with different sizes.

    torchao's FP8 all-gather sends the shards without FSDP2's padding.

    Args:
        plan: The planned GEMMs of the model.
        precision: Its storage is resolved.
        backend: Name of the backend.
        ranks: Ranks that shard each weight.

    Raises:
        ConfigError: Names the first such layer.
    """
    if capabilities(backend).fp8_gather != "cast" or gathered(precision, backend) != "fp8":
        return
    for linear in plan:
        # FSDP2 shards by rows, [out_features, in_features].
        if linear.fp8 and linear.out_features % ranks:
            raise ConfigError(
                f"storage.gather=fp8: {linear.name} has out_features={linear.out_features}, not a"
                f" multiple of {ranks} ranks; set storage.gather={precision.compute} or launch"
                " another number of ranks"
            )


def refuse_shards(shard: str, module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """State dict pre-hook: raises RuntimeError, because `torch.save` would save shards as weights.

    Checkpoints read shards on purpose, through `stored_state_dict`.
    """
    if not in_stored_form():
        raise RuntimeError(
            f"storage.shard={shard}: no rank has the full weights; save a checkpoint with"
            " fp8cfg.fit or set storage.shard=none"
        )


def copy_refusal(shard: str) -> str:
    """Returns why a model cannot be copied under a storage.shard, and what to do instead."""
    hint = _ONE_SHARD_HINT if shard == "none" else _SHARDS_HINT
    return f"storage.shard={shard}: {hint}"


def refuse_copy(module: nn.Module, shard: str, memo: dict[int, Any]) -> NoReturn:
    """Replaces __deepcopy__ of a module: raises TypeError."""
    raise TypeError(f"the model cannot be copied: {copy_refusal(shard)}")


def refuse_after_error(module: nn.Module, args: Any) -> NoReturn:
    """Forward pre-hook of a model after an error in a step: raises RuntimeError."""
    raise RuntimeError(
        "a step ended with an error, and before torch 2.13 FSDP2 cannot discard its state; build a"
        " new job"
    )
