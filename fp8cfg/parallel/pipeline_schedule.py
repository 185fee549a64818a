"""Pipeline schedule: a step's microbatches through the stages, by torch.distributed.pipelining: 1F1B, or interleaved with more than
one chunk on a rank.

Shapes are static: where they are not given torch runs a pass over made-up numbers to learn them, which would write into amax
histories. The last stage returns its loss and no logits, so that nothing of a microbatch outlives its backward pass. Gradients
come in the order of the microbatches, as on one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

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
from fp8cfg.numerics.async_copies import sent
from fp8cfg.parallel.pipeline import PipelineRank, limited, wait_for

SENDING = 2
"""Sends that a stage of several on a rank has under way at once."""
FREES = hasattr(_RecvInfo, "allocate_buffer")
"""Whether torch itself has memory for what is under way alone, received or sent, as it has from 2.15 on."""


class _Chunk(nn.Module):
    """Some `layers` of `model`, with their numbers, from the embedding on if `first`, up to the loss if `last`."""

    def __init__(self, model: Transformer, layers: Iterable[int], first: bool, last: bool) -> None:
        super().__init__()
        self._whole = (model,)  # no submodule: its parameters are not all this chunk's
        self.layers = nn.ModuleDict({str(n): model.layers._modules[str(n)] for n in layers})
        self.first, self.last = first, last

    def forward(
        self, x: Tensor, targets: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Of tokens [B, T], or the residual stream before the first of the layers, the residual stream after the last, or the mean
        loss of `targets` [B, T], 0-d. Tokens, targets and `documents`, as those of Transformer.forward, are of whole sequences.
        """
        (model,) = self._whole
        context = getattr(model, "context", None)
        part = context.part if context is not None else lambda of_sequence: of_sequence
        positions = model.places(
            part(torch.arange(model.config.seq_length, device=x.device)), documents
        )
        if self.first:
            x = model.embed(part(x), positions)
        x = model.run_layers(
            x, positions, documents, [(int(n), layer) for n, layer in self.layers.items()]
        )
        if not self.last:
            return x
        assert targets is not None, "the last stage is given them"
        return model.head(x, part(targets))


class StageSync(Protocol):
    """What data-parallel ranks do around the passes of a rank's stages: they gather weights that are sharded, and sum gradients."""

    def begin(self) -> None:
        """Before the passes of a step, or of an evaluation."""

    def forward(self) -> AbstractContextManager[None]:
        """Around the forward pass of a microbatch through one stage."""

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Before the backward pass of a microbatch, the `last` of its stage or another, through `layers`, the `first` of the rank's
        or others."""

    def end(self) -> None:
        """After the passes of a step."""


class _Stage(PipelineStage):
    """A stage with memory for what it receives of the microbatches under way alone: torch's has it for all of a step (until
    2.15)."""

    _stream: Tensor | None = None
    sync: StageSync | None = None
    layers: tuple[list[nn.Module], bool] = [], False
    last = 0

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of a microbatch's residual stream, into new memory."""
        self._lend(self.args_recv_info, fwd_chunk_id)
        for info in () if FREES else _received(self.args_recv_info, fwd_chunk_id):
            info.buffer.requires_grad_(
                self.has_backward
            )  # torch 2.13 does so as it takes it, 2.11 where it makes the memory
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receives of its gradient, into new memory."""
        self._lend(self.grad_recv_info, bwd_chunk_id)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of a microbatch."""
        with nullcontext() if self.sync is None else self.sync.forward():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """The backward pass of a microbatch, after which both are given back."""
        if self.sync is not None:
            self.sync.backward(*self.layers, last=bwd_chunk_id == self.last)
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if (loss := kwargs.get("loss")) is not None:
            loss.detach_()  # the schedule keeps it, and with its graph what the stage received
        for infos in () if FREES else (self.args_recv_info, self.grad_recv_info):
            for info in _received(infos, bwd_chunk_id):
                info.buffer = self._stream

    def _lend(self, infos: dict[int, Any], chunk: int) -> None:
        if FREES:
            return
        if self._stream is None:
            for every in (self.args_recv_info, self.grad_recv_info):
                for info in (
                    info
                    for each in every
                    for info in _received(every, each)
                    if info.buffer is not None
                ):
                    self._stream = torch.empty_like(info.buffer, device="meta", requires_grad=False)
                    info.buffer = self._stream  # torch 2.11 clears the gradients of all
        for info in _received(infos, chunk):
            assert self._stream is not None, "there was memory for it"
            info.buffer = torch.empty_like(self._stream, device=self.device)


def _received(infos: dict[int, Any], chunk: int) -> list[Any]:
    """Those of a microbatch's inputs, or gradients, that come from another stage: those of the whole model have no source, and in
    torch 2.11 neither source nor memory."""
    return [info for info in infos.get(chunk, ()) if getattr(info, "source", None) is not None]


class _InterleavedStage(_Stage):
    """A stage of several on a rank, which lets go of what it has sent: torch's runtime keeps that for all of a step (until 2.15).

    It waits for older sends before it goes on. That is safe: torch puts each send and its receive into the orders of both ranks at
    once (schedules.py, _add_send_recv), so that all wait along one line.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sending: list[dist.Work] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """None where they are under way."""
        return self._send(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """None where they are under way."""
        return self._send(super().get_bwd_send_ops(bwd_chunk_id))

    def _send(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if FREES:
            return ops
        # as torch receives, batched in 2.11 and singly in 2.13: NCCL has another communicator for
        # single calls of a pair
        if ops:
            self._sending += schedules._batch_p2p(ops)
        self.finish(SENDING)
        return []

    def finish(self, but: int = 0) -> None:
        """Wait for all sends, but for the last ones."""
        assert self.group is not None, "Pipeline says which"
        while len(self._sending) > but:
            wait_for([self._sending.pop(0)], self.group)


class Pipeline:
    """The passes of one rank over `microbatches` microbatches of `samples` samples each, in stages that send one another tensors of
    `dtype`. All ranks of a pipeline make the same calls."""

    def __init__(
        self,
        model: Transformer,
        here: PipelineRank,
        microbatches: int,
        samples: int,
        dtype: torch.dtype,
        device: torch.device,
        sync: StageSync | None = None,
    ) -> None:
        config, chunks = model.config, len(here.chunks)
        split = getattr(model, "context", None)
        tokens = config.seq_length // (split.size if split is not None else 1)
        if model.tensor_parallel is not None and model.tensor_parallel.sequence:
            tokens //= model.tensor_parallel.size
        stream = torch.empty(
            samples, tokens, config.hidden_size, dtype=dtype, device="meta", requires_grad=True
        )
        batch = torch.empty(samples, config.seq_length, dtype=torch.long, device="meta")
        loss = torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)
        self._sync = sync
        self.samples, self._interleaved = samples, list[_InterleavedStage]()
        self.here, self._losses, cuts = here, list[Tensor](), here.size * chunks
        modules = {here.rank + i * here.size: layers for i, layers in enumerate(here.chunks)}
        parts = [
            _Chunk(model, layers, number == 0, number == cuts - 1)
            for number, layers in modules.items()
        ]

        def schedule(count: int) -> Any:
            stages: Any = [
                (_Stage if chunks == 1 else _InterleavedStage)(
                    part,
                    number,
                    cuts,
                    device,
                    input_args=stream if number else batch,
                    output_args=loss if number == cuts - 1 else stream,
                    group=here.process_group,
                )
                for number, part in zip(modules, parts, strict=True)
            ]
            for stage, part in zip(stages, parts, strict=True):
                stage.sync, stage.layers, stage.last = (
                    sync,
                    ([*part.layers.values()], part is parts[0]),
                    count - 1,
                )
            if chunks == 1:
                return Schedule1F1B(stages[0], count, self._weighed, scale_grads=False)
            self._interleaved += stages
            return ScheduleInterleaved1F1B(stages, count, self._weighed, scale_grads=False)

        # Without a backward pass outputs are kept until the end: an evaluation goes by as few microbatches as fill the stages.
        self.few = next(n for n in range(here.size, microbatches + 1) if microbatches % n == 0)
        self._training, self._evaluating = schedule(microbatches), schedule(self.few)

    def train(self, batch: Sequence[Tensor], weights: Sequence[float] | Tensor) -> list[Tensor]:
        """Forward and backward passes over the tensors of a batch, of which the microbatches are equal parts. Each mean loss is
        multiplied by its weight before its backward pass. Returns the losses as they were, on the last stage alone.
        """
        if not isinstance(weights, Tensor):
            weights = sent(torch.tensor(weights, dtype=torch.float32), batch[0].device)
        losses = self._run(self._training.step, batch, weights)
        if self._sync is not None:
            self._sync.end()
        return losses

    @torch.no_grad()
    def evaluate(self, batch: Sequence[Tensor]) -> list[Tensor]:
        """Forward passes alone: the mean loss of each microbatch, on the last stage."""
        ones = torch.ones(self.few, dtype=torch.float32, device=batch[0].device)
        parts = zip(*(torch.split(t, self.few * self.samples) for t in batch), strict=True)
        return [loss for part in parts for loss in self._run(self._evaluating.eval, part, ones)]

    def _run(self, run: Any, batch: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
        self._losses = []
        tokens, targets, *documents = batch
        inputs = (tokens,) if self.here.first else ()
        if self._sync is not None:
            self._sync.begin()
        last = {"targets": targets, "target": weights} if self.here.last else {}
        with limited(self.here.process_group):
            run(
                *inputs,
                **last,
                **dict(zip(("documents",), documents, strict=False)),
                return_outputs=False,
            )
        for stage in self._interleaved:
            stage.finish()
        return self._losses

    def _weighed(self, loss: Tensor, weight: Tensor) -> Tensor:
        """The loss of a microbatch, 0-d, times its weight [1]."""
        self._losses.append(loss.detach())
        return loss * weight[0]
