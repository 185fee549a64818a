"""The precision plugin: what multiplies, how state is stored and sent, who does it. Home: `recipe.trainer.plugins`."""

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
    Backend = Literal[("auto", *names())]  # those of installed packages among them


class Storage(Node):
    """How training state is stored and sent: one codec for each column of the low-precision chart.

    `auto` follows precision.compute, fp8.params and opt_level. The chart is that of the MS-AMP documentation.
    """

    home: ClassVar[str] = "storage"

    weight: Codec = "auto"
    """Weights of linear layers as stored. Default auto: what opt_level says, or FP8 under fp8.params, or precision.compute."""
    master_weight: Codec = "auto"
    """Master copy inside the optimizer. Default auto: fp32 where weights are in half precision or FP8 (Megatron), else none."""
    weight_grad: Codec = "auto"
    """Weight gradients as accumulated. Default auto: fp32, or fp16 under compute=fp16 (NeMo's fp16_mixed)."""
    comm: Codec = "auto"
    """Gradients on the wire. Default auto: fp32, or fp16 under compute=fp16 (NeMo: grad_reduce_in_fp32 True / False)."""
    exp_avg: Codec = "auto"
    """First moment of Adam. Default auto: fp32 (Megatron)."""
    exp_avg_sq: Codec = "auto"
    """Second moment of Adam. Default auto: fp32 (Megatron)."""
    accumulate: Literal["wide", "stored"] = "wide"
    """How the gradients of microbatches add up: wide, in high precision until the last one, and stored once; or stored, each sum
    rounded into storage.weight_grad again (MS-AMP). Default wide: rounding errors add up too."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """How updated weights are rounded into their codec. Default nearest (torch, Megatron, MS-AMP)."""
    shard: Literal["auto", "none", "zero1", "zero2", "fsdp"] = "auto"
    """What is split over data-parallel ranks: optimizer state (ZeRO-1, arXiv 1910.02054), gradients too (zero2), or weights too,
    each float32 and its own master, and gathered layer by layer (fsdp): by torch's FSDP2; whole tensors where masters are narrower.
    Default auto: zero1 (Megatron's distributed optimizer) over several ranks where masters are float32, none under a level or with
    masters in fewer bits, under backend=te with weights held in FP8, around a model of your own, and on one rank."""
    gather: Literal["auto", "fp32", "bf16", "fp16", "fp8"] = "auto"
    """Weights on the wire under shard=fsdp: precision.compute, or fp8 for layers that run in FP8: under fp8.params native layers
    with delayed, current (per tensor) and block scaling, and backend=torchao with current scaling per tensor (torchao's FP8
    all-gather). Default auto: fp8 where that can be, else precision.compute."""


class Precision(Node):
    """Everything about precision in one object. Assigning a preset to `recipe.trainer.plugins` replaces all of it."""

    home: ClassVar[str] = "precision"

    compute: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Dtype of parameters and of everything that FP8 does not cover; fp32 masters under bf16 and fp16. Default bf16 (NeMo)."""
    fp8: FP8 = Field(default_factory=FP8)
    """How linear layers multiply in FP8; off by default."""
    storage: Storage = Field(default_factory=Storage)
    """How weights, gradients and optimizer states are stored and sent."""
    loss_scale: float | None = Field(default=None, gt=0)
    """Constant loss scale under compute=fp16; null scales dynamically. Default null (NeMo fp16_loss_scale)."""
    initial_loss_scale: float = Field(default=2.0**32, gt=0)
    """First dynamic loss scale. Default 2^32 (NeMo fp16_initial_loss_scale)."""
    min_loss_scale: float = Field(default=1.0, gt=0)
    """Dynamic scaling goes no lower. Default 1 (NeMo fp16_min_loss_scale)."""
    loss_scale_window: int = Field(default=1000, ge=1)
    """Good optimizer steps in a row before the scale doubles. Default 1000 (NeMo fp16_loss_scale_window)."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflowing steps before the scale halves. Default 2 (NeMo fp16_hysteresis)."""
    backend: Backend = "auto"
    """Who multiplies. Default auto: the best that can run this recipe here; the choice is printed and recorded."""
    opt_level: OptLevel | None = None
    """MS-AMP's optimization level, which resolves the storage columns left on auto, and goes before fp8.params where it holds
    weights in another codec. Default null (O2 under backend=msamp, as in Accelerate)."""
