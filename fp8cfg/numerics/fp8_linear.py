"""FP8Linear: an nn.Linear whose three GEMMs multiply FP8 operands.

For T tokens:

    fprop   output      [T, out]  = input         [T, in]   @ weight.T [in, out]
    dgrad   grad_input  [T, in]   = grad_output   [T, out]  @ weight   [out, in]
    wgrad   grad_weight [out, in] = grad_output.T [out, T]  @ input    [T, in]

Inputs and weights are quantized to `scaling.forward` (E4M3), gradients to `scaling.backward` (E5M2 in the
hybrid format). Read on:

    LinearFunction     the three GEMMs, and the tensors saved for the backward pass
    FP8Linear          the module: configuration, buffers, weight storage
    linear_operands    operands of each GEMM: scales, dimensions, kernels, cached weights
    weight_storage     weights stored in FP8 or in a codec
    fsdp_weights       FP8 all-gather of weights

Delayed scaling needs state between steps. Row 0 of `fp8_amax_history`, with `fp8_backward_amax`, is the
running maximum since the last `update_scales`. A pass changes no scale, and a maximum taken twice is the
same maximum. So activation checkpointing and gradient accumulation need no special case. Evaluations
record nothing. Transformer Engine rolls the history after each forward pass instead, and stashes scales
for the recomputation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fp8cfg.numerics.amax import AmaxGroup, keep_overflow
from fp8cfg.numerics.async_copies import HostCopy
from fp8cfg.numerics.formats import RandomStream, random_key
from fp8cfg.numerics.fp8_weights import WEIGHT_BUFFERS, FP8Weight, GatheredWeight, WeightStorage
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, Operand, gemm
from fp8cfg.numerics.kernels.store import store_and_record
from fp8cfg.numerics.linear_operands import (
    NO_OPERANDS,
    GemmFlags,
    LinearCall,
    PassBuffers,
    WeightCache,
    WeightOperands,
)
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling
from fp8cfg.numerics.stored_state import (
    AMAX,
    ANEW,
    BACKWARD_AMAX,
    BUFFERS,
    RAN,
    ROUNDING_COUNT,
    amax_record,
    fold_backward,
    forget_backward,
    in_stored_form,
    prepare_load,
)
from fp8cfg.numerics.weight_storage import NarrowWeight

if TYPE_CHECKING:
    from fp8cfg.numerics.autocast import Region
    from fp8cfg.numerics.codecs import Codec
    from fp8cfg.numerics.token_shard import TokenShard

ROUNDING_KEY = "fp8_rounding_key"


class LinearFunction(torch.autograd.Function):
    """The three GEMMs of a linear layer.

    `weight` is an argument because autograd returns a gradient to the tensors that a function is
    called with. If `storage` is the weight, the GEMMs read it instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        storage: WeightStorage | None,
        cached: WeightOperands,
        forward_buffers: PassBuffers,
        backward_buffers: PassBuffers,
        call: LinearCall,
    ) -> Tensor:
        """Computes the output.

        Args:
            ctx: Autograd's context.
            input: Input [T, in].
            weight: Weight [out, in], or the tensor that receives its gradient.
            bias: Bias [out], if any.
            storage: The weight if it is stored in FP8 or in a codec.
            cached: Operands of the weight from an earlier pass of the step.
            forward_buffers: Buffers of this pass.
            backward_buffers: Buffers of the backward pass.
            call: The configuration.

        Returns:
            Output [T, out] in `call.output_dtype`.
        """
        needs_grad_input, needs_grad_weight = ctx.needs_input_grad[:2]

        # One kernel quantizes the input for fprop and wgrad, and one byte per element is saved for
        # wgrad. If it takes less memory to save the input itself, the backward pass quantizes it.
        defers_input = needs_grad_weight and call.defers_wgrad_input
        input_gemms = [FPROP]
        if needs_grad_weight and not defers_input:
            input_gemms.append(WGRAD)
        inputs = call.operands(input, INPUT, input_gemms, forward_buffers)

        # dgrad reads a stored weight again in the backward pass, so no operand is saved. Only a
        # weight in a codec is quantized for dgrad now, because its FP8 operand is as small.
        reads_storage = False
        if storage is not None and cached.dgrad is None:
            reads_storage = isinstance(storage, FP8Weight) or call.high_precision[DGRAD]
        saves_weight = needs_grad_input and not reads_storage
        weight_gemms = [FPROP]
        if saves_weight:
            weight_gemms.append(DGRAD)
        weight_source: Tensor | WeightStorage = weight
        if storage is not None:
            weight_source = storage
        weights = weight_operands(call, weight_source, cached, weight_gemms, forward_buffers)

        # fprop: output [T, out] = input [T, in] @ weight.T [in, out]. Both operands are E4M3 and
        # contracted along their rows, as they are stored: cuBLAS wants exactly this layout. Fast
        # accumulation is good enough for activations.
        gemms_ran = None
        # Coverage counts high precision only in training: evaluations may turn FP8 off.
        if call.is_training or not call.high_precision[FPROP]:
            gemms_ran = forward_buffers.gemms_ran
        output = gemm(inputs[FPROP], weights[FPROP], call.output_dtype, gemms_ran, FPROP, bias)

        saved_input, input_source = inputs.get(WGRAD), None
        if defers_input:
            saved_input, input_source = call.deferred_input(input, inputs[FPROP])
        saved_weight = weights.get(DGRAD)
        stored_data = None
        ctx.storage = None
        if storage is not None:
            # The scales are attributes instead of saved tensors: a second forward pass may write
            # these buffers before this backward pass, and autograd rejects saved tensors that were
            # written.
            stored_data = storage.data
            ctx.storage = storage._replace(data=None)  # type: ignore[arg-type]
        ctx.save_for_backward(
            *operand_tensors(saved_input),
            *operand_tensors(saved_weight),
            input_source,
            stored_data,
        )
        ctx.input_kind = operand_kind(saved_input)
        ctx.weight_kind = operand_kind(saved_weight)
        ctx.buffers = backward_buffers  # an attribute for the same reason
        ctx.call = call
        ctx.input_dtype = input.dtype
        ctx.bias_dtype = None
        if bias is not None:
            ctx.bias_dtype = bias.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, buffers = ctx.call, ctx.buffers
        # Three tensors for each operand.
        *operands, input_source, stored_data = ctx.saved_tensors
        input_operand = Operand.from_tensors(operands[:3], ctx.input_kind)
        weight_operand = Operand.from_tensors(operands[3:], ctx.weight_kind)
        needs_grad_input, needs_grad_weight, needs_grad_bias = ctx.needs_input_grad[:3]
        grad_input, grad_weight, grad_bias = None, None, None

        with torch.autocast(grad_output.device.type, enabled=False):
            # dgrad and wgrad contract different dimensions of grad_output. One kernel quantizes it
            # for both, to E5M2 in the hybrid format: gradients span many powers of two.
            gemms = []
            if needs_grad_input:
                gemms.append(DGRAD)
            if needs_grad_weight:
                gemms.append(WGRAD)
            grad_outputs = call.operands(grad_output, GRAD_OUTPUT, gemms, buffers)

            # dgrad: grad_input [T, in] = grad_output [T, out] @ weight [out, in]. The weight is
            # contracted along its columns, so cuBLAS needs a transposed copy.
            if needs_grad_input:
                if weight_operand is None:  # dgrad reads the stored weight
                    storage = ctx.storage._replace(data=stored_data)
                    weight_operand = call.operands(storage, WEIGHT, [DGRAD], buffers)[DGRAD]
                grad_input = gemm(
                    grad_outputs[DGRAD], weight_operand, ctx.input_dtype, buffers.gemms_ran, DGRAD
                )

            # wgrad: grad_weight [out, in] = grad_output.T [out, T] @ input [T, in]. Both operands
            # are contracted along the tokens, so both are transposed copies.
            if needs_grad_weight:
                if call.defers_wgrad_input:
                    input_operand = call.wgrad_input(input_operand, input_source, buffers)
                assert input_operand is not None
                grad_weight = gemm(
                    grad_outputs[WGRAD],
                    input_operand,
                    call.weight_grad_dtype,
                    buffers.gemms_ran,
                    WGRAD,
                )

            if grad_output.dtype == torch.float16 and grad_output.numel():
                if grad_weight is not None:
                    keep_overflow(grad_output, grad_weight)
                elif grad_input is not None:  # the weight is frozen
                    keep_overflow(grad_output, grad_input)

            if buffers.rounding is not None:
                # Only backward passes draw random numbers, so recomputed forward passes don't count.
                _, num_draws = buffers.rounding
                num_draws.add_(1)
            if needs_grad_bias:
                grad_bias = grad_output.sum(0).to(ctx.bias_dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


def weight_operands(
    call: LinearCall,
    source: Tensor | WeightStorage,
    cached: WeightOperands,
    gemms: list[int],
    buffers: PassBuffers,
) -> dict[int, Operand]:
    """Returns the operands of the weight in `gemms`: cached ones, and the rest quantized now."""
    operands = {}
    missing = []
    for slot in gemms:
        operand = cached.get(slot)
        if operand is None:
            missing.append(slot)
        else:
            operands[slot] = operand
    return operands | call.operands(source, WEIGHT, missing, buffers)


def operand_tensors(operand: Operand | None) -> tuple[Tensor | None, ...]:
    """Returns the three tensors of an operand for `save_for_backward`."""
    if operand is None:
        return None, None, None
    return operand.tensors


def operand_kind(operand: Operand | None) -> Any:
    """Returns the second argument of `Operand.from_tensors`: format and tile."""
    if operand is None:
        return None
    return operand.fmt, operand.tile


# `weight` is a property.
class FP8Linear(NarrowWeight, nn.Linear):  # type: ignore[override]
    """An nn.Linear with FP8 GEMMs while its region is active, and high-precision GEMMs otherwise.

    The input has any shape [..., in] and float dtype. The output [..., out] has the dtype of
    torch.autocast if that is on, otherwise the dtype of the input. Evaluations in high precision are
    not recorded in `gemms_ran`.

    Attributes:
        scaling: How all three tensors are scaled.
        region: The autocast region, shared by all layers of a model.
        high_precision: Which of fprop, dgrad and wgrad stay in high precision.
        product: "scaled_mm" multiplies float8 tensors, "emulate" their values in a wider dtype.
        weight_cache: The quantized weight of the current optimizer step.
        keeps_transpose: Whether the cache has dgrad's transpose of an FP8 weight.
        fsdp_shard: FSDPShard of fsdp_weights.py, if FSDP2 gathers the weight in FP8 or in a codec.
        amax_group: Tensor-parallel ranks with the other shards of the tensors.
        token_shard: This rank's tokens of the input under sequence parallelism.
        keeps_input: Whether the backward pass quantizes the saved input for wgrad.
        adds_bias: Whether this rank adds the bias.
        range_used: float32 [3], amaxes of the last step relative to the range of their scales.
    """

    state_buffers = (*BUFFERS, ROUNDING_COUNT)
    scaling: Scaling
    region: Region
    high_precision: GemmFlags
    product: Literal["emulate", "scaled_mm"]
    weight_cache: WeightCache
    keeps_transpose = False
    fsdp_shard: Any = None
    amax_group: AmaxGroup | None = None
    token_shard: TokenShard | None = None
    keeps_input = False
    adds_bias = True
    range_used: Tensor | None = None
    scales_set: tuple[int, ...] = ()
    """Roles with delayed scales known to be set."""
    scales_read: HostCopy | None = None
    """A copy of the scales to the host, if more of them may be set by now."""
    rounding_seed: tuple[Any, ...] = (0,)
    """The arguments of the last `seed_rounding`."""

    fp8_scale: Tensor | None
    fp8_amax_history: Tensor | None
    fp8_amax: Tensor | None
    fp8_backward_amax: Tensor
    ran_forward: Tensor
    ran_backward: Tensor

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        scaling: Scaling,
        region: Region,
        high_precision: GemmFlags = (False, False, False),
        product: Literal["emulate", "scaled_mm"] = "emulate",
        fp8_params: bool = False,
        codec: Codec | None = None,
        read_as: torch.dtype | None = None,
    ) -> FP8Linear:
        """Converts a linear layer. It shares the parameters: tied and frozen weights stay so.

        A layer that tensor parallelism has split passes on its `amax_group`, `token_shard`,
        `keeps_input` and `adds_bias`.

        Args:
            linear: The layer.
            scaling: See the class.
            region: See the class.
            high_precision: See the class.
            product: See the class.
            fp8_params: Whether to replace the weight by an FP8 Parameter, which `set_weight` writes.
                Its gradient has the dtype of `linear.weight`, unless `weight.grad_dtype` is set.
            codec: Storage codec of the weight. Each pass decodes it.
            read_as: Dtype represented by a stored weight. Defaults to the dtype of `linear.weight`.

        Raises:
            ValueError: The hardware cannot multiply the layer's shape or formats.
        """
        check_product(linear, scaling, high_precision, product)
        out_features, in_features = linear.weight.shape
        # The meta device allocates nothing for the parameters that the next lines replace.
        layer = cls(in_features, out_features, bias=linear.bias is not None, device="meta")
        layer.weight = linear.weight  # type: ignore[misc]
        layer.bias = linear.bias
        layer.train(linear.training)
        layer.scaling = scaling
        layer.region = region
        layer.high_precision = high_precision
        layer.product = product
        layer.amax_group = getattr(linear, "amax_group", None)
        layer.token_shard = getattr(linear, "token_shard", None)
        layer.keeps_input = getattr(linear, "keeps_input", False)
        layer.adds_bias = getattr(linear, "adds_bias", True)
        layer.weight_cache = WeightCache()
        layer.read_as = read_as or linear.weight.dtype
        layer.weight_grad_dtype = linear.weight.dtype
        layer._register_buffers(linear.weight.device)
        if fp8_params:
            # The other fields of FP8Weight become buffers.
            data, *scales = layer._quantize_master(linear.weight.detach())
            for name, buffer in zip(WEIGHT_BUFFERS, scales, strict=True):
                layer.register_buffer(name, buffer, persistent=False)
            layer._set_parameter(data, linear.weight.requires_grad)
        elif codec is not None:
            layer.store_in_codec(codec, layer.read_as)
        layer._prepare_gradient()
        return layer

    def _register_buffers(self, device: torch.device) -> None:
        def register(name: str, buffer: Tensor | None) -> None:
            # The plain model's state dict has the same keys; see stored_state.py.
            self.register_buffer(name, buffer, persistent=False)

        state = self.fresh_state()
        for name in BUFFERS:
            register(name, state.get(name))
        register(ROUNDING_KEY, None)
        register(ROUNDING_COUNT, None)
        if self.scaling.rounds_stochastically(GRAD_OUTPUT):
            register(ROUNDING_COUNT, torch.zeros((), dtype=torch.int32, device=device))
            self.seed_rounding(0)
        for name in RAN:
            register(name, torch.zeros(3, dtype=torch.int32, device=device))
        amax = None
        if not state:  # under delayed scaling row 0 of the history is the amax record
            amax = torch.zeros(1, 3, dtype=torch.float32, device=device)
        register(AMAX, amax)
        register(BACKWARD_AMAX, torch.zeros(1, 3, dtype=torch.float32, device=device))

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            raise RuntimeError(
                f"FP8 layer: input of dtype {x.dtype}, expected a float dtype as nn.Linear does;"
                " cast it, for example with x.float()"
            )
        if x.shape[-1:] != (self.in_features,):
            raise RuntimeError(
                f"FP8 layer: input of shape {tuple(x.shape)}, expected {self.in_features} columns"
                " (in_features) in its last dimension"
            )
        num_sequences = 1
        if self.token_shard is not None:
            num_sequences = x.shape[:-2].numel()
        call = self._call(x.dtype, x.device.type)._replace(
            token_shard=self.token_shard,
            num_sequences=num_sequences,
            # A compiler decides itself what to save.
            saves_input=self.keeps_input and not torch.compiler.is_compiling(),
        )
        weight, storage = self._weight_and_storage()
        forward_buffers, backward_buffers = self._pass_buffers()
        bias = None
        if self.adds_bias:
            bias = self.bias
        # Operands have their dtypes already, and autocast would change them in emulated GEMMs.
        with torch.autocast(x.device.type, enabled=False):
            cached = self._cached_operands(call, weight, storage, forward_buffers, x.requires_grad)
            y: Tensor = LinearFunction.apply(
                # GEMMs multiply matrices: all leading dimensions are tokens.
                x.reshape(-1, self.in_features),
                weight,
                bias,
                storage,
                cached,
                forward_buffers,
                backward_buffers,
                call,
            )
        return y.view(*x.shape[:-1], self.out_features)

    def _call(self, input_dtype: torch.dtype, device: str) -> LinearCall:
        """Returns the configuration of a call with inputs of `input_dtype` on `device`."""
        output_dtype = input_dtype
        if torch.is_autocast_enabled(device):
            output_dtype = torch.get_autocast_dtype(device)
        high_precision = self.high_precision
        if not self.region.applies():
            high_precision = (True, True, True)
        carrier = None
        if self.product == "emulate":
            # bfloat16 holds all FP8 values, but not their products with arbitrary scales.
            is_exact = self.scaling.layout.exact_in_bfloat16(self.scaling.power_2_scales)
            carrier = torch.float32
            if is_exact and output_dtype == torch.bfloat16:
                carrier = torch.bfloat16
        weight_grad_dtype = self.parameter.dtype
        if self.is_encoded:
            weight_grad_dtype = self.weight_grad_dtype
        record_amax = torch.is_grad_enabled()
        return LinearCall(
            self.scaling,
            high_precision=high_precision,
            carrier=carrier,
            output_dtype=output_dtype,
            weight_grad_dtype=weight_grad_dtype,
            record_amax=record_amax,
            is_training=record_amax and self.training,
            amax_group=self.pass_amax_group,
        )

    def _weight_and_storage(self) -> tuple[Tensor, WeightStorage | None]:
        """Returns the tensor that receives the gradient, and the weight if it is not that tensor."""
        if self.is_encoded:
            return self.receiver_and_storage()
        weight = self.parameter
        if not isinstance(weight, GatheredWeight):
            return weight, None
        codec = None
        if self.fsdp_shard is not None:
            codec = self.fsdp_shard.codec
        return weight, weight.weight_storage(codec)

    def _pass_buffers(self) -> tuple[PassBuffers, PassBuffers]:
        """Returns the buffers of a forward pass and of its backward pass."""
        rounding = None
        key, num_draws = self._buffers[ROUNDING_KEY], self._buffers[ROUNDING_COUNT]
        if key is not None and num_draws is not None:
            rounding = key, num_draws
        forward = PassBuffers(self.fp8_scale, amax_record(self), self.ran_forward)
        backward = PassBuffers(self.fp8_scale, self.fp8_backward_amax, self.ran_backward, rounding)
        return forward, backward

    def _cached_operands(
        self,
        call: LinearCall,
        weight: Tensor,
        storage: WeightStorage | None,
        buffers: PassBuffers,
        needs_dgrad: bool,
    ) -> WeightOperands:
        """Returns the operands in the weight cache, after filling it if necessary."""
        if storage is None:
            return self.weight_cache.read(call, weight, None, buffers, needs_dgrad)
        if isinstance(storage, FP8Weight) and self.keeps_transpose:
            return self.weight_cache.read(call, weight, storage, buffers, needs_dgrad)
        return NO_OPERANDS  # each pass reads the stored weight

    def quantize_weight(self, input_dtype: torch.dtype) -> None:
        """Fills the weight cache before compiled code that reads it.

        `input_dtype` is the dtype of the inputs outside of autocast.
        """
        if not self.weight_cache.enabled or not torch.is_grad_enabled():
            return
        device = self.parameter.device.type
        call = self._call(input_dtype, device)
        weight, storage = self._weight_and_storage()
        buffers, _ = self._pass_buffers()
        with torch.autocast(device, enabled=False):
            self._cached_operands(call, weight, storage, buffers, needs_dgrad=True)

    def end_loop_step(self) -> None:
        """Empties the weight cache after an optimizer step of a custom training loop."""
        self.weight_cache.end_loop_step(is_sharded=hasattr(self.parameter, "placements"))

    @property
    def fp8_params(self) -> bool:
        """Whether the weight is stored in FP8 only."""
        return self.codec is None and self.has_scale

    @torch.no_grad()
    def set_weight(self, master: Tensor) -> None:
        """Quantizes `master`, float32 [out, in], into the stored weight.

        Under delayed scaling it uses the current scale and records the amax. Call it after
        `update_scales`. Then the run has the same bits as with a high-precision weight, quantized in
        each forward pass.

        Raises:
            TypeError: The weight is not stored in FP8 or in a codec.
        """
        if self.codec is not None:
            super().set_weight(master)
            return
        storage = self.weight_storage
        if not isinstance(storage, FP8Weight):
            raise TypeError(
                "set_weight writes float8 weights; this layer has a high-precision one: assign"
                " to it"
            )
        for target, tensor in zip(storage, self._quantize_master(master, storage), strict=True):
            # A kernel has written into the target itself.
            if target is not None and tensor is not None and tensor is not target:
                target.copy_(tensor)

    def _quantize_master(self, master: Tensor, target: FP8Weight | None = None) -> FP8Weight:
        return store_and_record(
            master, self.scaling, self.fp8_scale, amax_record(self), self.pass_amax_group, target
        )

    def store_in_codec(self, codec: Codec, read_as: torch.dtype) -> None:
        """Stores the weight in a codec from now on.

        The layer gets a new Parameter, unless the weight has the codec's dtype already and needs no
        scale.
        """
        self.codec = codec
        self.read_as = read_as
        self._encode_parameter(codec)
        self._prepare_gradient()

    @property
    def pass_amax_group(self) -> AmaxGroup | None:
        """The part of `amax_group` whose amaxes are reduced in this pass.

        Under delayed scaling a pass reads the amax only if the scale is not set yet.
        """
        if self.amax_group is None:
            return None
        return self.amax_group.exclude(self.scales_set)

    def mark_scales_set(self, roles: tuple[int, ...]) -> None:
        """Notes that the delayed scales of these roles are set. Others may not be."""
        # Compiled code is guarded by this attribute. An assignment would invalidate it.
        if roles != self.scales_set:
            self.scales_set = roles

    def forget_scales_set(self) -> None:
        """Notes that delayed scales were replaced by others, which may not be set."""
        self.scales_read = None
        self.mark_scales_set(())

    @property
    def gemms_ran(self) -> Tensor:
        """int32 [3], a new tensor: what each GEMM multiplied last. See `decode_gemm_record`."""
        return self.ran_forward + self.ran_backward

    def clear_gemms_ran(self) -> None:
        """Clears the record of GEMMs."""
        for name in RAN:
            self.get_buffer(name).zero_()

    def seed_rounding(self, seed: int, *words: int | str) -> None:
        """Seeds the stochastic rounding of gradients.

        The state dict contains the count of draws, but not the key: it differs by rank.

        Args:
            seed: The seed of the run.
            words: Further parts of the key, such as the layer's name and the rank.
        """
        self.rounding_seed = (seed, *words)
        if self.scaling.rounds_stochastically(GRAD_OUTPUT):
            key = random_key(seed, *words).to(self.parameter.device)
            self.register_buffer(ROUNDING_KEY, key, persistent=False)

    def random(self, lane: int) -> RandomStream | None:
        """Returns the random numbers that round the next gradient, None if it rounds to nearest.

        `lane` is the dimension that the GEMM contracts.
        """
        key, num_draws = self._buffers[ROUNDING_KEY], self._buffers[ROUNDING_COUNT]
        if key is None or num_draws is None:
            return None
        return RandomStream(key, num_draws, lane)

    def fresh_state(self) -> dict[str, Tensor]:
        """Returns the delayed-scaling state of a new layer, see `Scaling.fresh_state`."""
        return self.scaling.fresh_state(3, self.parameter.device)

    def reset_fp8_state(self) -> None:
        """Resets scales, histories and records to those of a new layer, on the weight's device."""
        device = self.parameter.device
        fresh = self.fresh_state()
        names = ("fp8_scale", "fp8_amax_history", *RAN, AMAX, BACKWARD_AMAX, ROUNDING_COUNT)
        for name in names:
            buffer = self._buffers[name]
            if buffer is not None:
                zeros = torch.zeros_like(buffer, device=device)
                self._buffers[name] = fresh.get(name, zeros)
        seed, *words = self.rounding_seed
        self.seed_rounding(seed, *words)
        vars(self).pop(ANEW, None)  # a new layer has no scales to lose

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        was_meta = self.parameter.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.parameter.is_meta:
            self.reset_fp8_state()  # to_empty() leaves garbage in buffers
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        state.pop("scales_read", None)
        return state

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if in_stored_form():
            fold_backward([self])
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *rest: Any) -> None:
        master = prepare_load(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if prefix + "fp8_amax_history" in state_dict:
            forget_backward([self])
        self.forget_scales_set()
        if self.ran_forward.is_meta and not self.parameter.is_meta:
            self.reset_fp8_state()  # load_state_dict(assign=True) replaced only the parameters
        if master is not None:
            self.set_weight(master)

    def extra_repr(self) -> str:
        formats = f"{self.scaling.forward.name}/{self.scaling.backward.name}"
        text = f"{super().extra_repr()}, {self.scaling.kind} {formats}, {self.product}"
        if self.codec:
            text += f", weight {self.codec}"
        return text


def check_product(
    linear: nn.Linear, scaling: Scaling, high_precision: GemmFlags, product: str
) -> None:
    """Raises ValueError if the hardware cannot multiply a layer."""
    out_features, in_features = linear.weight.shape
    if product not in ("emulate", "scaled_mm"):
        raise ValueError(f"product={product!r}; choose one of emulate, scaled_mm")
    if product == "emulate":
        return
    if scaling.layout.least is None:
        raise ValueError(f"scaled_mm does not support {scaling.kind} scaling; use product=emulate")
    if not scaling.has_hardware_gemms(high_precision):
        raise ValueError(
            f"scaled_mm multiplies {scaling.kind} scaling only in E4M3, but gradients are"
            f" {scaling.backward.name.upper()}"
        )
    if out_features % 16 or in_features % 16:
        raise ValueError(
            f"in_features={in_features} and out_features={out_features}: scaled_mm needs both"
            " divisible by 16; keep this layer in high precision"
        )


def seed_rounding(model: nn.Module, seed: int) -> None:
    """Seeds stochastic rounding. Each layer and each rank draws different random numbers."""
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = int(os.environ.get("RANK", "0"))
    for name, layer in model.named_modules():
        if isinstance(layer, FP8Linear):
            layer.seed_rounding(seed, name, rank)


def fp8_linears(model: nn.Module) -> Iterator[FP8Linear]:
    """Yields the FP8 linear layers of `model`, each once, in the order of its modules."""
    for module in model.modules():
        if isinstance(module, FP8Linear):
            yield module
