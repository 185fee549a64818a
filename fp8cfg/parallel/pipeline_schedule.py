"""Pipeline schedule: one step's microbatches through the stages, and the loss.

torch.distributed.pipelining runs the passes: 1F1B, or interleaved 1F1B with several chunks on a
rank. Gradients add up in the order of the microbatches, as on one rank.

Only the last stage reads the targets. It computes the mean loss of each microbatch
(`_Chunk.forward`). torch multiplies it by the microbatch's weight before its backward pass
(`Pipeline._weight_loss`). `Pipeline.train` returns the unweighted losses on the last pipeline rank
and an empty list on the others. The train step sums over all ranks, so every rank has the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    schedules,
)
from torch.distributed.pipelining.stage import _RecvInfo

from fp8cfg.models.transformer import Transformer
from fp8cfg.numerics.async_copies import copy_to_device
from fp8cfg.parallel.pipeline import PipelineRank, p2p_timeouts, wait_for_p2p

MAX_PENDING_SENDS = 2
"""Most pending sends of one chunk. A rank with several chunks waits for older ones."""
TORCH_FREES_BUFFERS = hasattr(_RecvInfo, "allocate_buffer")
"""Whether torch frees receive buffers and sent tensors during a step (2.15 or later).

Remove `_Stage._allocate_buffers` and `_InterleavedStage` when pyproject.toml requires 2.15.
"""


class StageSync(Protocol):
    """Data parallelism around the passes of a rank's stages, as `fsdp.FSDPStageSync`."""

    def begin(self) -> None:
        """Runs before the passes of a step or an evaluation."""

    def forward(self) -> AbstractContextManager[None]:
        """Runs around the forward pass of one microbatch through one stage."""

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Runs before the backward pass of one microbatch through one stage.

        Args:
            layers: The layers of the stage.
            first: Whether it is the first stage of this rank.
            last: Whether it is the last microbatch of the stage.
        """

    def end(self) -> None:
        """Runs after the passes of a training step."""


class Pipeline:
    """Runs the forward and backward passes of one rank.

    All ranks of a pipeline make the same calls.

    Args:
        model: The rank's part of the model.
        place: The rank's place in the pipeline.
        num_microbatches: Microbatches of a training step.
        microbatch_size: Samples in each microbatch.
        dtype: Dtype of the activations that stages send.
        device: Device of the model.
        sync: Data parallelism around the passes.
    """

    def __init__(
        self,
        model: Transformer,
        place: PipelineRank,
        num_microbatches: int,
        microbatch_size: int,
        dtype: torch.dtype,
        device: torch.device,
        sync: StageSync | None = None,
    ) -> None:
        self.place = place
        self._microbatch_size = microbatch_size
        self._sync = sync
        self._losses: list[Tensor] = []
        self._interleaved_stages: list[_InterleavedStage] = []
        # An evaluation has no backward pass, and torch keeps all outputs until its end. So it takes
        # as few microbatches at a time as keep all stages busy.
        counts = range(place.size, num_microbatches + 1)
        self._eval_microbatches = next(count for count in counts if num_microbatches % count == 0)

        num_stages = place.size * len(place.chunks)
        # Chunk i of rank r is stage r + i * ranks: a microbatch passes all ranks, then starts over.
        chunks: dict[int, _Chunk] = {}
        for i, layers in enumerate(place.chunks):
            number = place.rank + i * place.size
            is_last = number == num_stages - 1
            chunks[number] = _Chunk(model, layers, is_first=number == 0, is_last=is_last)

        shapes = _stage_shapes(model, microbatch_size, dtype)
        self._train_schedule = self._build_schedule(
            chunks, num_stages, num_microbatches, shapes, device
        )
        self._eval_schedule = self._build_schedule(
            chunks, num_stages, self._eval_microbatches, shapes, device
        )

    def _build_schedule(
        self,
        chunks: dict[int, _Chunk],
        num_stages: int,
        num_microbatches: int,
        shapes: _StageShapes,
        device: torch.device,
    ) -> Any:
        """Builds torch's schedule over the stages of this rank, for training or for evaluation."""
        stages: list[Any] = []
        stage_class = _Stage if len(chunks) == 1 else _InterleavedStage
        for number, chunk in chunks.items():
            stage = stage_class(
                chunk,
                number,
                num_stages,
                device,
                input_args=shapes.tokens if chunk.is_first else shapes.activation,
                output_args=shapes.loss if chunk.is_last else shapes.activation,
                group=self.place.process_group,
            )
            stage.sync = self._sync
            stage.layers = [*chunk.layers.values()]
            stage.is_first_of_rank = not stages
            stage.last_microbatch = num_microbatches - 1
            stages.append(stage)
        # scale_grads would divide gradients by the number of microbatches. Weights replace it.
        if len(stages) == 1:
            return Schedule1F1B(stages[0], num_microbatches, self._weight_loss, scale_grads=False)
        self._interleaved_stages += stages
        return ScheduleInterleaved1F1B(
            stages, num_microbatches, self._weight_loss, scale_grads=False
        )

    def train(self, batch: Sequence[Tensor], weights: Sequence[float] | Tensor) -> list[Tensor]:
        """Runs the forward and backward passes of a step.

        Args:
            batch: Tokens, targets and, optionally, documents of all microbatches, in equal parts.
            weights: The factor of each microbatch's loss, for its gradient.

        Returns:
            The mean loss of each microbatch, unweighted, on the last rank. Empty on the others.
        """
        if not isinstance(weights, Tensor):
            # torch splits only tensors into microbatches.
            weights = copy_to_device(torch.tensor(weights, dtype=torch.float32), batch[0].device)
        losses = self._run(self._train_schedule.step, batch, weights)
        if self._sync is not None:
            self._sync.end()
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Runs forward passes only. Takes and returns the same as `train`, without weights."""
        # The loss function needs weights. It records the losses before it applies them.
        weights = torch.ones(self._eval_microbatches, dtype=torch.float32, device=batch[0].device)
        samples = self._eval_microbatches * self._microbatch_size
        losses = []
        for part in zip(*(torch.split(tensor, samples) for tensor in batch), strict=True):
            losses += self._run(self._eval_schedule.eval, part, weights)
        return losses

    def _run(
        self, run_schedule: Callable[..., Any], batch: Sequence[Tensor], weights: Tensor
    ) -> list[Tensor]:
        """Runs a schedule over a batch. Returns the losses on the last rank, otherwise []."""
        self._losses = []
        tokens, targets, *documents = batch
        if self._sync is not None:
            self._sync.begin()
        # torch splits all of these into microbatches. Positional arguments go to the first stage,
        # keyword arguments to the forward pass of each stage of this rank.
        args: tuple[Tensor, ...] = ()
        kwargs: dict[str, Tensor] = {}
        if self.place.is_first:
            args = (tokens,)
        if self.place.is_last:
            kwargs["targets"] = targets
            # What torch calls `target` is the second argument of its loss function, _weight_loss.
            kwargs["target"] = weights
        if documents:
            (kwargs["documents"],) = documents
        with p2p_timeouts(self.place.process_group):
            run_schedule(*args, **kwargs, return_outputs=False)
        for stage in self._interleaved_stages:
            stage.wait_for_sends()
        return self._losses

    def _weight_loss(self, loss: Tensor, weight: Tensor) -> Tensor:
        """Records the loss of a microbatch, [], and returns it times its weight, [1].

        It is torch's loss function: the last stage calls it with its output after each forward
        pass, in the order of the microbatches.
        """
        self._losses.append(loss.detach())
        return loss * weight[0]


class _StageShapes(NamedTuple):
    """Inputs and outputs of stages, as tensors on the meta device."""

    tokens: Tensor
    activation: Tensor
    loss: Tensor


def _stage_shapes(model: Transformer, microbatch_size: int, dtype: torch.dtype) -> _StageShapes:
    """Returns the static shapes.

    Without them torch runs a pass with random numbers, and layers would record its amaxes.
    """
    config = model.config
    num_tokens = config.seq_length
    context = getattr(model, "context", None)
    if context is not None:
        num_tokens //= context.size
    # Under sequence parallelism tensor ranks have different tokens between layers.
    if model.tensor_parallel is not None and model.tensor_parallel.sequence:
        num_tokens //= model.tensor_parallel.size
    activation_shape = (microbatch_size, num_tokens, config.hidden_size)
    # Stages get whole sequences of tokens and take their own part.
    tokens_shape = (microbatch_size, config.seq_length)
    return _StageShapes(
        tokens=torch.empty(tokens_shape, dtype=torch.long, device="meta"),
        activation=torch.empty(activation_shape, dtype=dtype, device="meta", requires_grad=True),
        loss=torch.empty((), dtype=torch.float32, device="meta", requires_grad=True),
    )


class _Chunk(nn.Module):
    """Module of one stage: some layers, with the embedding or the loss at the ends."""

    def __init__(
        self, model: Transformer, layers: Iterable[int], is_first: bool, is_last: bool
    ) -> None:
        super().__init__()
        # In a tuple, because nn.Module would register a submodule, with parameters of other chunks.
        self._model = (model,)
        numbers = [str(number) for number in layers]
        self.layers = nn.ModuleDict({number: model.layers._modules[number] for number in numbers})
        self.is_first = is_first
        self.is_last = is_last

    def forward(
        self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Runs the stage.

        Args:
            x: Tokens [B, T] in the first stage, otherwise the residual stream from the previous
                one.
            targets: Targets [B, T]. Needed by the last stage.
            documents: See `Transformer.forward`, [B, T].

        Returns:
            The mean loss, [], in the last stage, otherwise the residual stream after the layers.
            The last stage returns no logits, to free the memory of a microbatch after its backward
            pass.
        """
        (model,) = self._model
        positions = torch.arange(model.config.seq_length, device=x.device)
        context = getattr(model, "context", None)
        if context is not None:  # each context rank computes its part of every sequence
            positions = context.part(positions)
        positions = model.token_positions(positions, documents)
        if self.is_first:
            if context is not None:
                x = context.part(x)
            x = model.embed(x, positions)
        layers = [(int(number), layer) for number, layer in self.layers.items()]
        x = model.run_layers(x, positions, documents, layers)
        if not self.is_last:
            return x
        assert targets is not None, "Pipeline gives targets to the last rank"
        if context is not None:
            targets = context.part(targets)
        return model.head(x, targets)


class _Stage(PipelineStage):
    """A stage with receive buffers only for microbatches that are under way.

    torch allocates buffers for all microbatches of a step (until 2.15).
    """

    sync: StageSync | None = None
    layers: Sequence[nn.Module] = ()
    is_first_of_rank = False
    last_microbatch = 0
    _freed_buffer: Tensor | None = None  # on the meta device, with the shape of each buffer

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the receives of a microbatch's activations, into new buffers."""
        if not TORCH_FREES_BUFFERS:
            self._allocate_buffers(self.args_recv_info, fwd_chunk_id)
            for info in _received_infos(self.args_recv_info, fwd_chunk_id):
                # torch 2.11 does it when it allocates the buffer, 2.13 when it reads it.
                info.buffer.requires_grad_(self.has_backward)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Returns the receives of their gradients, into new buffers."""
        if not TORCH_FREES_BUFFERS:
            self._allocate_buffers(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward pass of a microbatch."""
        context = nullcontext() if self.sync is None else self.sync.forward()
        with context:
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Runs the backward pass of a microbatch and frees its buffers."""
        if self.sync is not None:
            is_last = bwd_chunk_id == self.last_microbatch
            self.sync.backward(self.layers, self.is_first_of_rank, is_last)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        loss = kwargs.get("loss")
        if loss is not None:
            # The schedule keeps the loss, and with its graph the received activations.
            loss.detach_()
        if not TORCH_FREES_BUFFERS:
            for infos in (self.args_recv_info, self.grad_recv_info):
                for info in _received_infos(infos, bwd_chunk_id):
                    info.buffer = self._freed_buffer

    def _allocate_buffers(self, infos: dict[int, Any], microbatch: int) -> None:
        """Allocates the receive buffers of a microbatch."""
        # torch has allocated buffers for all microbatches when the schedule began.
        if self._freed_buffer is None:
            self._free_all_buffers()
        for info in _received_infos(infos, microbatch):
            assert self._freed_buffer is not None, "torch has allocated buffers"
            info.buffer = torch.empty_like(self._freed_buffer, device=self.device)

    def _free_all_buffers(self) -> None:
        """Frees torch's buffers before the first receive of a schedule."""
        for infos in (self.args_recv_info, self.grad_recv_info):
            for microbatch in infos:
                for info in _received_infos(infos, microbatch):
                    if info.buffer is None:
                        continue
                    self._freed_buffer = torch.empty_like(
                        info.buffer, device="meta", requires_grad=False
                    )
                    # Not None: torch 2.11 clears the gradients of all buffers.
                    info.buffer = self._freed_buffer


def _received_infos(infos: dict[int, Any], microbatch: int) -> list[Any]:
    """Returns the inputs or gradients of a microbatch that come from another stage.

    Tokens have no source, and in torch 2.11 no such attribute.
    """
    return [info for info in infos.get(microbatch, ()) if getattr(info, "source", None) is not None]


class _InterleavedStage(_Stage):
    """A stage of a rank with several chunks, which frees tensors when they are sent.

    torch's runtime for several chunks keeps all sent tensors until the end of a step (until 2.15).

    The stage waits for older sends before it continues. That can't deadlock: torch puts each send
    and its receive into the orders of both ranks at once (schedules.py, _add_send_recv), so all
    ranks wait in the same order.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pending_sends: list[dist.Work] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends a microbatch's activations. Returns no operations for torch to send."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Sends a microbatch's gradients. Returns no operations for torch to send."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        """Sends tensors now and waits for older sends. Returns no operations for torch."""
        if TORCH_FREES_BUFFERS:
            return ops
        if ops:
            # The receiver uses the same function of torch: it batches in 2.11 and doesn't in
            # 2.13. NCCL has one communicator for batched calls and another for single ones.
            self._pending_sends += schedules._batch_p2p(ops)
        self.wait_for_sends(MAX_PENDING_SENDS)
        return []

    def wait_for_sends(self, max_pending: int = 0) -> None:
        """Waits until at most `max_pending` sends are under way."""
        assert self.group is not None, "Pipeline sets it"
        while len(self._pending_sends) > max_pending:
            wait_for_p2p([self._pending_sends.pop(0)], self.group)
