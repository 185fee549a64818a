"""Backends by name, shipped and from installed packages, and what each has, as plain data that rules and reports ask for.

A backend is a package with CAPABILITIES, a module or object `rules` (backends/protocol.py: Rules) and one `backend` (Backend). The
shipped ones are the folders of fp8cfg/backends; those of other packages are entry points of the group `fp8cfg.backends`, by the
backend's name. Loads no torch.
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
"""What was loaded: (backend, `rules` or `backend`) -> the object."""


@dataclass(frozen=True)
class Capabilities:
    """What a backend has, besides what its `rules` decide from a recipe and from hardware. The defaults are those of one that
    multiplies linear layers and does nothing else."""

    priority: int = 0
    """backend=auto tries those above 0, the highest first; one at 0 multiplies where it is named alone."""
    own_state: bool = False
    """Whether it holds the weights of its FP8 layers itself and steps them too: `Backend.optimizer` gives the optimizer, and
    storage columns concern those layers alone."""
    level: str | None = None
    """The opt_level that is in force where none is written."""
    level_pow2: bool = False
    """Whether the FP8 state of its levels is scaled by powers of two: the codec fp8_pow2."""
    adam_weight_decay: str = ""
    """Why optim.name=adam takes no weight decay where moments are not float32, and what to write; empty where it does."""
    compiles: bool = True
    """Whether torch.compile takes its layers."""
    statistics: bool = False
    """Whether it has log.fp8_stats_every_n_steps."""
    counts_values: bool = False
    """Whether its layers count the values that FP8 clips, and infinite ones, as they quantize (numerics/overflow_counts.py)."""
    moves_scales: bool = False
    """Whether `Backend.after_step` is what rolls delayed scaling's histories and moves its scales."""
    skips_on_device: bool = False
    """Whether `Backend.after_step` takes `skip`, so that no host has to wait to know whether a step was skipped."""
    zero_fp8_weights: bool = True
    """Whether ZeRO can hand round the weights that it holds in FP8."""
    fully_shards: bool = False
    """Whether FSDP2 keeps its layers' weights under storage.shard=zero1 and zero2 too, with the numbers of the unsharded run."""
    fp8_gather: Literal["", "cast", "params"] = ""
    """How FSDP2 gathers its weights in FP8, storage.gather=fp8: cast with one scale, as torchao does, or as fp8.params holds them;
    empty where it cannot."""
    tensor_parallel: bool = False
    """Whether its layers compute with parts of matrices that are split over tensor-parallel ranks."""
    pipeline_parallel: bool = False
    """Whether its layers train in the stages of a pipeline, each rank with scales of its own layers alone."""
    requantizes: bool = False
    """Whether its layers keep input and weight as they came, and quantize both again in the backward pass."""
    keeps_cast: bool = False
    """Whether its layers keep a weight that a forward pass cast or decoded until the backward pass, recomputed or not."""
    weight_workspace: bool = False
    """Whether its layers keep weights that they quantized for the other passes of a step (numerics/linear_operands.py)."""
    adapters: bool = False
    """Whether its layers take LoRA's adapters, over weights that are frozen."""
    norms: bool = False
    """Whether its norms take the place of the model's, as far as fp8.exclude lets them."""
    layer_modules: tuple[str, ...] = ()
    """Modules, or packages of them, whose nn.Modules can multiply in FP8."""
    distributions: tuple[str, ...] = ()
    """Distributions whose versions a run records, besides those that every run does."""


@functools.cache
def shipped() -> tuple[str, ...]:
    """The names of the backends of this version, in the order in which they are listed."""
    return tuple(importlib.import_module(GROUP).SHIPPED)


@functools.cache
def offered() -> dict[str, EntryPoint]:
    """The backends of installed packages: name -> entry point. One that cannot be a name, or has another's, is left out with a
    PackageWarning."""
    found: dict[str, EntryPoint] = {}
    for point in packages.offered(GROUP):
        if not NAME.fullmatch(point.name):
            packages.warn(point, "is no name of letters, digits and '_'")
        elif point.name in ("auto", *shipped(), *found):
            packages.warn(point, "has a name that is taken")
        else:
            found[point.name] = point
    return found


def names() -> tuple[str, ...]:
    """The name of every backend, the shipped ones first. No package is loaded."""
    return (*shipped(), *offered())


@functools.cache
def package(name: str) -> Any:
    """The package of backend `name`; None where there is none, or where that of an installed package cannot be loaded, with a
    PackageWarning."""
    if name in shipped():
        return importlib.import_module(f"{GROUP}.{name}")
    if name not in offered():
        return None
    found = packages.load(offered()[name])
    if found is not None and not isinstance(getattr(found, "CAPABILITIES", None), Capabilities):
        packages.warn(
            offered()[name],
            "has no CAPABILITIES, an object of fp8cfg.schema.backends.Capabilities",
        )
        return None
    return found


def part(name: str, which: str) -> Any:
    """`rules` or `backend` of the package of backend `name`, imported where it is a module. Raises ConfigError where there is no
    such backend, and where it is of an installed package and cannot be loaded."""
    if name not in names():
        raise ConfigError(f"backend={name}: not in this version; write backend=native")
    found = package(name)
    if found is None:
        raise ConfigError(
            f"backend={name}: {packages.described(offered()[name])} cannot be loaded; write"
            " backend=native"
        )
    if (name, which) not in _PARTS:
        try:
            _PARTS[name, which] = getattr(found, which, None) or importlib.import_module(
                f"{found.__name__}.{which}"
            )
        except Exception as e:
            if name in shipped():
                raise
            raise ConfigError(
                f"backend={name}: {packages.described(offered()[name])} has no {which} "
                f"({packages.reason(e)}); write backend=native"
            ) from None
    return _PARTS[name, which]


def loaded(name: str) -> bool:
    """Whether the code of backend `name` was imported."""
    home = f"{GROUP}.{name}" if name in shipped() else offered()[name].value
    return (name, "backend") in _PARTS or f"{home}.backend" in sys.modules


def capabilities(name: str) -> Capabilities:
    """What backend `name` has. `auto`, and a backend that cannot be loaded, has nothing."""
    found = package(name)
    return found.CAPABILITIES if found is not None else Capabilities()


def ordered() -> tuple[str, ...]:
    """The order in which backend=auto tries backends."""
    return tuple(
        sorted(
            (n for n in names() if capabilities(n).priority > 0),
            key=lambda n: -capabilities(n).priority,
        )
    )


def gathering() -> list[str]:
    """Those of them whose weights FSDP2 can gather in FP8."""
    return [name for name in ordered() if capabilities(name).fp8_gather]


HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capabilities."""
EMULATE = "write fp8.emulate=true to emulate"
"""What refusals of a GPU that cannot multiply offer."""


@dataclass(frozen=True)
class Hardware:
    """The hardware that a recipe is to run on: `device` is "cpu" or "cuda", `capability` the compute capability of a CUDA device,
    `cuda` the CUDA version that torch was built with, `cublaslt` and `cudnn` the versions of these libraries where they are known.
    """

    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None
    cublaslt: tuple[int, int, int] | None = None
    cudnn: tuple[int, int, int] | None = None


def dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "unknown"
