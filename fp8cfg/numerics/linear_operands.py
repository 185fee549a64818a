"""Operands of the three GEMMs of a linear layer: what is quantized, along which dimension, and how often.

Each tensor enters two GEMMs and is contracted along another dimension in each:

    tensor        shape        fprop    dgrad    wgrad
    input         [T, in]      dim 1             dim 0
    weight        [out, in]    dim 1    dim 0
    grad_output   [T, out]              dim 1    dim 0

With one scale per tensor, or square tiles, both GEMMs read the same values: the tensor is quantized once
and transposed. The scales of rows, 1x128, MXFP8 and NVFP4 lie along the contracted dimension, so the
tensor is quantized twice, by one kernel if possible.

The weight stays the same within an optimizer step. `WeightCache` keeps its operands from the first
microbatch to the last, as Transformer Engine's weight workspace does (pytorch/module/base.py,
get_weight_workspace).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from fp8cfg.numerics.amax import AmaxGroup, running_max, sharing_group
from fp8cfg.numerics.fp8_weights import FP8Weight, WeightStorage
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD, Operand
from fp8cfg.numerics.kernels.launch import (
    can_fuse_tensor,
    can_fuse_tiles,
    quantize_tensor_fused,
    quantize_tiles_fused,
)
from fp8cfg.numerics.quantize import count_out_of_range, quantize, quantize_nvfp4, quantize_tiles
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT, Scaling, choose_tensor_scale

if TYPE_CHECKING:
    # Set on the layer by tensor parallelism; without it this module is not needed.
    from fp8cfg.numerics.token_shard import TokenShard

GemmFlags = tuple[bool, bool, bool]
"""One flag each for fprop, dgrad and wgrad."""

CONTRACTED = {
    (INPUT, FPROP): 1,
    (WEIGHT, FPROP): 1,
    (GRAD_OUTPUT, DGRAD): 1,
    (WEIGHT, DGRAD): 0,
    (GRAD_OUTPUT, WGRAD): 0,
    (INPUT, WGRAD): 0,
}
"""The dimension of each tensor, as stored, that a GEMM contracts."""


class PassBuffers(NamedTuple):
    """Buffers of a layer in a forward pass or in a backward pass.

    The two passes write different records. A compiler copies a buffer that both write: 14 launches
    instead of 11 for a layer under delayed scaling.

    Attributes:
        scales: float32 [3], the scales of delayed scaling, else None.
        amax: float32 [rows, 3]; row 0 receives the amaxes of this pass.
        gemms_ran: int32 [3]; receives what each GEMM multiplied (gemm.py).
        rounding: Key and count of the random numbers for stochastic rounding, else None.
    """

    scales: Tensor | None
    amax: Tensor
    gemms_ran: Tensor
    rounding: tuple[Tensor, Tensor] | None = None


class LinearCall(NamedTuple):
    """Configuration of one call of a layer. It is static: a compiler specializes on it.

    Attributes:
        scaling: The scaling.
        high_precision: Which of fprop, dgrad and wgrad are not in FP8.
        carrier: Dtype of the operands of emulated GEMMs. None for float8 operands.
        output_dtype: Dtype of the output, and of high-precision operands.
        weight_grad_dtype: Dtype of the weight gradient.
        record_amax: Whether the pass counts for later scales. False under no_grad.
        is_training: Whether GEMMs in high precision are recorded.
        amax_group: Ranks with the other shards of the tensors. They share the scales.
        token_shard: This rank's tokens of a gathered input.
        num_sequences: Sequences in the input.
        saves_input: Whether the input is saved as it is, because it takes no extra memory:
            activation checkpointing has it or computes it again.
    """

    scaling: Scaling
    high_precision: GemmFlags
    carrier: torch.dtype | None
    output_dtype: torch.dtype
    weight_grad_dtype: torch.dtype
    record_amax: bool
    is_training: bool = True
    amax_group: AmaxGroup | None = None
    token_shard: TokenShard | None = None
    num_sequences: int = 1
    saves_input: bool = False

    def operands(
        self, source: Tensor | WeightStorage, role: int, gemms: Sequence[int], buffers: PassBuffers
    ) -> dict[int, Operand]:
        """Returns the operand of a tensor in each of `gemms`, contracted dimension last.

        Args:
            source: Matrix as stored (see the module's table), or a stored weight.
            role: INPUT, WEIGHT or GRAD_OUTPUT.
            gemms: FPROP, DGRAD or WGRAD, at most two of them. One that contracts dimension 1 comes
                first.
            buffers: The buffers of this pass.
        """
        fp8_dims = {CONTRACTED[role, gemm] for gemm in gemms if not self.high_precision[gemm]}
        needs_both = fp8_dims == {0, 1}
        operands: dict[int, Operand] = {}
        # By precision and the dimension along which scales lie.
        quantized: dict[tuple[bool, int], Operand] = {}
        for gemm in gemms:
            high_precision = self.high_precision[gemm]
            dim = CONTRACTED[role, gemm]
            scaled_dim = 1
            if dim == 0 and not high_precision and self.scaling.directional(role):
                along_rows = quantized.get((False, 1))
                if along_rows is not None and along_rows.columnwise is not None:
                    # A kernel has quantized along both dimensions in one read.
                    operands[gemm] = along_rows.t()
                    continue
                scaled_dim = 0
            key = (high_precision, scaled_dim)
            if key not in quantized:
                if high_precision:
                    quantized[key] = self._high_precision_operand(source)
                else:
                    quantized[key] = self._fp8_operand(
                        source, role, scaled_dim, needs_both, buffers
                    )
            operand = quantized[key]
            if dim == 0:
                operand = operand.t()  # a view, or the transposed copy from the kernel
            operands[gemm] = operand
        return operands

    def _high_precision_operand(self, source: Tensor | WeightStorage) -> Operand:
        if isinstance(source, Tensor):
            return Operand(source.to(self.output_dtype))
        return Operand(source.values(self.output_dtype))

    def _fp8_operand(
        self,
        source: Tensor | WeightStorage,
        role: int,
        dim: int,
        both: bool,
        buffers: PassBuffers,
    ) -> Operand:
        """Returns a quantized operand as [rows, columns] of the stored tensor.

        Args:
            source: Matrix, or a stored weight.
            role: INPUT, WEIGHT or GRAD_OUTPUT.
            dim: The dimension along which scales lie, if they lie along one.
            both: Whether GEMMs contract both dimensions.
            buffers: The buffers of this pass.
        """
        if isinstance(source, FP8Weight):
            return source.operand(dim, self.scaling, self.carrier)
        if not isinstance(source, Tensor):
            # A codec has other scales than the GEMM: its weight is quantized like any tensor.
            source = source.values(torch.float32)
        if self.scaling.tile(role, dim) is None:
            return self._quantize_tensor(source, role, both, buffers)
        return self._quantize_tiles(source, role, dim, both, buffers)

    def _quantize_tensor(
        self, tensor: Tensor, role: int, both: bool, buffers: PassBuffers
    ) -> Operand:
        """Quantizes with one scale per tensor."""
        scaling, record = self.scaling, self.record_amax
        if can_fuse_tensor(tensor, scaling, self.carrier):
            return quantize_tensor_fused(
                tensor, role, scaling, buffers.scales, buffers.amax, record, both, self.amax_group
            )
        scale = choose_tensor_scale(
            tensor, role, scaling, buffers.scales, buffers.amax, record, self.amax_group
        )
        fmt = scaling.format_of(role)
        if record:
            count_out_of_range(tensor, role, buffers.amax[0, role], scale, fmt)
        return quantize(tensor, scale, fmt, self.carrier or fmt.dtype)

    def _quantize_tiles(
        self, tensor: Tensor, role: int, dim: int, both: bool, buffers: PassBuffers
    ) -> Operand:
        """Quantizes with a scale per row, block or square."""
        scaling, carrier = self.scaling, self.carrier
        fmt, tile = scaling.format_of(role), scaling.tile(role, dim)
        assert tile is not None
        # A tensor that is quantized along both dimensions records its amax once.
        history = None
        if self.record_amax and (dim == 1 or not both):
            history = buffers.amax
        if can_fuse_tiles(tensor, tile, scaling, carrier):
            return quantize_tiles_fused(tensor, role, scaling, dim, both, history, self.amax_group)
        if scaling.layout.two_levels:
            return quantize_nvfp4(
                tensor,
                role,
                dim,
                scaling,
                carrier,
                buffers.rounding,
                history,
                self.amax_group,
                both,
            )
        record = running_max(history, role)
        group = sharing_group(self.amax_group, role, tile)
        operand = quantize_tiles(
            tensor, tile, fmt, scaling, carrier or fmt.dtype, record=record, group=group
        )
        if record is not None:
            count_out_of_range(tensor, role, record, None, fmt)
        return operand

    @property
    def defers_wgrad_input(self) -> bool:
        """Whether the backward pass quantizes wgrad's operand of the input."""
        in_fp8 = not self.high_precision[FPROP] and not self.high_precision[WGRAD]
        return in_fp8 and (self.saves_input or self.token_shard is not None)

    @property
    def has_one_input_scale(self) -> bool:
        """Whether one scale covers the input, so that fprop and wgrad read the same values."""
        return self.scaling.tile(INPUT, 0) is None

    @property
    def saves_token_shard(self) -> bool:
        """Whether a pass saves this rank's tokens only and gathers the input again for wgrad."""
        if self.token_shard is None:
            return False
        # FP8 tokens are ready to be saved. Otherwise an input that is saved anyway needs no gather.
        return self.has_one_input_scale or not self.saves_input

    def deferred_input(
        self, input: Tensor, fprop_operand: Operand
    ) -> tuple[Operand | None, Tensor | None]:
        """Returns what to save for a deferred operand of the input: an operand or a tensor.

        Args:
            input: Input [T, in].
            fprop_operand: Its FP8 operand in fprop.
        """
        if not self.saves_token_shard:
            return None, input
        assert self.token_shard is not None
        if not self.has_one_input_scale:
            # Scales lie along the tokens, so the tokens of all ranks are quantized together.
            return None, self.token_shard.local_tokens(input, self.num_sequences)
        data, scale_inv, fmt = fprop_operand.data, fprop_operand.scale_inv, fprop_operand.fmt
        assert fmt is not None
        shard = self.token_shard.local_tokens(data, self.num_sequences)
        return Operand(shard.to(fmt.dtype), scale_inv, fmt), None

    def wgrad_input(
        self, operand: Operand | None, source: Tensor | None, buffers: PassBuffers
    ) -> Operand:
        """Returns wgrad's operand of the input from the result of `deferred_input`."""
        if operand is not None:
            assert self.token_shard is not None and operand.fmt is not None
            data = self.token_shard.gather_tokens(operand.data, self.num_sequences)
            return operand._replace(data=data.to(self.carrier or operand.fmt.dtype)).t()
        assert source is not None
        if self.saves_token_shard:
            assert self.token_shard is not None
            source = self.token_shard.gather_tokens(source, self.num_sequences)
        # The forward pass has recorded the amax.
        call = self._replace(record_amax=False)
        return call.operands(source, INPUT, [WGRAD], buffers)[WGRAD]


class WeightOperands(NamedTuple):
    """The quantized weight in fprop and dgrad.

    None for a GEMM in high precision. A weight that is stored in FP8 is fprop's operand already.
    """

    fprop: Operand | None
    dgrad: Operand | None

    def get(self, gemm: int) -> Operand | None:
        """Returns the operand of FPROP or DGRAD."""
        if gemm == FPROP:
            return self.fprop
        return self.dgrad


NO_OPERANDS = WeightOperands(None, None)


class _CacheKey(NamedTuple):
    """Identifies the weight and the configuration that cached operands were computed from.

    Attributes:
        weight: The weight. The reference keeps its address from being used again.
        version: torch's count of writes to the weight.
        address: Address of the weight's memory.
        carrier: See LinearCall.
        high_precision: See LinearCall.
        has_dgrad: Whether dgrad reads the weight.
    """

    weight: Tensor
    version: int
    address: int
    carrier: torch.dtype | None
    high_precision: GemmFlags
    has_dgrad: bool

    def covers(self, key: _CacheKey) -> bool:
        """Whether operands of this key serve a pass with `key`."""
        # Not the first field: `==` compares the elements of tensors.
        return self[1:5] == key[1:5] and self.has_dgrad >= key.has_dgrad


class WeightCache:
    """Operands of the weight of one layer, quantized once per optimizer step.

    `fit` enables the cache in `cached_weights`, for the passes of one step. No evaluation, optimizer
    or other code runs inside. A weight that was written to is quantized again. Compiled code cannot
    count writes; `FP8Linear.quantize_weight` fills the cache before it runs.

    In a custom training loop `fp8.step()` calls `end_loop_step`. Fused optimizers and writes to
    `weight.data` are not counted there. So the cache is used only after a first `fp8.step()`, which
    shows that the loop calls it; if the last step had several microbatches; and while `.grad` exists,
    as it does between microbatches.

    Attributes:
        enabled: Whether the next pass caches its operands.
        in_loop: Whether passes belong to a custom training loop.
        loop_passes: Forward passes of the loop in training since the last `end_loop_step`.
        operands: The cached operands.
    """

    enabled = False
    in_loop = False
    loop_passes = 0
    operands: WeightOperands | None = None
    _key: _CacheKey | None = None

    def enable(self, enabled: bool) -> None:
        """Enables or disables the cache, and empties it."""
        self.enabled = enabled
        self.operands = None
        self._key = None

    def end_loop_step(self, is_sharded: bool) -> None:
        """Empties the cache after an optimizer step of a custom training loop.

        Args:
            is_sharded: Whether FSDP2 shards the weight. It frees the weight between passes.
        """
        self.enable(self.loop_passes > 1 and not is_sharded)
        self.loop_passes = 0

    def read(
        self,
        call: LinearCall,
        weight: Tensor,
        stored: FP8Weight | None,
        buffers: PassBuffers,
        needs_dgrad: bool,
    ) -> WeightOperands:
        """Returns the cached operands, after quantizing the weight if it has changed.

        Args:
            call: The pass. Operands are cached only by passes that record amaxes.
            weight: The high-precision weight, or what receives the gradient of a stored one.
            stored: The FP8 weight, if it is stored in FP8. Only dgrad's operand is cached then.
            buffers: Receive the amax.
            needs_dgrad: Whether the backward pass multiplies by the weight.
        """
        if torch.compiler.is_compiling():
            return self._read_compiled(call)
        is_reusable = not self.in_loop or self._count_loop_pass(call, weight)
        if not self.enabled:
            return NO_OPERANDS
        values = weight
        if stored is not None:
            values = stored.data
        key = _CacheKey(
            values,
            values._version,
            values.data_ptr(),
            call.carrier,
            call.high_precision,
            needs_dgrad,
        )
        if is_reusable and self._key is not None and self._key.covers(key):
            return self.operands or NO_OPERANDS
        gemms = []
        if stored is None and not call.high_precision[FPROP]:
            gemms.append(FPROP)
        if needs_dgrad and not call.high_precision[DGRAD]:
            gemms.append(DGRAD)
        if not gemms or not call.record_amax or _in_selective_checkpoint():
            return NO_OPERANDS
        with torch.no_grad():
            if stored is None:
                operands = call.operands(weight.detach(), WEIGHT, gemms, buffers)
            else:
                operands = call.operands(stored, WEIGHT, gemms, buffers)
                # A view until now. The cache has a copy, because cuBLAS reads the weight of dgrad
                # transposed.
                view = operands[DGRAD]
                operands[DGRAD] = view._replace(data=view.data.contiguous())
        self.operands = WeightOperands(operands.get(FPROP), operands.get(DGRAD))
        self._key = key
        return self.operands

    def _read_compiled(self, call: LinearCall) -> WeightOperands:
        if not self.enabled or self.in_loop or self._key is None:
            return NO_OPERANDS
        if self._key.carrier != call.carrier or self._key.high_precision != call.high_precision:
            return NO_OPERANDS
        return self.operands or NO_OPERANDS

    def _count_loop_pass(self, call: LinearCall, weight: Tensor) -> bool:
        """Counts a pass of a custom loop and tells whether it may read the cache."""
        if not call.record_amax:
            return False
        # Activation checkpointing runs forward passes again inside the backward pass.
        if torch._C._current_graph_task_id() == -1:
            self.loop_passes += 1
        return weight.grad is not None or not weight.requires_grad

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached operands."""
        sizes = {}  # by address: both operands may share memory
        for operand in self.operands or NO_OPERANDS:
            if operand is None:
                continue
            for tensor in operand.tensors:
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    sizes[storage.data_ptr()] = storage.nbytes()
        return sum(sizes.values())

    def __getstate__(self) -> dict[str, Any]:
        # A copy of a layer has an empty cache.
        return {"in_loop": self.in_loop, "loop_passes": self.loop_passes}


def _in_selective_checkpoint() -> bool:
    """Tells whether a selective checkpoint compares the operations of this pass and a second one.

    The second pass would find the cache filled and run fewer operations.
    """
    modes = _get_current_dispatch_mode_stack()
    return any(
        isinstance(mode, _CachingTorchDispatchMode | _CachedTorchDispatchMode) for mode in modes
    )


@contextmanager
def cached_weights(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Quantizes each weight of `model` once for the passes of one optimizer step.

    Inside, write to weights only with torch's operations on the Parameter itself.
    """
    caches = []
    if enabled:
        for module in model.modules():
            cache = getattr(module, "weight_cache", None)
            if isinstance(cache, WeightCache):
                caches.append(cache)
    for cache in caches:
        cache.enable(True)
    try:
        yield
    finally:
        for cache in caches:
            cache.enable(False)
