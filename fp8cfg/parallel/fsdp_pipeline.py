"""FSDP2 of pipeline stages: when a rank gathers the weights of its layers and of what is in none, and when it sums gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import nn
from torch.distributed.fsdp import FSDPModule

from fp8cfg.parallel.fsdp import REDUCED_IN_EACH_PASS, let_go, send_in, sums, widen_gradients


class FullyShardedStages:
    """The shards of a pipeline rank's parameters: embedding, last norm and output layer are gathered before the passes of a step,
    for no pass goes through the whole model, and summed in the last one of their chunk, under zero2 and fsdp in each: later passes
    bring them no gradients, and FSDP2 then sums nothing (torch 2.13). Layers are gathered and summed as without a pipeline.
    """

    def __init__(self, model: nn.Module, shard: str, chunks: Sequence[Sequence[nn.Module]]) -> None:
        assert isinstance(model, FSDPModule)
        self.model, self.each, self.shard = model, shard in REDUCED_IN_EACH_PASS, shard
        self.outer = chunks[-1 if model.output_layer is not None else 0]
        for layers in chunks:
            for before, layer in pairwise((model, *layers)):
                assert isinstance(layer, FSDPModule) and isinstance(before, FSDPModule)
                # Torch 2.13 prefetches what the last forward pass had before the layer: another microbatch's, or chunk's.
                layer.set_modules_to_backward_prefetch([before])
        # What the first forward pass of the root does, before which its layers would each be roots (torch 2.13).
        model._get_fsdp_state()._lazy_init()

    def begin(self) -> None:
        """Gather what no layer gathers."""
        self.model.set_reshard_after_backward(
            False, recurse=self.shard != "fsdp"
        )  # `drop` says otherwise
        self.model.unshard()
        for hook in self.model._forward_pre_hooks.values():
            if isinstance(hook, partial) and hook.func in (widen_gradients, send_in):
                hook(self.model, ())

    def backward(self, layers: Sequence[nn.Module], first: bool, last: bool) -> None:
        """Whether the next backward pass sums gradients: of all microbatches under zero2 and fsdp, else in the last of `layers`,
        those of embedding and output layer too where these are in the same chunk."""
        for layer in layers:
            assert isinstance(layer, FSDPModule)
            sums(layer, last, self.each)
        sums(self.model, last and layers[0] is self.outer[0], self.each, recurse=False)
        self.model.set_is_last_backward(
            (first and last) or self.each
        )  # which ends with nothing on its way

    def end(self) -> None:
        """Free what was gathered."""
        let_go(self.model)
