"""Backend protocol: rules that need no torch and are asked on any machine about any other, and the code that multiplies.

A backend is a package, a folder here or of another project by entry point (fp8cfg/schema/backends.py). Its `rules` has
the functions of `Rules` and imports neither torch nor its library; its `backend` has those of `Backend`, and is imported where a
model is converted.
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
    """A model in the recipe's precision, the float32 masters of its parameters by name, the autocast region of its FP8 layers, and
    the storage dtypes, and the columns of its parameters by name. `owner` gives the rank that keeps the state of each parameter, where that is
    sharded by whole tensors, and `shard` is storage.shard, resolved; under `fsdp2` parameters are float32 shards that torch's FSDP2
    gathers, and their own masters. `tensor_parallel` is this rank's place among those that share each matrix, a
    parallel.tensor.TensorRank, None where parameters are whole; `pipeline` that among those that share the layers, a
    parallel.pipeline.PipelineRank, None where this rank has all.
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
    # the process group of ranks that share layers and samples, where fp8.tp_only_amax_red asks for
    # it
    same_samples: Any = None

    @property
    def mesh(self) -> Any:
        """The device mesh, if ranks share matrices or layers; None if every rank has the whole model."""
        place = self.pipeline or self.tensor_parallel
        return place.mesh if place is not None else None


Observed = dict[str, dict[str, "Kinds"]]
"""What ran: layer name -> product -> kinds of its two operands, HIGH_PRECISION, or None where it did not run."""


class BackendError(NotFP8Error):
    """An object that was built for a library does not say what the recipe says. Exit code 3."""


def same(what: str, wanted: Mapping[str, object], built: Mapping[str, object]) -> None:
    """Raise BackendError where `built`, the fields read back from the library's object `what`, differ from `wanted`; one line for
    each field, including those that only one side has.
    """
    missing = "nothing"
    lines = [
        f"{what}.{k}: the recipe says {wanted.get(k, missing)}, the library has"
        f" {built.get(k, missing)}"
        for k in {**wanted, **built}
        if (k in wanted) != (k in built) or wanted[k] != built[k]
    ]
    if lines:
        raise BackendError("; ".join(lines))


class Rules(Protocol):
    """The capabilities of a backend, decided from the recipe and a description of the hardware, which need not be at hand."""

    def unavailable(self) -> str:
        """The reason why the backend cannot be used in this environment, such as "torchao is not installed"; empty where it can.
        Looks up packages and their versions, and imports none.
        """

    def refusals(self, precision: Precision, hardware: Hardware) -> list[Violation]:
        """Lists each setting of `precision`, in which FP8 is enabled, that the backend cannot run
        on `hardware`. Covers neither the environment nor sharding. `fixes` of a violation say
        which values change for the backend unless the user wrote them.
        """

    def product(self, precision: Precision, hardware: Hardware) -> tuple[str, str]:
        """How the backend multiplies what it does not refuse, "emulate" or "scaled_mm" (the hardware's FP8 products), and why."""

    def misfit(self, fp8: FP8, in_features: int, out_features: int) -> str:
        """The reason why a linear layer of that shape stays in high precision; empty where it can multiply in FP8."""

    def tokens_multiple(self, fp8: FP8, product: str) -> int:
        """The number that the tokens of a forward pass must be a multiple of."""

    def against_sharding(self, precision: Precision) -> list[Violation]:
        """Lists each setting of storage.shard and storage.gather that the backend does not support for `precision`."""

    def against_environment(self, fp8: FP8, environ: Mapping[str, str]) -> list[Violation]:
        """Lists each variable of `environ` that makes the library deviate from `fp8`."""

    def instead(self, precision: Precision) -> str:
        """The override words that run `precision` where the backend is not installed, such as "backend=native"."""


class Backend(Protocol):
    """The code of a backend. Converted models are found by their layers: a backend keeps no state outside of them.

    State is plain tensors alone, in two forms (`fp8cfg.numerics.stored_state`). The model's `state_dict` has the keys of the model
    before conversion, and usable weights: one that is stored in FP8 is dequantized. The stored form, `stored_state_dict`, is what
    training goes on from: weights as they are stored, FP8 scales and histories under names whose last part begins with `fp8_`.
    `load_state_dict` takes either; without FP8 state scales start anew. Names of parameters stay what they were.

    What a library does by itself, and what it has nothing for, is a function that does nothing: the callers ask all backends
    alike. `fp8cfg.schema.backends.Capabilities` says the rest.
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
        """Replace, in place, the linear layers of `model` (none of them its root) that `plan` has in FP8. `compute` is the dtype
        of activations, bfloat16 by default; `fp8_gather` lets FSDP2 gather weights in FP8, where capabilities have that.

        Each new layer has the Parameters of the old one, so that tied weights stay tied and frozen ones frozen, its training
        flag and its hooks; FP8 is on while `region` is, or in the backend's own context. The library's object that says how
        is built from `fp8`, read back field by field, and compared: raises BackendError where it differs.
        """

    def autocast(self, model: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        """A context inside which the converted layers of `model` multiply in FP8, or, not enabled, in high precision."""

    def observed(self, model: nn.Module) -> Observed:
        """The operand kinds of each product, for each converted layer by name, since the record was last cleared. They are
        recorded where the product is made, so that a layer that was swapped but never ran in FP8 shows. An evaluation in high
        precision leaves the record unchanged: a product recorded as high precision ran in a training pass.
        """

    def forget_observed(self, model: nn.Module) -> None:
        """Clear that record."""

    def record(self, model: nn.Module) -> dict[str, Any]:
        """The entries that a run adds to coverage.json for the converted `model` besides its products, as JSON values by key."""

    def optimizer(
        self,
        prepared: PreparedModel,
        precision: Precision,
        optim: Optim,
        clip_grad: float,
        loss_scaler: LossScaler | None,
    ) -> MixedPrecisionOptimizer | None:
        """The optimizer of the layers and of all other parameters, with the attributes of `MixedPrecisionOptimizer`, where
        capabilities have `own_state`; else None, and any optimizer trains them.
        """

    def cache_weights(self, model: nn.Module, on: bool = True) -> None:
        """Quantize each weight once per optimizer step, in its first microbatch, where the library would quantize it in every one.
        For a loop that calls `after_step`; off until this is called.
        """

    def writers(self, model: nn.Module) -> Mapping[nn.Parameter, Callable[[Tensor], None]]:
        """For each weight that is stored in FP8 only, the function that stores a float32 master in it."""

    def after_step(self, model: nn.Module, group: dist.ProcessGroup | None, step: int) -> None:
        """Called after optimizer step `step` (from 1) and before weights are written: rolls histories and moves scales, with
        amaxes reduced over `group` where it is given. One whose capabilities have `skips_on_device` takes `skip`, too, a bool []
        on the device: where that is true it does what `after_skip` does, and writers change no weight."""

    def after_skip(self, model: nn.Module) -> None:
        """Called instead where the step was skipped because gradients were not finite."""

    def plain(self, layer: nn.Module) -> nn.Module | None:
        """The module that a converted `layer` replaced: an nn.Linear with its own Parameters, or with a new one in float32 for a
        weight that is stored in FP8. None for any other module.
        """
