"""The precision plugin, `recipe.trainer.plugins`: formats, storage of state, and the backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fp8cfg.schema.backends import names
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.node import Node

Codec = Literal[
    "auto",
    "none",
    "fp32",
    "bf16",
    "fp16",
    "fp16_scaled",
    "fp8",
    "fp8_pow2",
    "fp8_block",
    "fp8_expand",
]
OptLevel = Literal["O1", "O2", "O3"]
if TYPE_CHECKING:
    Backend = str
else:
    Backend = Literal[("auto", *names())]  # installed packages included


class Storage(Node):
    """Storage dtypes of training state: one for each column of the low-precision chart (MS-AMP documentation).

    `auto` follows precision.compute, fp8.params and opt_level.
    """

    home: ClassVar[str] = "storage"

    weight: Codec = "auto"
    """Stored weights of linear layers. Default auto: as opt_level says, or FP8 under fp8.params, or precision.compute."""
    master_weight: Codec = "auto"
    """Master weights in the optimizer. Default auto: fp32 if weights are in half precision or FP8 (Megatron), otherwise none."""
    weight_grad: Codec = "auto"
    """Accumulated weight gradients. Default auto: fp32, or fp16 under compute=fp16 (NeMo's fp16_mixed)."""
    comm: Codec = "auto"
    """Gradients in communication. Default auto: fp32, or fp16 under compute=fp16 (NeMo: grad_reduce_in_fp32 True / False)."""
    exp_avg: Codec = "auto"
    """First moment of Adam. Default auto: fp32 (Megatron)."""
    exp_avg_sq: Codec = "auto"
    """Second moment of Adam. Default auto: fp32 (Megatron)."""
    accumulate: Literal["wide", "stored"] = "wide"
    """How gradients of microbatches accumulate: wide, in high precision, and stored once after the last microbatch; or stored,
    each sum rounded to storage.weight_grad (MS-AMP). Default wide, because rounding errors accumulate too."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated weights are rounded to their storage dtype. Default nearest (torch, Megatron, MS-AMP)."""
    shard: Literal["auto", "none", "zero1", "zero2", "fsdp"] = "auto"
    """What is sharded over data-parallel ranks: optimizer state (zero1, arXiv 1910.02054), gradients too (zero2), or weights too
    (fsdp), as float32 shards that are their own masters and are gathered layer by layer. torch's FSDP2 shards; state with
    low-precision masters is assigned to ranks in whole tensors. Default auto: zero1 (Megatron's distributed optimizer) on several
    ranks with float32 masters; none on one rank, under an opt_level, with low-precision masters, with FP8 weights under
    backend=te, and for a custom model."""
    gather: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Gathered weights under shard=fsdp: precision.compute, or fp8 for layers that run in FP8. Native layers gather FP8 weights
    under fp8.params with delayed, current (per tensor) and block scaling; backend=torchao does with current scaling per tensor
    (torchao's FP8 all-gather). Default auto: fp8 if possible, otherwise precision.compute."""


class Precision(Node):
    """All precision settings in one object. Assigning a preset to `recipe.trainer.plugins` replaces all of them."""

    home: ClassVar[str] = "precision"

    compute: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of parameters and of everything outside of FP8; bf16 and fp16 have fp32 masters. Default bf16 (NeMo)."""
    fp8: FP8 = Field(default_factory=FP8)
    """How linear layers run in FP8; off by default."""
    storage: Storage = Field(default_factory=Storage)
    """How weights, gradients and optimizer states are stored and sent."""
    loss_scale: float | None = Field(default=None, gt=0)
    """Constant loss scale under compute=fp16; null scales dynamically. Default null (NeMo fp16_loss_scale)."""
    initial_loss_scale: float = Field(default=2.0**32, gt=0)
    """First dynamic loss scale. Default 2^32 (NeMo fp16_initial_loss_scale)."""
    min_loss_scale: float = Field(default=1.0, gt=0)
    """Lowest dynamic loss scale. Default 1 (NeMo fp16_min_loss_scale)."""
    loss_scale_window: int = Field(default=1000, ge=1)
    """Consecutive steps without overflow before the scale doubles. Default 1000 (NeMo fp16_loss_scale_window)."""
    hysteresis: int = Field(default=2, ge=1)
    """Steps with overflow before the scale halves. Default 2 (NeMo fp16_hysteresis)."""
    backend: Backend = "auto"
    """Library of the FP8 layers. Default auto: the best one that can run this recipe here; the choice is printed and recorded."""
    opt_level: OptLevel | None = None
    """MS-AMP's optimization level. It sets the storage columns that are auto, and wins over fp8.params if it stores weights in
    another dtype. Default null (O2 under backend=msamp, as in Accelerate)."""
