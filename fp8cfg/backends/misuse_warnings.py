"""Warnings for custom training loops: calls that can be omitted without an error, such as `fp8.step()` and gradient reduction."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

_SUMMING = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")
"""Wrappers that sum gradients by themselves."""


class StepWatch:
    """Detects that weights are updated while `fp8.step()` is never called, which leaves delayed scaling with the scales of its
    first pass.

    An update shows in a weight's version, or, with torch's fused optimizers, which leave that as it is, in a gradient that was
    there and is gone. Microbatches leave both."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = [w for w in weights if w.requires_grad]
        self.first: list[int] | None = None
        self.backward = False
        self.done = not self.weights

    def entered(self, steps: int) -> None:
        """Called where a training pass begins, after `steps` calls of `fp8.step()`. Warns once."""
        if self.done or steps:
            self.done = True
        elif self.first is None:
            self.first = self._versions()
            self.handle = self.weights[0].register_post_accumulate_grad_hook(self._note)
        elif self.backward and (self._versions() != self.first or self.weights[0].grad is None):
            self.done = True
            warnings.warn(
                "weights were updated and fp8.step() was never called, which rolls histories and"
                " moves scales under fp8.scaling=delayed; call it after each optimizer step",
                RuntimeWarning,
                stacklevel=4,
            )

    def _versions(self) -> list[int]:
        return [w._version for w in self.weights]

    def _note(self, weight: Tensor) -> None:
        self.backward = True
        self.handle.remove()


def warn_of_sums(model: nn.Module) -> None:
    """Warn where several ranks step `model` with gradients that were not reduced over the ranks."""
    import torch.distributed as dist

    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if ranks > 1 and not _is_summed(model):
        warnings.warn(
            f"the gradients of this step were not summed over the {ranks} ranks, so that each"
            " trains a model of its own; call job.sum_gradients() before the optimizer's step",
            RuntimeWarning,
            stacklevel=5,
        )


def _is_summed(model: nn.Module) -> bool:
    """Whether a wrapper around `model`, or around one of its layers, reduces gradients. A module does not know its wrappers, so
    all objects of the process are searched, once.
    """
    import gc

    from torch import nn

    if any(
        hasattr(module, "set_requires_gradient_sync") for module in model.modules()
    ):  # FSDP2's fully_shard
        return True
    modules = [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]
    wrappers = [
        module
        for module in modules
        if any(base.__name__ in _SUMMING for base in type(module).__mro__)
    ]
    return any(module is model for wrapper in wrappers for module in wrapper.modules())
