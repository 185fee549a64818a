"""Backend protocol: capability rules without torch, and the code of the FP8 layers.

A backend is a package. It is a folder here, or another project provides it through an entry point
(fp8cfg/schema/backends.py). Its module `rules` implements `Rules` and imports neither torch nor its
library, so that `fp8cfg plan` works on any machine. Its module `backend` implements `Backend`. It
is imported when a model is converted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from fp8cfg.schema.backends import Capabilities, Hardware
from fp8cfg.schema.errors import NotFP8Error
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import StateDtypes
from fp8cfg.schema.violation import Violation

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    from fp8cfg.backends.gemm_plan import Kinds, PlannedLinear
    from fp8cfg.numerics import Region
    from fp8cfg.optim import LossScaler
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
    from fp8cfg.schema.training import Optim

__all__ = [
    "Backend",
    "BackendError",
    "Capabilities",
    "Hardware",
    "Observed",
    "PreparedModel",
    "Rules",
    "same",
]


@dataclass(repr=False)  # Fiddle prints it in errors. All weights would take pages.
class PreparedModel:
    """A model in the precision of its recipe, with master weights and its layout over ranks.

    Attributes:
        model: The model, with FP8 layers.
        masters: Float32 master weights, by parameter name.
        region: The autocast region of the FP8 layers.
        device: Device of the model.
        state: Storage dtypes of the recipe.
        columns: Storage dtypes of each parameter, by name and column.
        owner: ZeRO: the rank that keeps the optimizer state of each parameter, by name.
        shard: storage.shard, with auto resolved.
        fsdp2: Whether FSDP2 shards the parameters. The float32 shards are then their own masters.
        tensor_parallel: The parallel.tensor.TensorRank of this rank, or None.
        pipeline: The parallel.pipeline.PipelineRank of this rank, or None.
        same_samples: Process group of the ranks with the same layers and samples. Only set under
            fp8.tp_only_amax_red.
    """

    model: torch.nn.Module
    masters: dict[str, Tensor]
    region: Region
    device: torch.device
    state: StateDtypes
    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    owner: dict[str, int] = field(default_factory=dict)
    shard: str = "none"
    fsdp2: bool = False
    tensor_parallel: Any = None
    pipeline: Any = None
    same_samples: Any = None

    @property
    def mesh(self) -> Any:
        """Device mesh under tensor or pipeline parallelism, otherwise None."""
        # Both have the same mesh if both are set.
        place = self.pipeline or self.tensor_parallel
        return place.mesh if place is not None else None


Observed = dict[str, dict[str, "Kinds"]]
"""Operand kinds of each GEMM, by layer and GEMM name. None means that it did not run."""


class BackendError(NotFP8Error):
    """An object of a backend's library differs from the recipe. Exit code 3."""


def same(what: str, wanted: Mapping[str, object], built: Mapping[str, object]) -> None:
    """Checks the fields that were read back from an object of a library.

    Args:
        what: Name of the object, for the message.
        wanted: Fields from the recipe.
        built: Fields of the object.

    Raises:
        BackendError: With every field that differs or exists on one side only.
    """
    # A new version of a library may add or drop a field, so the keys must match too.
    absent = "nothing"
    lines = []
    for field_name in {**wanted, **built}:
        is_in_both = field_name in wanted and field_name in built
        if not is_in_both or wanted[field_name] != built[field_name]:
            lines.append(
                f"{what}.{field_name}: the recipe says {wanted.get(field_name, absent)}, the"
                f" library has {built.get(field_name, absent)}"
            )
    if lines:
        raise BackendError("; ".join(lines))


class Rules(Protocol):
    """Capabilities of a backend. They depend only on a recipe and a description of hardware."""

    def unavailable(self) -> str:
        """Returns why the backend cannot be used in this environment, or "".

        For example "torchao is not installed". It looks up installed versions and imports nothing.
        """

    def refusals(self, precision: Precision, hardware: Hardware) -> list[Violation]:
        """Returns a violation for each setting that the backend cannot run on the hardware.

        Does not check the environment or sharding. `fixes` of a violation are the values to use
        instead, unless the user set the key.

        Args:
            precision: The precision, with FP8 enabled.
            hardware: The hardware.
        """

    def product(self, precision: Precision, hardware: Hardware) -> tuple[str, str]:
        """Returns how the backend multiplies, and why.

        Returns:
            "emulate", or "scaled_mm" for FP8 GEMMs of the hardware, and the reason.
        """

    def misfit(self, fp8: FP8, in_features: int, out_features: int) -> str:
        """Returns why a linear layer of these sizes stays in high precision, or ""."""

    def tokens_multiple(self, fp8: FP8, product: str) -> int:
        """Returns the number that must divide the tokens of a forward pass."""

    def against_sharding(self, precision: Precision) -> list[Violation]:
        """Returns a violation for each unsupported value of storage.shard and storage.gather."""

    def against_environment(self, fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
        """Returns a violation for each variable that makes the library deviate from `fp8`."""

    def instead(self, precision: Precision) -> str:
        """Returns overrides for machines without the backend, such as "backend=native"."""


class Backend(Protocol):
    """Code of a backend. It keeps all state in the layers of converted models.

    State consists of plain tensors and has two forms (`fp8cfg.numerics.stored_state`):

    - `state_dict` of the model has the keys of the unconverted model, with dequantized weights.
    - `stored_state_dict` is the checkpoint form: weights as stored, and FP8 scales and histories.
      The last part of their names begins with `fp8_`.

    `load_state_dict` accepts both. Without FP8 state scales restart. Parameter names do not change.

    All backends have all functions. A function does nothing if the library does the work itself or
    has no such feature. `fp8cfg.schema.backends.Capabilities` has the rest.
    """

    def convert(
        self,
        model: nn.Module,
        fp8: FP8,
        plan: Sequence[PlannedLinear],
        region: Region,
        product: str,
        compute: torch.dtype = ...,
        fp8_gather: bool = False,
    ) -> None:
        """Replaces the linear layers of a model by FP8 layers, in place.

        A new layer keeps the Parameters, the training flag and the hooks of the old layer. Tied
        weights stay tied, and frozen weights stay frozen. FP8 is on inside `region` or in the
        backend's own context. The backend builds the library's recipe object from `fp8`, reads all
        fields back and compares them.

        Args:
            model: The model. Its root is not replaced.
            fp8: FP8 settings.
            plan: The planned layers. Layers without FP8 stay.
            region: The autocast region of the new layers.
            product: "emulate" or "scaled_mm", from `Rules.product`.
            compute: Dtype of activations.
            fp8_gather: Whether FSDP2 gathers weights in FP8, if the backend supports it.

        Raises:
            BackendError: The library's object differs from `fp8`.
        """

    def autocast(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context in which the layers of `model` multiply in FP8, if `enabled`.

        Otherwise they multiply in high precision.
        """

    def observed(self, model: nn.Module) -> Observed:
        """Returns the operand kinds of each GEMM of each converted layer.

        The record covers the time since `forget_observed`. It is written where the GEMM runs, so it
        shows layers that were converted but never ran in FP8. High-precision evaluation does not
        change it: HIGH_PRECISION means a training pass.
        """

    def forget_observed(self, model: nn.Module) -> None:
        """Clears the record of `observed`."""

    def record(self, model: nn.Module) -> dict[str, Any]:
        """Returns additional entries for coverage.json as JSON values."""

    def optimizer(
        self,
        prepared: PreparedModel,
        precision: Precision,
        optim: Optim,
        clip_grad: float,
        loss_scaler: LossScaler | None,
    ) -> MixedPrecisionOptimizer | None:
        """Returns the optimizer of a model if the capabilities have `own_state`, otherwise None.

        The optimizer steps all parameters and has the attributes of `MixedPrecisionOptimizer`.

        Args:
            prepared: The model.
            precision: The precision.
            optim: Optimizer settings.
            clip_grad: Largest norm of the gradients. 0 does not clip.
            loss_scaler: The fp16 loss scale.
        """

    def cache_weights(self, model: nn.Module, on: bool = True) -> None:
        """Makes layers quantize each weight once per optimizer step, in its first microbatch.

        Off by default, because it needs calls of `after_step`. Only for libraries that otherwise
        quantize in every microbatch.
        """

    def writers(self, model: nn.Module) -> Mapping[nn.Parameter, Callable[[Tensor], None]]:
        """Returns a function for each trained FP8 weight that quantizes a master into it."""

    def after_step(self, model: nn.Module, group: dist.ProcessGroup | None, step: int) -> None:
        """Rolls amax histories and updates scales after an optimizer step.

        Runs before weights are written, so that they are quantized with the new scales.

        Args:
            model: The model.
            group: Process group for the maximum of amaxes, or None for this rank only.
            step: Number of the optimizer step, from 1.

        With the capability `skips_on_device` it also takes `skip`, bool [] on the device. If it is
        true, the call acts like `after_skip`, and writers change no weight.
        """

    def after_skip(self, model: nn.Module) -> None:
        """Drops the amaxes of a step that was skipped because gradients were not finite."""

    def plain(self, layer: nn.Module) -> nn.Module | None:
        """Returns the plain module of a converted layer, or None for other modules.

        It is an nn.Linear with the same Parameters. A weight that is stored only in FP8 becomes a
        new float32 Parameter.
        """
