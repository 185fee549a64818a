"""Backend choice: the backend for a recipe on given hardware, or an error with every reason."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from fp8cfg.backends import REFERENCE, registry
from fp8cfg.backends.native.rules import ALIGNMENT, BLOCK_CUDA, FP8_CAPABILITY
from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.storage import with_resolved_params
from fp8cfg.schema.training import Strategy
from fp8cfg.schema.violation import Violation

__all__ = [
    "ALIGNMENT",
    "BLOCK_CUDA",
    "FP8_CAPABILITY",
    "Choice",
    "Hardware",
    "backend_violations",
    "choose",
    "backend_layout_violations",
]


@dataclass(frozen=True)
class Choice:
    """The backend of a recipe.

    Attributes:
        backend: Name of the backend.
        product: "emulate", "scaled_mm" or "none".
        why: Reason for the choice.
        passed_over: Backends that backend=auto would prefer, each with a reason against it.
    """

    backend: str
    product: str
    why: str
    passed_over: tuple[str, ...] = ()


def choose(
    precision: Precision,
    hardware: Hardware,
    *,
    statistics: int = 0,
    here: bool = True,
    strategy: Strategy | None = None,
    adapters: bool = False,
) -> Choice:
    """Chooses the backend for a precision.

    It never lowers the precision. Unsupported settings are errors, and the message names a
    supported setting. backend=auto takes the first supported backend of registry.preference(). For
    emulation it prefers the native backend, because its emulation is exact and supports every key.

    Args:
        precision: The precision.
        hardware: Hardware of the run.
        statistics: log.fp8_stats_every_n_steps of the recipe.
        here: Whether `hardware` is this machine. Otherwise a named backend need not be installed.
        strategy: trainer.strategy, or None if each rank has the whole model.
        adapters: lora.enabled of the recipe.

    Raises:
        ConfigError: With every reason against the backend.
    """
    name = precision.backend
    if name != "auto" and not registry.exists(name):
        raise ConfigError(backend_violations(name, precision, hardware))
    if not precision.fp8.enabled:
        return Choice(REFERENCE, "none", "no FP8 asked for")
    if name != "auto":
        refuse_if(
            backend_violations(name, precision, hardware, statistics, here, strategy, adapters)
        )
        return _choice_of(name, precision, hardware, "asked for")
    # Only the native backend emulates every scaling exactly, so it goes first then.
    emulates = hardware.device == "cpu" or precision.fp8.emulate
    order = registry.preference()
    others = tuple(name for name in order if name != REFERENCE)
    if emulates:
        order = (REFERENCE, *others)
    passed_over: list[str] = []
    for name in order:
        reasons = backend_violations(
            name, precision, hardware, statistics, strategy=strategy, adapters=adapters
        )
        if reasons:
            # The first reason is enough here. An error lists all of them.
            first_reason = str(reasons[0]).removeprefix(f"backend={name}: ")
            problem, _, _ = first_reason.partition("; ")
            passed_over.append(f"{name}: {problem}")
            continue
        if emulates and name == REFERENCE:
            passed_over.append(f"{', '.join(others)}: {REFERENCE} goes first where FP8 is emulated")
        return _choice_of(name, precision, hardware, "auto", tuple(passed_over))
    raise ConfigError(
        backend_violations(REFERENCE, precision, hardware)
        + _uninstalled_alternatives(precision, hardware)
    )


def backend_violations(
    name: str,
    precision: Precision,
    hardware: Hardware,
    statistics: int = 0,
    here: bool = True,
    strategy: Strategy | None = None,
    adapters: bool = False,
) -> list[Violation]:
    """Returns every reason against a backend for a precision with FP8.

    Args:
        name: Name of the backend.

    See `choose` for the other arguments.
    """
    problem = registry.problem(name)
    if problem:
        return [Violation(f"backend={name}", problem, source="backend")]
    rules = registry.rules(name)
    capabilities = registry.capabilities(name)
    layout = strategy or Strategy()
    reasons: list[Violation] = []
    missing = rules.unavailable() if here else ""
    if missing:
        reasons.append(Violation(f"backend={name}", f"{missing}; set {rules.instead(precision)}"))
    if statistics and not capabilities.statistics:
        reasons.append(
            Violation(
                f"log.fp8_stats_every_n_steps={statistics}",
                f"backend={name} has no such statistics; set backend=native, or remove it",
            )
        )
    reasons += backend_layout_violations(
        name, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    )
    replicas = layout.data_parallel_replicate_size
    if replicas > 1 and not capabilities.fully_shards:
        reasons.append(
            Violation(
                f"backend={name}",
                "FSDP2 cannot shard its layers, as"
                f" data_parallel_replicate_size={replicas} needs; set backend={REFERENCE}",
            )
        )
    if precision.fp8.keep_transpose_cache and not capabilities.weight_workspace:
        reasons.append(
            Violation(
                "fp8.keep_transpose_cache=true",
                f"has no effect with backend={name}, which manages its own copies; remove it or set"
                f" backend={REFERENCE}",
            )
        )
    if adapters and not capabilities.adapters:
        reasons.append(
            Violation(
                f"backend={name}",
                "its layers do not support adapters (lora.enabled=true); set backend=native",
            )
        )
    reasons += rules.against_sharding(precision)
    if here:
        reasons += rules.against_environment(precision.fp8, os.environ)
    # The rules of a backend see fp8.params as it will run, also if storage implies it.
    reasons += rules.refusals(with_resolved_params(precision), hardware)
    violations = []
    for reason in reasons:
        if reason.source != "layout":
            reason = replace(reason, source="backend")
        violations.append(reason)
    return violations


def backend_layout_violations(name: str, tensor: int = 1, stages: int = 1) -> list[Violation]:
    """Returns a violation if a backend does not support tensor or pipeline parallelism.

    Args:
        name: Name of the backend. "auto" has no violations.
        tensor: Tensor-parallel ranks.
        stages: Pipeline stages.
    """
    if name == "auto" or not registry.exists(name):
        return []
    capabilities = registry.capabilities(name)
    problems = []
    if tensor > 1 and not capabilities.tensor_parallel:
        problems.append(f"its layers do not support tensor_model_parallel_size={tensor}")
    if stages > 1 and not capabilities.pipeline_parallel:
        problems.append(f"its scales do not support pipeline_model_parallel_size={stages}")
    return [
        Violation(f"backend={name}", f"{problem}; set backend={REFERENCE}", source="layout")
        for problem in problems
    ]


def _choice_of(
    name: str,
    precision: Precision,
    hardware: Hardware,
    reason: str,
    passed_over: tuple[str, ...] = (),
) -> Choice:
    """Returns the choice of backend `name`, with how it multiplies on `hardware`."""
    product, product_reason = registry.rules(name).product(precision, hardware)
    return Choice(name, product, f"{reason}; {product_reason}", passed_over)


def _uninstalled_alternatives(precision: Precision, hardware: Hardware) -> list[Violation]:
    """Returns a hint for each backend that only needs to be installed."""
    violations = []
    for name in registry.preference():
        rules = registry.rules(name)
        missing = rules.unavailable()
        if missing and not rules.refusals(with_resolved_params(precision), hardware):
            violations.append(
                Violation("backend=auto", f"{name} could run this, but {missing}", source="backend")
            )
    return violations
