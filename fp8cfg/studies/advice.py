"""Precision advice: a scaling for a model, and the layers to keep in high precision.

    advice = fp8cfg.advise(recipe)                      # trains a short run in bf16
    print(advice); recipe = advice.recipe

    advice = fp8cfg.advise_model(model, train_step)     # your model and training loop
    fp8 = fp8cfg.convert_model(model, advice.recipe)

Both functions train a few steps without FP8 and share the rest:

    list_choices     advice_scalings.py: the scalings of the hardware, with their planned coverage
    OperandProbe     operand_probe.py: measures each GEMM under each scaling while the model trains
    layer_errors     advice_rules.py: the typical error of each GEMM
    find_remedy      advice_rules.py: the overrides that make a scaling healthy
    choose_remedy    advice_rules.py: the scaling to train with
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
from fp8cfg.backends.any_model.eligibility import layer_lists, other_parameters, plan_model
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
"""Default number of optimizer steps."""
EVERY = 5
"""Default distance of measured steps."""
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
    """Trains a recipe for a few steps without FP8 and advises on its precision.

    The losses equal the first losses of a run in high precision. No run folder is written. All
    ranks must call it.

    Args:
        recipe: The recipe. If it has FP8, the advice keeps its scaling. Otherwise the advice
            includes a scaling.
        steps: Optimizer steps.
        every: Distance of measured steps. The last step is measured too.
        gpu: Name of a GPU, as in `fp8cfg plan`. Only its supported scalings are measured. Defaults
            to this machine. A CPU emulates all scalings.
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
        """Adds overrides to a recipe, with the resolution of conflicts."""
        resolved = precedence.composed(words, library, None, base)
        refuse_if(resolved.problems)
        return resolved.recipe

    def cover(changed: Recipe) -> Coverage:
        """Plans the coverage of the recipe's model."""
        return planned_coverage(changed, plan_layers(changed))

    world = current()
    check_layout(recipe, world.size)
    hardware, hardware_name = _find_hardware(gpu, recipe.trainer.accelerator)
    subject = _Subject(recipe.name, recipe, compose, cover, hardware, hardware_name)
    choices, unsupported = _choices(subject)
    # Without FP8: otherwise errors of one layer would change the operands of all later layers.
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
                # Trouble without FP8. Advice on operands of a diverging run would mislead.
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
        recipe: A Recipe, a Precision or the name of a preset, as for `convert_model`. The advice
            keeps its scaling. With None, the advice includes a scaling.
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
    base = Recipe() if recipe is None else convert.to_recipe(recipe)
    refuse_if(convert.recipe_errors(base))
    library = Library(None)

    def compose(words: Sequence[str], base: Recipe = base) -> Recipe:
        """Adds overrides to a recipe, and removes keys without use for a custom model."""
        resolved = precedence.composed(words, library, None, base)
        refuse_if(resolved.problems)
        changed = resolved.recipe
        changed.fp8 = {"params": False}  # conversion leaves the weights as they are
        if not layer_lists(model):
            # A model without a list of layers has no first and last layers. A preset with these
            # keys would be rejected.
            changed.fp8 = {"high_precision_at_start": 0, "high_precision_at_end": 0}
        return changed

    def cover(changed: Recipe) -> Coverage:
        """Plans the coverage of the custom model."""
        fp8 = convert.adapt_recipe(changed, model).fp8
        # The limits of the native backend, because the errors are measured with its numerics.
        plan = plan_model(model, fp8, registry.rules(registry.REFERENCE).misfit)
        return coverage_of_layers(plan, other_parameters(model), fp8)

    device = next((p.device.type for p in model.parameters()), "cpu")
    hardware, hardware_name = _find_hardware(gpu, "cuda" if device == "cuda" else "cpu")
    subject = _Subject(type(model).__name__, base, compose, cover, hardware, hardware_name, True)
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
    """A recipe or a custom model under study.

    Attributes:
        name: Name of the recipe or of the model's class.
        recipe: The recipe.
        compose: Adds overrides to this recipe or to another one.
        cover: Plans the coverage of a recipe.
        hardware: The target hardware. It limits the scalings.
        hardware_name: The hardware in words.
        is_custom: Whether it is a custom model.
    """

    name: str
    recipe: Recipe
    compose: Callable[..., Recipe]
    cover: Cover
    hardware: Hardware
    hardware_name: str
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
    if probe.overflowed - probe.errors.keys():
        measured_steps = ", ".join(map(str, probe.measured))
        raise ConfigError(
            f"advise: gradients overflowed in all measured steps ({measured_steps}); train more"
            " steps, or set a lower loss scale, such as precision.initial_loss_scale=65536"
        )
    candidates = probe.candidates
    errors = layer_errors(probe.errors, candidates, healthy_errors(candidates))
    errors = _of_all_ranks(errors, world)
    measured = {error.layer for error in errors}
    for layer in probe.layers:
        # All probed layers at first. Layers with measurements are removed below.
        unmeasured = {layer: "it did not run in the measured steps", **unmeasured}
    # With pipeline stages another rank may have measured a layer.
    unmeasured = {name: reason for name, reason in unmeasured.items() if name not in measured}
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
        hardware=subject.hardware_name,
        compute=compute,
        steps=len(seconds[True]) + len(seconds[False]),
        measured=probe.measured,
        asked=subject.recipe.fp8.enabled,
        cost=Cost(median(plain) if plain else None, median(seconds[True])),
        is_custom=subject.is_custom,
    )


def _of_all_ranks(errors: list[LayerError], world: World) -> list[LayerError]:
    """Returns the largest error of each GEMM over all ranks. A collective call.

    Ranks see different data. With pipeline parallelism they have different layers too.
    """
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
    """Returns the remedy of the recipe's own scaling, or of the best scaling if it has no FP8."""
    # Only the recipe's own scaling needs no overrides.
    for choice, remedy in zip(choices, remedies, strict=True):
        if subject.recipe.fp8.enabled and not choice.candidate.overrides:
            return remedy if remedy.recipe else None
    return choose_remedy(remedies, (subject.hardware.capability or (0, 0)) >= (10, 0))


# --- layers and hardware


def find_layers(model: nn.Module, names: Sequence[str]) -> tuple[Layers, dict[str, str]]:
    """Finds the linear layers for a probe.

    Args:
        model: The model.
        names: Planned linear layers by name.

    Returns:
        The layers, and a reason for each layer without a measurement.
    """
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
            # The plan names layers after the conversion, such as the packed projection of
            # nn.MultiheadAttention. Before it, only the parent exists. With pipeline stages both
            # may be on another rank.
            parent = modules.get(name.rpartition(".")[0])
            if parent is not None:
                reason = "becomes a linear layer in the conversion"
                unmeasured[name] = f"a part of {type(parent).__name__} that {reason}"
    return layers, unmeasured


def _names(choices: Sequence[Choice]) -> list[str]:
    """Returns the layers with FP8 under any scaling, and the output layers, in model order."""
    # Scalings differ in their layers, because some presets keep the first and last ones in bf16.
    names = set()
    for choice in choices:
        for linear in choice.coverage.linears:
            if linear.fp8 or _is_output(linear):
                names.add(linear.name)
    return [linear.name for linear in choices[0].coverage.linears if linear.name in names]


def _is_output(linear: PlannedLinear) -> bool:
    """Whether a layer computes the logits."""
    # By default the output layer stays in high precision, with this reason. It is measured anyway:
    # the table shows the effect of fp8.output_layer=true.
    return linear.output or linear.reason == "fp8.output_layer=false"


def _choices(subject: _Subject) -> tuple[list[Choice], dict[str, str]]:
    """Returns `list_choices`. Raises ConfigError if no scaling is left."""
    choices, unsupported = list_choices(
        subject.recipe, subject.compose, subject.cover, subject.hardware
    )
    if not choices:
        reasons = list(dict.fromkeys(unsupported.values()))
        raise ConfigError([f"advise: no FP8 scaling runs on {subject.hardware_name}", *reasons[:3]])
    return choices, unsupported


def _find_hardware(gpu: str | None, accelerator: str) -> tuple[Hardware, str]:
    """Returns the target hardware, and its name in words."""
    if gpu is not None:
        entry = find_gpu(gpu)
        # The CUDA version of that machine is unknown. Like `fp8cfg plan`, this assumes a version
        # with every scaling.
        return Hardware("cuda", entry.capability, BLOCK_CUDA), entry.name
    hardware = find_hardware(accelerator)
    if hardware.device == "cpu":
        return hardware, "a CPU, which emulates all (name a GPU: --gpu h100)"
    return hardware, torch.cuda.get_device_name()


def _is_measured(step: int, steps: int, every: int) -> bool:
    """Whether to measure a step. Steps count from 1."""
    # The last step has the longest amax history.
    return step % every == 0 or step == steps


def _check_steps(steps: int, every: int) -> None:
    """Raises ConfigError for too few steps or an invalid distance."""
    problems = []
    if steps < 2:
        problems.append(f"steps={steps}: must be at least 2, delayed scaling needs a past step")
    if every < 1:
        problems.append(f"every={every}: must be at least 1")
    refuse_if(problems)
