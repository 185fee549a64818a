"""FP8Linear: nn.Linear with quantized GEMMs, its state in plain buffers; no tensor subclass, no process-wide state.

Delayed scaling needs memory between steps. Row 0 of `fp8_amax_history`, with what backward passes saw (pass_records.py), is a
running maximum since the last `update_scales`, and nothing else moves in a forward or backward pass. A maximum taken twice is
the same maximum, so recomputing activations, accumulating gradients and evaluating in between need no special case.
(Transformer Engine rolls at the end of each forward pass instead, and stashes scales for the recomputation.)
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8cfg.numerics.autocast_region import Region
from fp8cfg.numerics.codecs import Codec
from fp8cfg.numerics.fp8_state_dict import BUFFERS, ROUNDING_COUNT, prepare_load
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, Stored
from fp8cfg.numerics.gathered_weight import GatheredWeight, shard_parameter
from fp8cfg.numerics.linear_function import LinearFunction, Plan, Products, State
from fp8cfg.numerics.pass_records import PassRecords, amax_record
from fp8cfg.numerics.quantized_weight import QuantizedWeight
from fp8cfg.numerics.scaling import GRAD_OUTPUT, Scaling
from fp8cfg.numerics.shard_scales import ShardPlace, ShardScales, quantized_shard
from fp8cfg.numerics.stochastic_rounding import Random, random_key
from fp8cfg.numerics.weight_workspace import NOTHING, WeightWorkspace

ROUNDING_KEY = "fp8_rounding_key"


# `weight` is a property.
class FP8Linear(PassRecords, WeightWorkspace, QuantizedWeight, nn.Linear):  # type: ignore[override]
    """An nn.Linear whose three GEMMs (fprop, dgrad, wgrad) run in FP8 while its region is active, and in high precision otherwise.
    Its weight may be stored in fewer bits, by `codec`, than the GEMMs read it in.

    Input [..., in] of any float dtype; output [..., out] in the autocast dtype, else in the input's. Evaluations in high precision
    are left out of `gemms_ran`."""

    kept = (*BUFFERS, ROUNDING_COUNT)
    region: Region
    high_precision: Products
    range_used: Tensor | None = None
    sharded = gathered_once = False
    adds_bias = True
    shard_place: ShardPlace
    shard_scales: ShardScales
    shard_codec: Codec | None = None
    """The codec in which FSDP2 gathers the weight, where that is not as FP8 products read it."""
    shard_quantized: Stored | None = None

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scaling: Scaling,
        region: Region,
        high_precision: Products = (False, False, False),
        product: Literal["emulate", "scaled_mm"] = "emulate",
        fp8_params: bool = False,
        codec: Codec | None = None,
        read_as: torch.dtype | None = None,
    ) -> FP8Linear:
        """Takes over the very parameters of `linear`: tied weights stay tied, frozen ones frozen.

        With `fp8_params` the weight becomes a float8 Parameter instead, quantized from `linear.weight`, and `set_weight` writes
        to it; its gradient has the dtype that `linear.weight` had, unless `weight.grad_dtype` is set later. With `codec` it is
        held in that one, and each pass decodes it: also where all products stay in high precision. Either stands for a weight in
        `read_as`, by default the dtype of `linear.weight`. Of a `linear` that is split over tensor-parallel ranks the attributes
        `amax_group` and `adds_bias` go with it. Raises ValueError where the hardware's product cannot have the layer's shape.
        """
        n, k = linear.weight.shape
        if product not in ("emulate", "scaled_mm"):
            raise ValueError(f"product={product!r}; choose one of emulate, scaled_mm")
        if product == "scaled_mm" and scaling.layout.least is None:
            raise ValueError(f"{scaling.kind} is emulated alone, not multiplied by scaled_mm")
        if product == "scaled_mm" and not scaling.multiplied(high_precision):
            raise ValueError(
                f"scaled_mm multiplies {scaling.kind} scaling in E4M3 alone, not gradients in "
                f"{scaling.backward.name.upper()}"
            )
        if product == "scaled_mm" and (n % 16 or k % 16):
            raise ValueError(
                f"in_features={k} and out_features={n}: scaled_mm needs both divisible by 16; keep"
                " this layer in high precision"
            )
        new = cls(k, n, bias=linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias  # type: ignore[misc]
        new.train(linear.training)
        new.amax_group, new.adds_bias = (
            getattr(linear, "amax_group", None),
            getattr(linear, "adds_bias", True),
        )
        new.scaling, new.region, new.high_precision, new.product = (
            scaling,
            region,
            high_precision,
            product,
        )
        new.weight_grad_dtype, device, new.codec = linear.weight.dtype, linear.weight.device, None
        new.read_as = read_as or linear.weight.dtype
        state = new.fresh_state()
        for name in BUFFERS:
            new.register_buffer(name, state.get(name), persistent=False)
        for name in (ROUNDING_KEY, ROUNDING_COUNT):
            new.register_buffer(name, None, persistent=False)
        if scaling.rounds_at_random(GRAD_OUTPUT):
            new.register_buffer(
                ROUNDING_COUNT, torch.zeros((), dtype=torch.int32, device=device), persistent=False
            )
            new.seed_rounding(0)
        new.record_passes(bool(state), device)
        if fp8_params:
            data, *buffers = new._stored(linear.weight.detach())
            for name, buffer in zip(WEIGHT_BUFFERS, buffers, strict=True):
                new.register_buffer(name, buffer, persistent=False)
            new._store(data, linear.weight.requires_grad)
        elif codec:
            new.hold(codec, new.read_as)
        new._prepare_gradient()
        return new

    def shard_in_fp8(self, codec: Codec | None = None) -> None:
        """Let FSDP2, which is to split the weight, gather it in FP8, or in `codec`, which each pass decodes."""
        self._parameters["weight"], self.sharded, self.shard_codec = (
            shard_parameter(self.parameter),
            True,
            codec,
        )

    @property
    def shard_scaling(self) -> Scaling:
        """How the weight that FSDP2 gathers is scaled: as products read it, or in a codec as a whole."""
        return Scaling(kind="current") if self.shard_codec else self.scaling

    def quantized_shard(self, shard: Tensor) -> Stored:
        """This rank's rows of the weight in float8, made once a step; kept unless they are gathered once a step too, as those in a
        codec are."""
        if self.shard_codec:
            scale_inv = self.shard_scales.scale
            data = self.shard_codec.encode(shard, None, scale_inv)[0]
            return Stored(
                data,
                (
                    torch.ones((), dtype=torch.float32, device=data.device)
                    if scale_inv is None
                    else scale_inv
                ),
            )
        made = self.shard_quantized or quantized_shard(
            shard, self.scaling, self.shard_place, self.shard_scales, amax_record(self)
        )
        self.shard_quantized = None if self.gathered_once else made
        return made

    def fresh_state(self) -> dict[str, Tensor]:
        """See `Scaling.fresh_state`."""
        return self.scaling.fresh_state(3, self.parameter.device)

    def forward(self, x: Tensor) -> Tensor:
        weight, state, plan = self.pass_inputs(x.dtype, device := x.device.type)
        bias = self.bias if self.adds_bias else None
        with torch.autocast(device, enabled=False):
            kept = self.kept_weight(weight, plan, state, x.requires_grad)
            of_weight, plan = (
                (kept.tensors, plan._replace(kept=kept.kinds)) if kept else (NOTHING, plan)
            )
            y: Tensor = LinearFunction.apply(
                x.reshape(-1, self.in_features), weight, bias, *state, *of_weight, plan
            )
        return y.view(*x.shape[:-1], self.out_features)

    def quantize_kept(self, dtype: torch.dtype) -> None:
        """Quantize the weight that is kept, for compiled code that is to read it, where inputs are of `dtype` or autocast's."""
        if self.keeps_weight and torch.is_grad_enabled():
            weight, state, plan = self.pass_inputs(dtype, device := self.parameter.device.type)
            with torch.autocast(device, enabled=False):
                self.kept_weight(weight, plan, state, dgrad=True)

    def pass_inputs(self, dtype: torch.dtype, device: str) -> tuple[Tensor, State, Plan]:
        """The weight, or what receives its gradient, the buffers of a pass over inputs of `dtype` on `device`, and its plan."""
        out = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else dtype
        exact = self.scaling.layout.exact_in_bfloat16(self.scaling.power_2_scales)
        carrier = torch.bfloat16 if out == torch.bfloat16 and exact else torch.float32
        high_precision = self.high_precision if self.region.applies() else (True, True, True)
        weight, stored = self.receiver_and_stored() if self.held else (self.parameter, None)
        weight_grad = weight.dtype if stored is None else self.weight_grad_dtype
        beside: list[Tensor | None] = [getattr(self, name) for name in WEIGHT_BUFFERS]
        if isinstance(weight, GatheredWeight):
            stored, *beside = weight.stored
        product = None if self.product == "scaled_mm" else carrier
        learns = torch.is_grad_enabled()
        trains = learns and self.training
        codec = self.codec or self.shard_codec
        plan = Plan(
            self.scaling,
            high_precision,
            product,
            out,
            weight_grad,
            learns,
            codec,
            trains,
            self.parts,
        )
        rounding = [getattr(self, ROUNDING_KEY), getattr(self, ROUNDING_COUNT)]
        records = (
            amax_record(self),
            self.fp8_backward_amax,
            *rounding,
            self.ran_forward,
            self.ran_backward,
        )
        return weight, State._make([stored, *beside, self.fp8_scale, *records]), plan

    def seed_rounding(self, seed: int, *words: int | str) -> None:
        """Seeds the stochastic rounding of gradients from `seed` and these words, such as the layer's name and the rank. The count
        of draws, one for each backward pass, is in the state dict; the key is not, since it differs by rank.
        """
        if self.scaling.rounds_at_random(GRAD_OUTPUT):
            self.register_buffer(
                ROUNDING_KEY, random_key(seed, *words).to(self.parameter.device), persistent=False
            )

    def random(self, lane: int) -> Random | None:
        """The random numbers for rounding the next gradient, for the products that contract its dimension `lane`; None where
        gradients are rounded to nearest."""
        key, count = getattr(self, ROUNDING_KEY), getattr(self, ROUNDING_COUNT)
        return None if key is None else Random(key, count, lane)

    def extra_repr(self) -> str:
        formats = f"{self.scaling.forward.name}/{self.scaling.backward.name}"
        held = f", weight {self.codec}" if self.codec else ""
        return f"{super().extra_repr()}, {self.scaling.kind} {formats}, {self.product}{held}"

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        master = prepare_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.forget_scales_set()
        if master is not None:
            self.set_weight(master)


def seed_rounding(model: nn.Module, seed: int) -> None:
    """Seeds stochastic rounding in all FP8 layers of `model`: each layer, and each rank, draws its own random numbers."""
    rank = (
        dist.get_rank()
        if dist.is_available() and dist.is_initialized()
        else int(os.environ.get("RANK", "0"))
    )
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            layer.seed_rounding(seed, name, rank)


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """The FP8 layers of `model`, each once, in the order of its modules."""
    return (module for module in model.modules() if isinstance(module, FP8Linear))
