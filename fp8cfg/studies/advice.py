"""Advice on precision: which scaling a model can train in, and which layers must stay out of it.

    advice = fp8cfg.advise(recipe)                      # trains a short run in bf16
    print(advice); recipe = advice.recipe

    advice = fp8cfg.advise_model(model, train_step)     # your model and training loop
    fp8 = fp8cfg.convert_model(model, advice.recipe)

The operands of every linear layer are quantized on the side (operand_probe.py, operand_errors.py).
advice_rules.py turns their errors into overrides.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import registry
from fp8cfg.backends.any_model.eligibility import beside, layer_lists, plan_model
from fp8cfg.backends.any_model.linear_like import CONV1D, layout_of
from fp8cfg.backends.choice import BLOCK_CUDA, Hardware
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.building.builder import build
from fp8cfg.checkpoint.saver import Diverged
from fp8cfg.composition import precedence
from fp8cfg.composition.config_groups import Library
from fp8cfg.conversion import convert
from fp8cfg.parallel.process_group import World, current
from fp8cfg.planning.coverage import Coverage, coverage_of_layers, planned_coverage
from fp8cfg.planning.hardware import find_gpu, find_hardware
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.planning.preflight import check_layout
from fp8cfg.schema.errors import ConfigError, expect, refuse_if
from fp8cfg.schema.recipe import Recipe
from fp8cfg.studies.advice_report import Advice, Cost
from fp8cfg.studies.advice_rules import (
    LayerError,
    Remedy,
    choose_remedy,
    find_remedy,
    layer_errors,
)
from fp8cfg.studies.advice_scalings import Choice, Cover, list_choices
from fp8cfg.studies.operand_errors import healthy_errors
from fp8cfg.studies.operand_probe import OperandProbe
from fp8cfg.training.data import run_data
from fp8cfg.training.step import train_step

STEPS = 20
EVERY = 5
Say = Callable[[str], None]
Layers = dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]
"""Modules by name, with the function that returns their weight as [out, in]."""


def advise(
    recipe: Recipe,
    steps: int = STEPS,
    every: int = EVERY,
    gpu: str | None = None,
    config_dir: str | Path | None = None,
    say: Say = lambda _: None,
) -> Advice:
    """Trains a recipe for a few steps without FP8, and advises on its precision.

    The steps are those of a run in the high precision, with the same losses. No run folder is
    written. All ranks call it.

    Args:
        recipe: The recipe. If it has FP8, the advice is about its scaling. Otherwise the scaling is
            advised too.
        steps: Optimizer steps.
        every: Measure every so many steps, and the last one.
        gpu: Name of a GPU, as in `fp8cfg plan`. Only scalings that it supports are measured. By
            default those of this machine; a CPU emulates all.
        config_dir: Folder with your own presets.
        say: Called with a line for each measured step, on the first rank.

    Returns:
        The advice. `advice.recipe` is the recipe to train with.

    Raises:
        ConfigError: The recipe cannot be trained here, or the GPU has no FP8.
        Diverged: The loss is not finite.
    """
    expect("advise", recipe, Recipe, "a Recipe; compose(['recipe=llama_8b']) gives one")
    _check_steps(steps, every)
    library = Library(Path(config_dir) if config_dir else None)

    def compose(words: Sequence[str], base: Recipe = recipe) -> Recipe:
        resolved = precedence.composed(words, library, None, base)
        refuse_if(resolved.problems)
        return resolved.recipe

    def cover(changed: Recipe) -> Coverage:
        return planned_coverage(changed, plan_layers(changed))

    world = current()
    check_layout(recipe, world.size)
    hardware, where = _find_hardware(gpu, recipe.trainer.accelerator)
    subject = _Subject(recipe.name, recipe, compose, cover, hardware, where)
    choices, unsupported = _choices(subject)
    baseline = compose([f"precision={recipe.precision.compute}"] if recipe.fp8.enabled else [])
    baseline.trainer.compile = "off"  # the hooks need eager passes
    torch.manual_seed(baseline.trainer.seed)
    job = build(baseline)
    batches, _ = run_data(baseline)
    layers, unmeasured = find_layers(job.model, _names(choices))
    probe = OperandProbe(layers, [choice.candidate for choice in choices])
    with probe:
        for step in range(steps):
            is_measured = _is_measured(step + 1, steps, every)
            with probe.step(is_measured):
                loss = train_step(job, batches, step, world).wait().loss
            if not math.isfinite(loss):
                compute = baseline.precision.compute
                raise Diverged(f"step {step + 1}: the loss is {loss} in {compute}, without FP8")
            if world.first and is_measured:
                say(f"step {step + 1} of {steps}: loss {loss:.4f}, measured")
    return _advise(subject, choices, probe, unsupported, unmeasured, world)


def advise_model(
    model: nn.Module,
    train_step: Callable[[], object],
    recipe: Any = None,
    steps: int = STEPS,
    every: int = EVERY,
    gpu: str | None = None,
) -> Advice:
    """Advises on the precision of your own model, before `convert_model`.

    Your model trains for some steps. Restore its weights afterwards if you need them.

    Args:
        model: The model, not compiled and not converted.
        train_step: Runs one optimizer step of your training loop: forward pass, backward pass and
            optimizer.
        recipe: What `convert_model` takes: a Recipe, a Precision or the name of a preset, to advise
            on its scaling. None advises on the scaling too.
        steps: See `advise`.
        every: See `advise`.
        gpu: See `advise`. Defaults to the device of the model.

    Returns:
        The advice. `convert_model(model, advice.recipe)` follows it.

    Raises:
        ConfigError: The model has FP8 layers already, or no layer could run in FP8.
    """
    expect("advise_model", model, nn.Module, "a torch.nn.Module")
    _check_steps(steps, every)
    if convert.has_fp8_layers(model):
        raise ConfigError(
            "advise_model: the model has FP8 layers already; measure it before convert_model, or"
            " call fp8cfg.convert_back(model)"
        )
    base = Recipe() if recipe is None else convert.given_recipe(recipe)
    refuse_if(convert.no_recipe(base))
    library = Library(None)

    def compose(words: Sequence[str], base: Recipe = base) -> Recipe:
        resolved = precedence.composed(words, library, None, base)
        refuse_if(resolved.problems)
        changed = resolved.recipe
        changed.fp8 = {"params": False}  # conversion leaves the weights as they are
        if not layer_lists(model):
            changed.fp8 = {"high_precision_at_start": 0, "high_precision_at_end": 0}
        return changed

    def cover(changed: Recipe) -> Coverage:
        fp8 = convert.checked(changed, model).fp8
        plan = plan_model(model, fp8, registry.rules(registry.REFERENCE).misfit)
        return coverage_of_layers(plan, beside(model), fp8)

    device = next((p.device.type for p in model.parameters()), "cpu")
    hardware, where = _find_hardware(gpu, "cuda" if device == "cuda" else "cpu")
    subject = _Subject(type(model).__name__, base, compose, cover, hardware, where, True)
    choices, unsupported = _choices(subject)
    layers, unmeasured = find_layers(model, _names(choices))
    probe = OperandProbe(layers, [choice.candidate for choice in choices])
    with probe:
        for step in range(steps):
            with probe.step(_is_measured(step + 1, steps, every)):
                train_step()
    return _advise(subject, choices, probe, unsupported, unmeasured, current())


@dataclass(frozen=True)
class _Subject:
    """What the advice is about.

    Attributes:
        name: Name of the recipe or of the model's class.
        recipe: The recipe.
        compose: Adds overrides to it, or to another recipe.
        cover: Plans the coverage of a recipe.
        hardware: Decides which scalings are supported.
        where: The hardware in words.
        is_custom: Whether it is a custom model.
    """

    name: str
    recipe: Recipe
    compose: Callable[..., Recipe]
    cover: Cover
    hardware: Hardware
    where: str
    is_custom: bool = False

    def change(self, recipe: Recipe, words: Sequence[str]) -> Recipe:
        """Adds overrides to `recipe`."""
        return self.compose(words, recipe) if words else recipe


def _advise(
    subject: _Subject,
    choices: Sequence[Choice],
    probe: OperandProbe,
    unsupported: Mapping[str, str],
    unmeasured: Mapping[str, str],
    world: World,
) -> Advice:
    """Turns the measurements into advice."""
    if not probe.errors:
        raise ConfigError(
            "advise: no linear layer ran a training pass in a measured step; check that the model"
            " is not compiled and that its loss reaches the layers"
        )
    candidates = probe.candidates
    errors = layer_errors(probe.errors, candidates, healthy_errors(candidates))
    errors = _of_all_ranks(errors, world)
    measured = {error.layer for error in errors}
    for layer in probe.layers:
        unmeasured = {layer: "it did not run in the measured steps", **unmeasured}
    # With pipeline stages another rank may have measured a layer.
    unmeasured = {name: why for name, why in unmeasured.items() if name not in measured}
    amaxes = {name: layer.amaxes for name, layer in probe.layers.items()}
    remedies = [
        find_remedy(choice, errors, amaxes, probe.measured, subject.cover, subject.change)
        for choice in choices
    ]
    chosen = _choose(subject, choices, remedies)
    compute = subject.recipe.precision.compute
    words = [f"precision={compute}"]
    if chosen is None:
        recipe = subject.compose(words)
    else:
        assert chosen.recipe is not None
        recipe, words = chosen.recipe, chosen.words
    seconds = probe.seconds
    # The first step is slower than all others.
    plain = seconds[False][1:] or seconds[False]
    return Advice(
        name=subject.name,
        recipe=recipe,
        overrides=words,
        remedy=chosen,
        remedies=remedies,
        errors=errors,
        unsupported=unsupported,
        unmeasured=unmeasured,
        hardware=subject.where,
        compute=compute,
        steps=len(seconds[True]) + len(seconds[False]),
        measured=probe.measured,
        asked=subject.recipe.fp8.enabled,
        cost=Cost(median(plain) if plain else None, median(seconds[True])),
        is_custom=subject.is_custom,
    )


def _of_all_ranks(errors: list[LayerError], world: World) -> list[LayerError]:
    """Returns the larger error of each GEMM over the ranks. A pipeline stage has some layers."""
    if world.size == 1:
        return errors
    worst: dict[tuple[str, str, str], LayerError] = {}
    for text in world.texts(json.dumps([asdict(error) for error in errors])):
        for values in json.loads(text):
            error = LayerError(**values)
            key = error.layer, error.scaling, error.gemm
            if key not in worst or error.error > worst[key].error:
                worst[key] = error
    return list(worst.values())


def _choose(
    subject: _Subject, choices: Sequence[Choice], remedies: Sequence[Remedy]
) -> Remedy | None:
    """Returns the remedy of the recipe's scaling, or of the best one."""
    for choice, remedy in zip(choices, remedies, strict=True):
        if subject.recipe.fp8.enabled and not choice.candidate.overrides:
            return remedy if remedy.recipe else None
    return choose_remedy(remedies, (subject.hardware.capability or (0, 0)) >= (10, 0))


# --- layers and hardware


def find_layers(model: nn.Module, names: Sequence[str]) -> tuple[Layers, dict[str, str]]:
    """Returns the layers of `model` that a probe can measure, and reasons against the others."""
    modules = dict(model.named_modules())
    layers: Layers = {}
    unmeasured = {}
    for name in names:
        module = modules.get(name)
        if isinstance(module, nn.Linear):
            layers[name] = (module, lambda weight: weight)
        elif module is not None and layout_of(module) is CONV1D:
            layers[name] = (module, CONV1D.matrix)
        elif module is not None:
            unmeasured[name] = f"{type(module).__name__} is no linear layer before the conversion"
        else:
            parent = modules.get(name.rpartition(".")[0])
            if parent is not None:
                reason = "becomes a linear layer in the conversion"
                unmeasured[name] = f"a part of {type(parent).__name__} that {reason}"
    return layers, unmeasured


def _names(choices: Sequence[Choice]) -> list[str]:
    """Returns the layers that at least one scaling runs in FP8, and the output layers."""
    names = set()
    for choice in choices:
        for linear in choice.coverage.linears:
            if linear.fp8 or _is_output(linear):
                names.add(linear.name)
    return [linear.name for linear in choices[0].coverage.linears if linear.name in names]


def _is_output(linear: PlannedLinear) -> bool:
    """Whether it is the output layer, which stays in high precision by default."""
    return linear.output or linear.reason == "fp8.output_layer=false"


def _choices(subject: _Subject) -> tuple[list[Choice], dict[str, str]]:
    """Returns `list_choices`. Raises ConfigError if no scaling is left."""
    choices, unsupported = list_choices(
        subject.recipe, subject.compose, subject.cover, subject.hardware
    )
    if not choices:
        reasons = list(dict.fromkeys(unsupported.values()))
        raise ConfigError([f"advise: no FP8 scaling runs on {subject.where}", *reasons[:3]])
    return choices, unsupported


def _find_hardware(gpu: str | None, accelerator: str) -> tuple[Hardware, str]:
    """Returns the hardware of the scalings, and its name in words."""
    if gpu is not None:
        entry = find_gpu(gpu)
        # As in plan: a CUDA version with every scaling.
        return Hardware("cuda", entry.capability, BLOCK_CUDA), entry.name
    hardware = find_hardware(accelerator)
    if hardware.device == "cpu":
        return hardware, "a CPU, which emulates all (name a GPU: --gpu h100)"
    return hardware, torch.cuda.get_device_name()


def _is_measured(step: int, steps: int, every: int) -> bool:
    return step % every == 0 or step == steps


def _check_steps(steps: int, every: int) -> None:
    """Raises ConfigError for counts that measure nothing."""
    problems = []
    if steps < 2:
        problems.append(f"steps={steps}: must be at least 2, delayed scaling needs a past step")
    if every < 1:
        problems.append(f"every={every}: must be at least 1")
    refuse_if(problems)
