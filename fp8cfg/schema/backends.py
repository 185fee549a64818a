"""Backends by name, and their capabilities as plain data. Loads no torch.

A backend is a package with CAPABILITIES and two modules or objects, `rules` and `backend`, see
backends/protocol.py. The shipped backends are folders of fp8cfg/backends. Other packages register
a backend as an entry point of the group `fp8cfg.backends`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Literal

from fp8cfg.schema import packages
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.safe_files import NAME

GROUP = "fp8cfg.backends"
_PARTS: dict[tuple[str, str], Any] = {}
"""Loaded objects by backend and by "rules" or "backend"."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend supports on any hardware. Its `rules` decide about recipes.

    The defaults describe a backend that only runs the GEMMs of linear layers.
    """

    priority: int = 0
    """backend=auto tries backends above 0, the highest first. 0 is only used by name."""
    own_state: bool = False
    """Whether it stores and updates the weights of its FP8 layers itself, with the optimizer of
    `Backend.optimizer`. Storage columns then apply to these layers only."""
    level: str | None = None
    """The opt_level in force if the recipe sets none."""
    level_pow2: bool = False
    """Whether the FP8 state of its levels has power-of-two scales (fp8_pow2)."""
    adam_weight_decay: str = ""
    """Why optim.name=adam supports no weight decay with moments other than float32, and what to
    write. Empty if it does."""
    compiles: bool = True
    """Whether torch.compile can compile its layers."""
    statistics: bool = False
    """Whether it supports log.fp8_stats_every_n_steps."""
    counts_values: bool = False
    """Whether its layers count clipped and infinite values (numerics/overflow_counts.py)."""
    moves_scales: bool = False
    """Whether `Backend.after_step` rolls the amax histories and updates the scales."""
    skips_on_device: bool = False
    """Whether `Backend.after_step` takes `skip`, so that the host does not wait for the GPU to learn
    whether a step was skipped."""
    zero_fp8_weights: bool = True
    """Whether ZeRO can broadcast its FP8 weights."""
    fully_shards: bool = False
    """Whether FSDP2 can store the weights of its layers under storage.shard=zero1 and zero2, with
    the same results as without sharding."""
    fp8_gather: Literal["", "cast", "params"] = ""
    """How storage.gather=fp8 gathers weights: "cast" with one scale, as torchao does, or as
    fp8.params stores them ("params"). Empty if it cannot."""
    tensor_parallel: bool = False
    """Whether its layers support tensor parallelism."""
    pipeline_parallel: bool = False
    """Whether its layers support pipeline stages, where a rank has only the scales of its layers."""
    requantizes: bool = False
    """Whether its layers save input and weight in high precision, and quantize them again in the
    backward pass."""
    keeps_cast: bool = False
    """Whether its layers save a weight that the forward pass cast or decoded until the backward
    pass."""
    weight_workspace: bool = False
    """Whether its layers cache quantized weights within a step (numerics/linear_operands.py)."""
    adapters: bool = False
    """Whether its layers support LoRA adapters on frozen weights."""
    norms: bool = False
    """Whether it replaces norms too, unless fp8.exclude names them."""
    layer_modules: tuple[str, ...] = ()
    """Modules or packages with nn.Modules that can run in FP8."""
    distributions: tuple[str, ...] = ()
    """Distributions whose versions a run records in addition to the common ones."""


@functools.cache
def shipped() -> tuple[str, ...]:
    """Returns the names of the shipped backends, in the order of reports."""
    # By name: an import statement would make the schema depend on the backends.
    return tuple(importlib.import_module(GROUP).SHIPPED)


@functools.cache
def offered() -> dict[str, EntryPoint]:
    """Returns the entry points of backends in installed packages, by name.

    Skips an entry point with an invalid or taken name, with a PackageWarning.
    """
    points: dict[str, EntryPoint] = {}
    for point in packages.offered(GROUP):
        if not NAME.fullmatch(point.name):
            # The name is a value of `backend` on the command line and part of a module path.
            packages.warn(point, "is not a name of letters, digits and '_'")
        elif point.name in ("auto", *shipped(), *points):
            packages.warn(point, "has the name of another backend")
        else:
            points[point.name] = point
    return points


def names() -> tuple[str, ...]:
    """Returns the names of all backends, the shipped ones first. Loads no package."""
    return (*shipped(), *offered())


@functools.cache
def package(name: str) -> Any:
    """Imports the package of a backend and returns it.

    Returns None for an unknown name. Returns None with a PackageWarning if the package is broken.
    """
    if name in shipped():
        return importlib.import_module(f"{GROUP}.{name}")
    if name not in offered():
        return None
    loaded = packages.load(offered()[name])
    # A broken third-party package must not end a run of another backend, so this only warns.
    if loaded is not None and not isinstance(getattr(loaded, "CAPABILITIES", None), Capabilities):
        packages.warn(
            offered()[name],
            "has no CAPABILITIES of class fp8cfg.schema.backends.Capabilities",
        )
        return None
    return loaded


def part(name: str, module: str) -> Any:
    """Returns `rules` or `backend` of a backend, and imports it if it is a module.

    They are separate so that a plan can load the rules without torch or the backend's library.

    Args:
        name: Name of the backend.
        module: "rules" or "backend".

    Raises:
        ConfigError: The backend is unknown, or an installed package is broken.
    """
    if name not in names():
        raise ConfigError(f"backend={name}: not in this version; set backend=native")
    backend_package = package(name)
    if backend_package is None:
        raise ConfigError(
            f"backend={name}: {packages.described(offered()[name])} cannot be loaded; set"
            " backend=native"
        )
    if (name, module) not in _PARTS:
        try:
            # An attribute is an object, or a module that the package imports. Otherwise it is a
            # module that is not loaded yet.
            loaded_part = getattr(backend_package, module, None)
            if loaded_part is None:
                loaded_part = importlib.import_module(f"{backend_package.__name__}.{module}")
        except Exception as error:
            # A bug of ours needs its traceback. For another package one line is enough.
            if name in shipped():
                raise
            raise ConfigError(
                f"backend={name}: {packages.described(offered()[name])} has no {module} "
                f"({packages.reason(error)}); set backend=native"
            ) from None
        _PARTS[name, module] = loaded_part
    return _PARTS[name, module]


def loaded(name: str) -> bool:
    """Returns whether the `backend` part of a backend has been imported."""
    if (name, "backend") in _PARTS:
        return True
    # A user may also have imported the module directly.
    package_name = f"{GROUP}.{name}" if name in shipped() else offered()[name].value
    return f"{package_name}.backend" in sys.modules


def capabilities(name: str) -> Capabilities:
    """Returns the capabilities of a backend, or the defaults for `auto` and a broken backend."""
    # `auto` is resolved on the hardware of the run. Until then rules assume a plain GEMM library.
    backend_package = package(name)
    if backend_package is None:
        return Capabilities()
    declared: Capabilities = backend_package.CAPABILITIES
    return declared


def ordered() -> tuple[str, ...]:
    """Returns the backends for backend=auto, in the order of their priority."""
    candidates = [name for name in names() if capabilities(name).priority > 0]
    return tuple(sorted(candidates, key=lambda name: -capabilities(name).priority))


def gathering() -> list[str]:
    """Returns the backends of `ordered` with an FP8 all-gather of weights under FSDP2."""
    return [name for name in ordered() if capabilities(name).fp8_gather]


# Compute capabilities
HOPPER = (9, 0)
BLACKWELL = (10, 0)
EMULATE = "set fp8.emulate=true to emulate"
"""Advice for GPUs without FP8 GEMMs."""


@dataclass(frozen=True)
class Hardware:
    """The hardware for a recipe, and the versions of its libraries.

    Attributes:
        device: "cpu" or "cuda".
        capability: Compute capability of a CUDA device.
        cuda: CUDA version of the torch build.
        cublaslt: Version of cuBLASLt, None if unknown.
        cudnn: Version of cuDNN, None if unknown.
    """

    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    cublaslt: tuple[int, int, int] | None = None
    cudnn: tuple[int, int, int] | None = None


def dotted(version: tuple[int, ...] | None) -> str:
    """Formats a version for a message: "12.9", or "unknown"."""
    if not version:
        return "unknown"
    return ".".join(str(number) for number in version)
