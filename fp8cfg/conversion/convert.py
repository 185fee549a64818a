"""Model conversion: nn.Linear to FP8 layers and back, in place, for a model and a training loop of your own.

    fp8 = fp8cfg.convert_model(model, recipe)   # in place; print(fp8) says what was converted and what was not, and why
    with fp8.autocast():
        loss = model(batch)
        loss.backward()
    optimizer.step(); fp8.step()                # rolls histories and moves scales
    fp8.prove()                                 # after the first step: NotFP8Error where it did not run in FP8

Of the recipe the precision is read; `model` and the rest describe runs of our own. Dtypes of parameters stay what they are, and
storage is refused: `fp8cfg.build(recipe, model=model)` gives the whole job, with its masters and the recipe's optimizer.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from fp8cfg.backends import registry, stored_weights
from fp8cfg.backends.any_model import checks, conversion_state, linear_like
from fp8cfg.backends.any_model.checks import StepWatch
from fp8cfg.backends.any_model.conversion_state import PLANNED, converted, mark, unmark
from fp8cfg.backends.any_model.eligibility import beside, layer_lists, plan_model
from fp8cfg.backends.any_model.linear_like import layout_of
from fp8cfg.backends.any_model.module_swap import replaced
from fp8cfg.backends.autocast import AutocastContext
from fp8cfg.backends.choice import Choice, choose
from fp8cfg.backends.gemm_plan import PlannedLinear, not_engaged
from fp8cfg.composition.layers import Rank
from fp8cfg.composition.precedence import resolve_recipe, resolved_for_build
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.numerics import Region, fp8_linears, seed_rounding
from fp8cfg.numerics.stored_state import fp8_state_dict, load_fp8_state_dict
from fp8cfg.planning.coverage import Coverage, coverage, coverage_of_layers, warn_of_low_coverage
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.schema.backends import Hardware
from fp8cfg.schema.changed_fields import changed
from fp8cfg.schema.errors import ConfigError, NotFP8Error, expect, refuse_if
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.keys import full, preset_keys
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.presets import built_config
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import fp8_weights
from fp8cfg.schema.tables import wrapped

_ENDS = ("high_precision_at_start", "high_precision_at_end")
GIVE_WAY = frozenset({*_ENDS, "params"})
"""Fields of the `fp8` node that do where a preset wrote them."""


def fit_layers(recipe: Recipe, lists: Mapping[str, int]) -> Recipe:
    """`recipe` for a model with the layer lists `lists` (name -> length), of which model.num_layers is the longest: the preset's
    layers at both ends leave at least one in FP8, and are none where the model has no list."""
    may = [name for name in _ENDS if name in preset_keys(recipe.fp8)]
    if not lists:
        return _said(
            recipe,
            {name: 0 for name in may if getattr(recipe.fp8, name)},
            "a model without a list of like layers",
        )
    ranks = dict.fromkeys(flat(recipe), Rank.USER)
    ranks |= {full(f"fp8.{name}"): Rank.PRESET for name in may}
    fitting = resolve_recipe(recipe, ranks, change_harmless=False).recipe.fp8
    layers = recipe.model.num_layers
    return _said(
        recipe,
        {name: getattr(fitting, name) for name in may},
        f"a model of {layers} layer{'s' if layers > 1 else ''}",
    )


def leave_parameters(recipe: Recipe) -> Recipe:
    """`recipe` for a model whose parameters stay as they are: the preset's fp8.params is off."""
    return _said(
        recipe,
        {"params": False} if "params" in preset_keys(recipe.fp8) else {},
        "parameters that stay as they are",
    )


def _said(recipe: Recipe, values: Mapping[str, int], to: str) -> Recipe:
    """A copy of `recipe` with `values` in its `fp8` node, and a line for those that change; they stay the preset's."""
    changed = {name: value for name, value in values.items() if getattr(recipe.fp8, name) != value}
    if not changed:
        return recipe
    those = ", ".join(
        f"fp8.{name} {getattr(recipe.fp8, name)} -> {value}" for name, value in changed.items()
    )
    logging.getLogger("fp8cfg").warning(f"note: {those}: the preset's value is changed to fit {to}")
    recipe = recipe.model_copy(deep=True)
    recipe.fp8 = changed
    return recipe


def given_recipe(given: Any) -> Any:
    """The Recipe that `given` means, with a line to the logger for each thing in it that has no counterpart here; `given` itself
    where it is no such object."""
    given = built_config(given)
    if isinstance(given, Recipe):
        return given
    if isinstance(given, (Precision, str)):  # or a preset's name
        recipe = Recipe()
        recipe.precision = given
        return recipe
    from fp8cfg.interop import from_object

    try:
        found = from_object(given)
    except ConfigError as e:
        if "no object of a project that is known here" in str(e):
            return given
        raise
    for line in found.lost:
        logging.getLogger("fp8cfg").warning(f"{type(given).__name__}: {line}")
    return found.recipe


def of_no_effect(recipe: Recipe) -> list[str]:
    """A line for each thing in `recipe` that only its own Transformer has."""
    lines = []
    if every := recipe.log.fp8_stats_every_n_steps:
        lines.append(
            f"log.fp8_stats_every_n_steps={every}: has no effect on a custom model; drop it,"
            " and call fp8cfg.collect_statistics(model, run) in your loop"
        )
    if recipe.lora.enabled:
        lines.append(
            "lora.enabled=true: its adapters stand in the Transformer of a recipe; give a model of"
            " your own PEFT's, by peft.get_peft_model(model, LoraConfig(...)), and write"
            " lora.enabled=false"
        )
    return lines


class Conversion:
    """Result of `convert_model`. `model` is the model that was given, or its replacement where that was itself an nn.Linear;
    `plan` has for each linear layer the format of each GEMM, and the reason where one stays in high precision. It is saved beside
    the model as anything with a state dict: `accelerator.register_for_checkpointing(fp8)`, or `fabric.save(path, {"fp8": fp8})`.
    """

    def __init__(
        self, model: nn.Module, plan: Sequence[PlannedLinear], choice: Choice, fp8: FP8
    ) -> None:
        self.model, self.plan, self.choice, self.fp8 = model, plan, choice, fp8
        self._watch: StepWatch | None = None

    def autocast(self, enabled: bool = True) -> AbstractContextManager[None]:
        """A context in which the converted layers multiply in FP8; outside they do in high precision. It may be entered again, also
        inside of itself."""
        backend = registry.backend(self.choice.backend)

        def entered() -> AbstractContextManager[None]:
            checks.entered(self.model, enabled)
            if (
                enabled
                and self._rolls
                and torch.is_grad_enabled()
                and not torch.compiler.is_compiling()
            ):
                weights: list[Any] = [m.weight for m in self.model.modules() if PLANNED in vars(m)]
                self._watch = self._watch or StepWatch(weights)
                self._watch.entered(converted(self.model).steps)
            return backend.autocast(self.model, enabled)

        return AutocastContext(entered)

    @property
    def _rolls(self) -> bool:
        """Whether there is something for `step` to do."""
        return (
            SCALINGS[self.fp8.scaling].history
            and registry.capabilities(self.choice.backend).moves_scales
        )

    def step(self) -> None:
        """Call it after each optimizer step: delayed scaling rolls its histories and moves its scales. Under other scalings there
        is nothing to roll. If a step has several microbatches, later steps quantize each weight once, until this call. Beside `apply_fp8_autowrap`, whose passes roll, it warns and does nothing. Raises NotFP8Error where the
        model was trained and no layer has multiplied in FP8 yet."""
        if checks.check(self.model):
            warn_of_low_coverage(self.model, coverage(self.model))
        state = converted(self.model)
        if state.forward_passes and self._rolls:
            warnings.warn(
                "fp8.step() beside apply_fp8_autowrap does nothing: each training pass of an"
                " autowrapped model rolls the histories; drop the call",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        state.step(self.model)
        for layer in fp8_linears(self.model):
            layer.end_loop_step()

    def state_dict(self) -> dict[str, Tensor]:
        """FP8 state of the model by name, copies: scales, amax histories, counts of random draws. `model.state_dict()` has none of
        it, and loads into the model as it was before the conversion."""
        return fp8_state_dict(self.model)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`: load the model's weights first. Raises ValueError, before anything is changed, for the state
        of other FP8 layers. Where it is not loaded, scales start anew, and the next step says so.
        """
        load_fp8_state_dict(self.model, state_dict)

    def prove(self) -> Coverage:
        """What ran since the conversion. Raises NotFP8Error where that is not what was planned, or is less than fp8.min_coverage.
        Layers and gradients that a step leaves out are no fault, nor are evaluations; a converted layer that ran outside of the
        context in training is one."""
        return prove(self.model, self.plan, self.choice, self.fp8)

    def __str__(self) -> str:
        backend = wrapped(f"backend {self.choice.backend} ({self.choice.why})", more="  ")
        return f"{backend}\n{coverage_of_layers(self.plan, beside(self.model), self.fp8)}"

    __repr__ = __str__


def convert_model(
    model: nn.Module, recipe: Any, linear: Collection[type[nn.Linear]] = ()
) -> Conversion:
    """Replace, in place, the linear layers of `model` that the recipe's precision has in FP8, by those of its backend. `recipe` is
    a Recipe, a Precision, a preset's name such as "bf16_fp8", or a handler of Accelerate's or a recipe of Transformer Engine's, which mean the recipe that they import
    as.

    Parameters stay the very same objects: tied ones tied, frozen ones frozen. So do hooks, dtypes, devices and training flags.
    `linear` are subclasses of nn.Linear whose forward is F.linear of input and weight, cast to some dtype: their layers are
    converted too, and cast as theirs. Where a small copy of such a layer can be run, it is known without being named.
    Raises ConfigError for a recipe that cannot run here or reaches no layer, before anything is replaced.
    """
    recipe = given_recipe(recipe)
    fp8 = _fp8_of(recipe, model)
    if _ours(model) or has_fp8_layers(model):
        raise ConfigError(
            "convert_model: the model has FP8 layers already; fp8cfg.convert_back(model) takes out"
            " those of fp8cfg"
        )
    choice = choose(recipe.precision, _hardware(model))
    if registry.capabilities(choice.backend).own_state:
        raise ConfigError(
            f"backend={choice.backend}: its layers are trained only by its own optimizer; write"
            " backend=native, or use fp8cfg.build(recipe, model=model)"
        )
    holder = nn.Module()
    holder.model = model
    whole = (
        holder if isinstance(model, nn.Linear) or layout_of(model) else model
    )  # a root has no place to be replaced in
    norms = registry.capabilities(choice.backend).norms
    plan = plan_model(whole, fp8, registry.rules(choice.backend).misfit, linear, norms)
    shells = linear_like.to_linear(whole, plan)
    try:
        registry.backend(choice.backend).convert(whole, fp8, plan, Region(), choice.product)
    except ConfigError:
        linear_like.back(whole, shells)
        raise
    linear_like.attach(whole, shells)
    seed_rounding(model, recipe.trainer.seed)
    mark(whole, fp8, plan, choice)
    conversion_state.watch(whole)
    checks.watch(whole)
    for layer in fp8_linears(whole):
        layer.weight_cache.in_loop = True
    return Conversion(holder.model, plan, choice, fp8)


def convert_back(model: nn.Module) -> nn.Module:
    """Put an nn.Linear with the very same Parameters in the place of each FP8 layer of `model`; returns it, or its replacement
    where it is itself such a layer. Weights that were held in FP8 alone, or in a codec,
    come back in the dtype that most other matrices have. Raises ConfigError for what is no
    nn.Module, and for a model that FSDP2 has split."""
    expect("convert_back", model, nn.Module, "a torch.nn.Module, such as job.model")
    if _has(model, "torch.distributed.fsdp"):
        raise ConfigError(
            "convert_back: FSDP2 has split the model, and its layers cannot be exchanged; a"
            " checkpoint has whole weights (model.safetensors)"
        )
    holder = nn.Module()
    holder.model = model
    shells = linear_like.shells(holder)
    dtype = _plain_dtype(model)
    stored_weights.unhold(holder, dtype)
    for name, layer in list(holder.named_modules()):
        for backend in registry.used():
            if (plain := backend.plain(layer)) is not None:
                if isinstance(plain, nn.Linear) and plain.weight is not layer._parameters.get(
                    "weight"
                ):
                    plain.weight.data = plain.weight.data.to(dtype)
                replaced(holder, name, plain)
    unmark(holder)
    checks.unwatch(holder)
    linear_like.back(holder, shells)
    return holder.model


def _plain_dtype(model: nn.Module) -> torch.dtype:
    """The dtype in which quantized weights come back, which must multiply with the other layers of `model`.

    Most other matrices decide; if there are none, the biases of the quantized layers do; then other vectors. Norms come last:
    they may stay in float32 in a bfloat16 model.
    """
    layers: list[Any] = [*stored_weights.in_codec(model)]
    layers += [layer for layer in fp8_linears(model) if layer.held]
    stored = {layer.parameter for layer in layers}
    wide = [
        p
        for p in model.parameters()
        if p.is_floating_point() and p.dtype.itemsize > 1 and p not in stored
    ]
    matrices = [p for p in wide if p.dim() > 1]
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    counts = Counter(p.dtype for p in matrices or biases or wide)
    return counts.most_common(1)[0][0] if counts else torch.float32


def has_fp8_layers(model: nn.Module) -> bool:
    """Whether any layer of `model` can multiply in FP8: ours, torchao's Float8Linear, or Transformer Engine's. A layer of ours that
    only holds its weight in fewer bits cannot."""
    expect("has_fp8_layers", model, nn.Module, "a torch.nn.Module, such as job.model")
    modules = [
        module for name in registry.names() for module in registry.capabilities(name).layer_modules
    ]
    return any(
        not all(getattr(layer, "high_precision", (False,))) for layer in _ours(model)
    ) or any(_has(model, module) for module in modules)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Whether any layer of `model` is Transformer Engine's. That does not say whether it runs in FP8: see `coverage`."""
    expect(
        "has_transformer_engine_layers", model, nn.Module, "a torch.nn.Module, such as job.model"
    )
    return _has(model, "transformer_engine") or _has(model, "fp8cfg.backends.te.layers")


def prove(model: nn.Module, plan: Sequence[PlannedLinear], choice: Choice, fp8: FP8) -> Coverage:
    """What ran in `model`. Raises NotFP8Error where that is not what was planned, or too little of it is in FP8."""
    observed = registry.backend(choice.backend).observed(model)
    lines = conversion_state.replaced_layers(model, plan)
    lines += not_engaged(conversion_state.with_current_names(model, plan), observed)
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise NotFP8Error(f"this model did not run as was asked for: {'; '.join(lines[:3])}{more}")
    if (seen := coverage(model)).share < fp8.min_coverage:
        raise NotFP8Error(
            f"fp8.min_coverage={fp8.min_coverage:g}: {seen.share:.1%} of {seen.what} ran in FP8"
        )
    warn_of_low_coverage(model, seen)
    return seen


def checked(recipe: Recipe, model: nn.Module) -> Recipe:
    """A copy of `recipe` for a model with the layers of `model`. Raises ConfigError with every rule that it breaks."""
    refuse_if(strangers(recipe, model))
    refuse_if(of_no_effect(recipe))
    recipe, lists = recipe.model_copy(deep=True), layer_lists(model)
    recipe.model.num_layers = max(
        lists.values(), default=recipe.model.num_layers
    )  # for the rules about layers
    recipe = resolved_for_build(fit_layers(recipe, lists))
    recipe.check()
    return recipe


def strangers(recipe: Recipe, model: nn.Module) -> list[str]:
    """A line for each argument of the wrong type."""
    return no_recipe(recipe) + (
        []
        if isinstance(model, nn.Module)
        else [f"expected a torch.nn.Module, got {type(model).__name__}"]
    )


def no_recipe(given: Any) -> list[str]:
    """A line where that is none."""
    return (
        []
        if isinstance(given, Recipe)
        else [
            f"expected a Recipe, got {type(given).__name__}; compose(['precision=bf16_fp8'])"
            " gives one"
        ]
    )


def to_build(recipe: Recipe, model: nn.Module) -> tuple[Recipe, nn.Module]:
    """The recipe and the model around which `fp8cfg.build` makes a job."""
    recipe = checked(recipe, model)
    if recipe.trainer.compile == "on":
        raise ConfigError(
            "trainer.compile=on: has no effect on a custom model; drop it, call"
            " job.compile_model() and run job.forward in your loop"
        )
    if _ours(model) or has_fp8_layers(model):
        raise ConfigError(
            "build: the model has FP8 layers already; fp8cfg.convert_back(model) takes out those of"
            " fp8cfg"
        )
    return recipe, (
        nn.Sequential(model) if isinstance(model, nn.Linear) or layout_of(model) else model
    )


def _fp8_of(recipe: Recipe, model: nn.Module) -> FP8:
    precision = leave_parameters(checked(recipe, model)).precision
    fp8, compute = precision.fp8, precision.compute
    if not fp8.enabled:
        raise ConfigError(
            f"convert_model: precision.compute={compute} runs no FP8; write precision=bf16_fp8"
        )
    stored = [f"opt_level={precision.opt_level}"] if precision.opt_level else []
    refuse_if(
        [
            f"{key}: has no effect in convert_model, which leaves parameters and optimizer as they"
            " are; write fp8cfg.build(recipe, model=model)"
            for key in [*stored, *changed(precision.storage)]
        ]
    )
    if fp8_weights(precision):
        raise ConfigError(
            "fp8.params=true: weights stored only in FP8 need an optimizer with master weights;"
            " fp8cfg.build(recipe, model=model) makes one, or write fp8.params=false"
        )
    return fp8


def _hardware(model: nn.Module) -> Hardware:  # where its parameters are
    return find_hardware("cuda" if any(p.is_cuda for p in model.parameters()) else "cpu")


def _ours(model: nn.Module) -> list[nn.Module]:
    """The layers that a backend of ours has converted, or that hold their weights in a codec."""
    return [
        model.get_submodule(name) for backend in registry.used() for name in backend.observed(model)
    ]


def _has(model: nn.Module, package: str) -> bool:
    return any(
        f"{base.__module__}.".startswith(f"{package}.")
        for m in model.modules()
        for base in type(m).__mro__
    )
