"""Stored gradients: quantized outside of `.grad`, from the backward pass until a step reads them.

On a GPU a gradient with a per-tensor scale needs three launches: its amax, the scale and the
values. Several gradients together need as many. Small gradients of a backward pass therefore wait
for the next ones.

A rank with a shard of a gradient stores the shard, once FSDP2 has reduced it. Per-tensor scales
need the largest amax over all ranks. Shards of a layer wait for each other, so that one collective
finds all their amaxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fp8cfg.numerics.codecs import Codec, EncodedTensor, chunk_ranges
from fp8cfg.optim.low_bit.adam_step import (
    REDUCTION_OPTIONS,
    can_compile,
    compiled_code,
    is_compiled_on,
    launch_groups,
    tensors_per_launch,
)
from fp8cfg.optim.low_bit.adam_update import ROW
from fp8cfg.optim.low_bit.columns import local

MAX_PENDING_ELEMENTS = 1 << 26
"""Largest number of waiting elements, 256 MiB in float32. Beyond it launches cost little."""


class StoredGradients:
    """The stored gradients of an optimizer.

    Args:
        names: Names of the parameters, for errors.
        key: Returns the random key for rounding the gradient of a parameter.

    Attributes:
        codecs: Codecs of the parameters with stored gradients.
        stored: Stored gradients.
        was_read: Whether a step has read them. New gradients then replace them.
        max_over_ranks: Elementwise maximum over the ranks that share parameters, or None.
        groups: Parameters whose gradients are stored together, for each parameter.
    """

    def __init__(
        self, names: Mapping[nn.Parameter, str], key: Callable[[nn.Parameter, str], Tensor]
    ) -> None:
        self.codecs: dict[nn.Parameter, Codec] = {}
        self.stored: dict[nn.Parameter, EncodedTensor] = {}
        # transformers.Trainer calls zero_grad of the model, which does not clear stored gradients.
        self.was_read = False
        self.max_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.groups: Mapping[nn.Parameter, Set[nn.Parameter]] = {}
        self._names = names
        self._key = key

    def get(self, parameter: nn.Parameter) -> EncodedTensor | None:
        """Returns the gradient for a step: `.grad`, or the stored one, or None."""
        if parameter.grad is not None:
            return (local(parameter.grad),)
        return self.stored.get(parameter)

    def store_all(self) -> None:
        """Stores each `.grad` that has a codec.

        Raises:
            RuntimeError: A gradient is stored already. Gradients are summed first and rounded once.
        """
        self.store([parameter for parameter in self.codecs if parameter.grad is not None])

    @torch.no_grad()
    def store(
        self, parameters: Sequence[nn.Parameter], accumulated: Container[nn.Parameter] = ()
    ) -> None:
        """Stores the `.grad` of parameters and clears it.

        Args:
            parameters: The parameters.
            accumulated: Parameters whose stored gradient is added first.

        Raises:
            RuntimeError: A gradient is stored already, and `accumulated` does not have its
                parameter.
        """
        if not parameters:
            return
        if self.was_read:
            self.clear()
        for parameter in parameters:
            if parameter not in self.stored:
                continue
            if parameter not in accumulated:
                raise RuntimeError(
                    f"the gradient of {self._names[parameter]} was stored before a backward pass;"
                    " zero_grad comes first"
                )
            # No name for the decoded gradient: it would keep its float32 memory while others are
            # encoded.
            self._local_gradient(parameter).add_(
                self.codecs[parameter].decode(self.stored[parameter])
            )
        scaled = [parameter for parameter in parameters if self.codecs[parameter].per_tensor]
        scales = self._full_tensor_scales(scaled)
        kinds = [self._launch_kind(parameter) for parameter in parameters]
        for group in launch_groups(kinds, tensors_per_launch(parameters[0].device)):
            self._store_group([parameters[i] for i in group], scales)

    def _full_tensor_scales(self, parameters: Sequence[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Returns the inverse scales [] of full gradients from this rank's shards.

        Empty if this rank has full gradients.
        """
        if self.max_over_ranks is None or not parameters:
            return {}
        shard_amaxes = []
        for parameter in parameters:
            shard = self._local_gradient(parameter)
            if shard.numel() == 0:  # this rank has no rows
                shard_amaxes.append(shard.new_zeros(()))
            else:
                shard_amaxes.append(torch.linalg.vector_norm(shard, math.inf))
        stacked = torch.stack(shard_amaxes)
        # The maximum of NaN and a number may be either, so NaN becomes infinity.
        stacked = torch.where(stacked.isfinite(), stacked, math.inf)
        amaxes = self.max_over_ranks(stacked).unbind()
        scales = torch.stack(
            [
                self.codecs[parameter].scale_inv(amax)
                for parameter, amax in zip(parameters, amaxes, strict=True)
            ]
        )
        # Padded to 16 bytes each: Inductor copies unaligned inputs.
        aligned = F.pad(scales[:, None], (0, 3))[:, 0]
        return dict(zip(parameters, aligned.unbind(), strict=True))

    @staticmethod
    def _local_gradient(parameter: nn.Parameter) -> Tensor:
        """Returns this rank's tensor of `.grad`."""
        assert parameter.grad is not None, "checked by the caller"
        return local(parameter.grad)

    def _launch_kind(self, parameter: nn.Parameter) -> Hashable:
        """Returns an equal key for gradients of the same launch."""
        codec = self.codecs[parameter]
        gradient = self._local_gradient(parameter)
        is_compiled = can_compile(gradient.numel(), codec.block or 1)
        if codec.per_tensor:
            return codec, gradient.dtype, is_compiled
        # Without a per-tensor scale each gradient needs one launch anyway.
        return parameter, gradient.dtype, is_compiled

    def _store_group(
        self, parameters: Sequence[nn.Parameter], scales: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """Stores gradients of one kind."""
        codec = self.codecs[parameters[0]]
        gradients = [self._local_gradient(parameter) for parameter in parameters]
        keys: list[Tensor | None] = [None] * len(parameters)
        if codec.rounding == "stochastic":
            keys = [self._key(parameter, "grad") for parameter in parameters]
        group_scales = [scales.get(parameter) for parameter in parameters]
        encoded = _encode(codec, gradients, keys, group_scales)
        for parameter, tensors in zip(parameters, encoded, strict=True):
            self.stored[parameter] = tensors
            parameter.grad = None

    @contextmanager
    def storing(self, add: bool) -> Iterator[None]:
        """Context for backward passes: stores gradients soon after they are complete.

        Args:
            add: Whether to add each gradient to the stored one, in every backward pass.
        """
        # Parameters that were stored in this context. With reentrant checkpointing a shared layer
        # gets its gradient in several parts, which are added.
        stored_here: set[nn.Parameter] = set()
        pending: dict[nn.Parameter, None] = {}

        def on_gradient(parameter: Tensor) -> None:
            """Stores pending gradients if there are enough of them, or if a group is complete."""
            assert isinstance(parameter, nn.Parameter), "only parameters have this hook"
            pending[parameter] = None
            if parameter in self.groups:
                is_complete = pending.keys() >= self.groups[parameter]
            else:
                num_elements = sum(waiting.numel() for waiting in pending)
                is_complete = (
                    add
                    or len(pending) >= tensors_per_launch(parameter.device)
                    or num_elements > MAX_PENDING_ELEMENTS
                )
            if is_complete or not self.codecs[parameter].per_tensor:
                store_pending()

        def store_pending() -> None:
            # A step, or zero_grad, inside of the context has stored or dropped pending gradients.
            parameters = [parameter for parameter in pending if parameter.grad is not None]
            self.store(parameters, self.codecs if add else stored_here)
            stored_here.update(pending)
            pending.clear()

        def copy_out_of_buffer(parameter: Tensor) -> None:
            """Copies a gradient out of a larger buffer."""
            if parameter.grad is None:
                return
            gradient = local(parameter.grad)
            if gradient.untyped_storage().nbytes() > gradient.nbytes:
                # FSDP2 reduces several gradients in one buffer. A view of a small gradient would
                # keep the memory of all of them.
                parameter.grad = parameter.grad.clone()

        handles = []
        # If no gradient is stored, the buffer is in use anyway.
        if self.codecs:
            for parameter in self._names:
                hook = on_gradient if parameter in self.codecs else copy_out_of_buffer
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
            store_pending()
        finally:
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Drops all stored gradients."""
        self.was_read = False
        self.stored.clear()


def _encode(
    codec: Codec,
    tensors: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[EncodedTensor]:
    """Encodes tensors of one float dtype: on a GPU together in compiled code, otherwise in pieces.

    Args:
        codec: The codec.
        tensors: The tensors.
        keys: Random keys for stochastic rounding.
        scales: Per-tensor scales of shards. None computes the scale.
    """
    if all(_is_compiled(codec, tensor) for tensor in tensors):
        options = REDUCTION_OPTIONS if codec.per_tensor else ()
        encode = compiled_code(_encode_several, codec, options=options)
        rows = [_in_blocks(tensor.contiguous(), codec) for tensor in tensors]
        encoded = []
        for tensor, (data, *scale) in zip(tensors, encode(rows, keys, scales), strict=True):
            encoded.append((data.view(tensor.shape), *scale))
        return encoded
    encoded = [codec.zeros(tensor.shape, tensor.device) for tensor in tensors]
    for tensor, stored, key, scale_inv in zip(tensors, encoded, keys, scales, strict=True):
        codec.store(tensor, stored, key, scale_inv)
    return encoded


def _encode_several(
    codec: Codec,
    tensors: Sequence[Tensor],
    keys: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
) -> list[EncodedTensor]:
    """Encodes tensors. Compiled."""
    return [
        codec.encode(tensor.float(), key, scale_inv)
        for tensor, key, scale_inv in zip(tensors, keys, scales, strict=True)
    ]


def _is_compiled(codec: Codec, data: Tensor) -> bool:
    """Returns whether compiled code reads or writes `data`, in the codec or before."""
    return is_compiled_on(data.device) and can_compile(data.numel(), codec.block or 1)


def _in_blocks(data: Tensor, codec: Codec) -> Tensor:
    """Returns `data` in the shape for compiled code: [blocks, block] or flat.

    In a flat tensor the compiler cannot tell which elements share a scale.
    """
    if codec.block:
        return data.view(-1, codec.block)
    return data.view(-1)


def norms(codecs: Sequence[Codec], stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """Returns the 2-norms of stored tensors, float32 [] each.

    On a GPU a few launches compute all of them. Compiled code first computes norms of rows for
    tensors with scales.
    """
    if not stored:
        return []
    rows: dict[int, Tensor] = {}
    scaled = []
    for i, (codec, tensors) in enumerate(zip(codecs, stored, strict=True)):
        data = tensors[0]
        if has_compiled_norm(codec, tensors):
            scaled.append(i)
        elif codec.scaling == "none" and data.is_cuda and data.numel():
            rows[i] = data
    kinds = [(codecs[i], stored[i][0].dtype, stored[i][0].numel() % ROW == 0) for i in scaled]
    for group in launch_groups(kinds, tensors_per_launch(stored[0][0].device)):
        indices = [scaled[i] for i in group]
        codec = codecs[indices[0]]
        compute_row_norms = compiled_code(row_norms, codec, options=REDUCTION_OPTIONS)
        blocks = [(_in_blocks(stored[i][0], codec), *stored[i][1:]) for i in indices]
        rows |= zip(indices, compute_row_norms(blocks), strict=True)
    # The norm of the norms of rows is the norm of the tensor.
    norm_of: dict[int, Tensor] = {}
    if rows:
        grouped_norms = torch._foreach_norm([*rows.values()], 2, torch.float32)
        norm_of = dict(zip(rows, grouped_norms, strict=True))
    return [
        norm_of[i] if i in norm_of else norm(codecs[i], tensors) for i, tensors in enumerate(stored)
    ]


def has_compiled_norm(codec: Codec, stored: EncodedTensor) -> bool:
    """Returns whether compiled code computes the row norms of a stored tensor."""
    return codec.scaling != "none" and _is_compiled(codec, stored[0])


def row_norms(codec: Codec, stored: Sequence[EncodedTensor]) -> list[Tensor]:
    """Returns the 2-norms of rows of ROW elements of each stored tensor, float32 [rows].

    A tensor that ROW does not divide is a single row.
    """
    decoded = [codec.decode(tensors) for tensors in stored]
    norms = []
    for values in decoded:
        rows = values.reshape(-1, ROW) if values.numel() % ROW == 0 else values.reshape(1, -1)
        norms.append(torch.linalg.vector_norm(rows, dim=1))
    return norms


def norm(codec: Codec, stored: EncodedTensor) -> Tensor:
    """Returns the 2-norm of a stored tensor, float32 []. Decodes a piece at a time."""
    data = stored[0]
    pieces = []
    for start, stop in chunk_ranges(data.numel(), data.device):
        part = codec.part(stored, start, stop)
        pieces.append(torch.linalg.vector_norm(codec.decode(part)))
    if not pieces:
        return torch.zeros((), dtype=torch.float32, device=data.device)
    total: Tensor = torch.linalg.vector_norm(torch.stack(pieces))
    return total
