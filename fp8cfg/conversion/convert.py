"""Converts nn.Linear to FP8 layers and back in place, for your own model and training loop.

    fp8 = fp8cfg.convert_model(model, recipe)   # print(fp8) lists the layers and their formats
    with fp8.autocast():
        loss = model(batch)
        loss.backward()
    optimizer.step(); fp8.step()                # rolls amax histories and updates scales
    fp8.prove()                                 # after the first step: NotFP8Error if not in FP8

Only the recipe's precision applies. Parameters keep their dtypes, and storage settings are errors.
`fp8cfg.build(recipe, model=model)` also creates master weights and the recipe's optimizer.
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
from fp8cfg.backends.any_model.eligibility import layer_lists, other_parameters, plan_model
from fp8cfg.backends.any_model.linear_like import layout_of
from fp8cfg.backends.any_model.module_swap import replace_module
from fp8cfg.backends.autocast import AutocastContext
from fp8cfg.backends.choice import Choice, choose
from fp8cfg.backends.gemm_plan import PlannedLinear, not_engaged
from fp8cfg.composition.layers import Rank
from fp8cfg.composition.precedence import resolve_recipe, resolved_for_build
from fp8cfg.composition.recipe_yaml import flat
from fp8cfg.numerics import Region, fp8_linears, seed_rounding
from fp8cfg.numerics.stored_state import fp8_state_dict, load_fp8_state_dict
from fp8cfg.numerics.weight_storage import codec_layers
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
ADJUSTABLE_KEYS = frozenset({*_ENDS, "params"})
"""FP8 keys that the conversion may change if a preset set them."""


def fit_layers(recipe: Recipe, lists: Mapping[str, int]) -> Recipe:
    """Adapts fp8.high_precision_at_start and fp8.high_precision_at_end of a preset to a model.

    At least one layer stays in FP8. Both become 0 if the model has no list of equal layers. Values
    that the user set do not change.

    Args:
        recipe: The recipe, with model.num_layers set to the longest list.
        lists: Number of layers of each layer list, by module name.
    """
    adjustable = [name for name in _ENDS if name in preset_keys(recipe.fp8)]
    if not lists:
        zeros = {name: 0 for name in adjustable if getattr(recipe.fp8, name)}
        return _change_preset_values(recipe, zeros, "a model without a list of like layers")
    ranks = dict.fromkeys(flat(recipe), Rank.USER)
    ranks |= {full(f"fp8.{name}"): Rank.PRESET for name in adjustable}
    fitting = resolve_recipe(recipe, ranks, change_harmless=False).recipe.fp8
    num_layers = recipe.model.num_layers
    plural = "s" if num_layers > 1 else ""
    return _change_preset_values(
        recipe,
        {name: getattr(fitting, name) for name in adjustable},
        f"a model of {num_layers} layer{plural}",
    )


def without_fp8_params(recipe: Recipe) -> Recipe:
    """Turns off fp8.params if a preset set it, because conversion keeps all parameters."""
    if "params" not in preset_keys(recipe.fp8):
        return recipe
    return _change_preset_values(recipe, {"params": False}, "parameters that stay as they are")


def _change_preset_values(recipe: Recipe, values: Mapping[str, int], reason: str) -> Recipe:
    """Returns a copy of `recipe` with changed FP8 values and logs a note about them.

    Args:
        recipe: The recipe.
        values: New values by FP8 key. The preset still counts as their source.
        reason: Describes the model, for the note.
    """
    changes = {name: value for name, value in values.items() if getattr(recipe.fp8, name) != value}
    if not changes:
        return recipe
    changes_text = ", ".join(
        f"fp8.{name} {getattr(recipe.fp8, name)} -> {value}" for name, value in changes.items()
    )
    logging.getLogger("fp8cfg").warning(
        f"note: {changes_text}: the preset's value is changed to fit {reason}"
    )
    recipe = recipe.model_copy(deep=True)
    recipe.fp8 = changes
    return recipe


def to_recipe(argument: Any) -> Any:
    """Converts an argument to a Recipe. Settings without an equivalent are logged.

    Args:
        argument: A Recipe, a Precision, the name of a preset, a Fiddle config, or an FP8 recipe
            object of another library.

    Returns:
        The Recipe, or `argument` unchanged if its type is not known.

    Raises:
        ConfigError: The object of another library has no equivalent recipe.
    """
    argument = built_config(argument)
    if isinstance(argument, Recipe):
        return argument
    if isinstance(argument, (Precision, str)):  # a string names a preset
        recipe = Recipe()
        recipe.precision = argument
        return recipe
    # A local import: most callers pass a Recipe and need no import code.
    from fp8cfg.interop import from_object
    from fp8cfg.interop.key_table import UnknownObject

    try:
        translation = from_object(argument)
    except UnknownObject:
        return argument
    for line in translation.lost:
        logging.getLogger("fp8cfg").warning(f"{type(argument).__name__}: {line}")
    return translation.recipe


def unsupported_settings(recipe: Recipe) -> list[str]:
    """Returns an error for each setting of `recipe` that custom models do not support."""
    lines = []
    interval = recipe.log.fp8_stats_every_n_steps
    if interval:
        lines.append(
            f"log.fp8_stats_every_n_steps={interval}: has no effect on a custom model; remove it,"
            " and call fp8cfg.collect_statistics(model, run) in your loop"
        )
    if recipe.lora.enabled:
        lines.append(
            "lora.enabled=true: its adapters only fit the Transformer of a recipe; for a custom"
            " model call peft.get_peft_model(model, LoraConfig(...)) and set lora.enabled=false"
        )
    return lines


class Conversion:
    """Result of `convert_model`.

    Save it with the model like any object with a state dict, for example with
    `accelerator.register_for_checkpointing(fp8)` or `fabric.save(path, {"fp8": fp8})`.

    Attributes:
        model: The converted model. It is a new module if the given model was a single linear layer.
        plan: The format of each GEMM of each linear layer, and reasons for high precision.
        choice: The backend and its product.
        fp8: The FP8 settings of the conversion.
    """

    def __init__(
        self, model: nn.Module, plan: Sequence[PlannedLinear], choice: Choice, fp8: FP8
    ) -> None:
        self.model = model
        self.plan = plan
        self.choice = choice
        self.fp8 = fp8
        self._step_watch: StepWatch | None = None

    def autocast(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context in which the converted layers multiply in FP8.

        Outside of it they multiply in high precision. The context can be nested and entered again.

        Args:
            enabled: False runs the layers in high precision, for example for part of an evaluation.

        Raises:
            ConfigError: Entering it, if the model was moved to a GPU after the conversion.
        """
        backend = registry.backend(self.choice.backend)

        def enter() -> AbstractContextManager[None]:
            refuse_emulation_on_gpu(self.model, self.choice, self.fp8)
            checks.note_context(self.model, enabled)
            is_training = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if enabled and is_training and self._has_scales_to_update:
                self._watch_steps()
            return backend.autocast(self.model, enabled)

        return AutocastContext(enter)

    def _watch_steps(self) -> None:
        """Warns if the weights were updated but `step` was never called."""
        if self._step_watch is None:
            weights: list[Any] = []
            for module in self.model.modules():
                if PLANNED in vars(module):
                    weights.append(module.weight)
            self._step_watch = StepWatch(weights)
        self._step_watch.begin_pass(converted(self.model).steps)

    @property
    def _has_scales_to_update(self) -> bool:
        """Whether `step` has scales to update: only under delayed scaling."""
        return (
            SCALINGS[self.fp8.scaling].history
            and registry.capabilities(self.choice.backend).moves_scales
        )

    def step(self) -> None:
        """Rolls amax histories and updates scales of delayed scaling.

        Call it after each optimizer step. Other scalings have no histories, but the call ends the
        caching of quantized weights for a step of several microbatches. If delayed scaling runs
        with `apply_fp8_autowrap`, each pass rolls histories. The call then warns and does nothing.

        Raises:
            NotFP8Error: The model was trained, but no layer has multiplied in FP8 yet.
        """
        if checks.check(self.model):
            warn_of_low_coverage(self.model, coverage(self.model))
        state = converted(self.model)
        if state.forward_passes and self._has_scales_to_update:
            warnings.warn(
                "fp8.step() has no effect with apply_fp8_autowrap: each training pass of an"
                " autowrapped model rolls the histories; remove the call",
                RuntimeWarning,
                stacklevel=2,
            )
            return
        state.step(self.model)
        for layer in fp8_linears(self.model):
            layer.end_loop_step()

    def state_dict(self) -> dict[str, Tensor]:
        """Returns copies of the FP8 state by name: scales, amax histories, and random draw counts.

        `model.state_dict()` does not contain them. It loads into the unconverted model.
        """
        return fp8_state_dict(self.model)

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the state that `state_dict` returned. Load the model's weights first.

        Without this call scales restart from new amaxes. The next step then logs a message.

        Raises:
            ValueError: The state belongs to other FP8 layers. Nothing was changed.
        """
        load_fp8_state_dict(self.model, state_dict)

    def prove(self) -> Coverage:
        """Returns what ran since the conversion and checks it. Call it after the first step.

        Layers that a step skips, missing gradients and evaluations are not errors.

        Raises:
            NotFP8Error: A layer did not run as planned, ran in training outside of the autocast
                context, or less than fp8.min_coverage ran in FP8.
        """
        return prove(self.model, self.plan, self.choice, self.fp8)

    def __str__(self) -> str:
        backend = wrapped(f"backend {self.choice.backend} ({self.choice.why})", more="  ")
        return f"{backend}\n{coverage_of_layers(self.plan, other_parameters(self.model), self.fp8)}"

    __repr__ = __str__


def convert_model(
    model: nn.Module, recipe: Any, linear: Collection[type[nn.Linear]] = ()
) -> Conversion:
    """Replaces the linear layers of a model by FP8 layers, in place.

    Parameters stay the same objects, so tied weights stay tied and frozen weights stay frozen.
    Hooks, dtypes, devices and training flags do not change.

    Args:
        model: The model, on its device. The device decides how GEMMs run.
        recipe: A Recipe, a Precision, or the name of a preset such as "bf16_fp8". FP8 recipes of
            Transformer Engine and kwargs handlers of Accelerate are imported.
        linear: Subclasses of nn.Linear to convert as well. Their forward may only cast input and
            weight and call F.linear. Most such classes are detected by running a small copy.

    Returns:
        The conversion, with the autocast context and the scale updates.

    Raises:
        ConfigError: The recipe cannot run here or reaches no layer. Nothing was replaced.
    """
    recipe = to_recipe(recipe)
    fp8 = _fp8_of(recipe, model)
    if _converted_layers(model) or has_fp8_layers(model):
        raise ConfigError(
            "convert_model: the model has FP8 layers already; call"
            " fp8cfg.convert_back(model) to remove layers of fp8cfg"
        )
    choice = choose(recipe.precision, _hardware(model))
    if registry.capabilities(choice.backend).own_state:
        raise ConfigError(
            f"backend={choice.backend}: its layers are trained only by its own optimizer; set"
            " backend=native, or use fp8cfg.build(recipe, model=model)"
        )
    holder = nn.Module()
    holder.model = model
    # A root module has no parent to hold its replacement, so a single layer gets one.
    root = holder if _is_single_layer(model) else model
    norms = registry.capabilities(choice.backend).norms
    plan = plan_model(root, fp8, registry.rules(choice.backend).misfit, linear, norms)
    # Backends replace nn.Linear only. Conv1D and 1x1 convolutions become nn.Linear first, and
    # `attach_layouts` restores their state-dict layout afterwards.
    originals = linear_like.to_linear(root, plan)
    try:
        registry.backend(choice.backend).convert(root, fp8, plan, Region(), choice.product)
    except ConfigError:
        linear_like.restore_modules(root, originals)
        raise
    linear_like.attach_layouts(root, originals)
    seed_rounding(model, recipe.trainer.seed)
    mark(root, fp8, plan, choice)
    conversion_state.watch(root)
    checks.watch(root)
    # Quantized weights may be cached between microbatches: `Conversion.step` marks the step's end.
    for layer in fp8_linears(root):
        layer.weight_cache.in_loop = True
    return Conversion(holder.model, plan, choice, fp8)


def convert_back(model: nn.Module) -> nn.Module:
    """Replaces each FP8 layer of a model by nn.Linear with the same Parameters, in place.

    Weights that were stored only in FP8 or in a low-bit codec are dequantized. They get the dtype
    of most other matrices.

    Args:
        model: A converted model.

    Returns:
        `model`, or its replacement if it is a single FP8 layer.

    Raises:
        ConfigError: `model` is not an nn.Module, or FSDP2 has sharded it.
    """
    expect("convert_back", model, nn.Module, "a torch.nn.Module, such as job.model")
    if _has_layer_of(model, "torch.distributed.fsdp"):
        raise ConfigError(
            "convert_back: FSDP2 has sharded the model, so its layers cannot be replaced; a"
            " checkpoint has whole weights (model.safetensors)"
        )
    holder = nn.Module()
    holder.model = model
    originals = linear_like.original_modules(holder)
    dtype = _plain_dtype(model)
    stored_weights.restore_weights(holder, dtype)
    for name, layer in list(holder.named_modules()):
        for backend in registry.loaded_backends():
            plain = backend.plain(layer)
            if plain is None:
                continue
            # A backend returns the same Parameter if the weight is not quantized. Only a new,
            # dequantized weight is cast.
            is_linear = isinstance(plain, nn.Linear)
            if is_linear and plain.weight is not layer._parameters.get("weight"):
                plain.weight.data = plain.weight.data.to(dtype)
            replace_module(holder, name, plain)
    unmark(holder)
    checks.unwatch(holder)
    linear_like.restore_modules(holder, originals)
    return holder.model


def _plain_dtype(model: nn.Module) -> torch.dtype:
    """Returns the dtype for dequantized weights. It must match the other layers of `model`.

    Most other matrices decide. Without any, the biases of the quantized layers decide, then other
    vectors. Norms come last, because they may stay float32 in a bfloat16 model.
    """
    quantized: list[Any] = [*codec_layers(model)]
    quantized += [layer for layer in fp8_linears(model) if layer.is_encoded]
    quantized_weights = {layer.parameter for layer in quantized}
    unquantized = []
    for p in model.parameters():
        if p.is_floating_point() and p.dtype.itemsize > 1 and p not in quantized_weights:
            unquantized.append(p)
    matrices = [p for p in unquantized if p.dim() > 1]
    biases = [layer.bias for layer in quantized if getattr(layer, "bias", None) is not None]
    counts = Counter(p.dtype for p in matrices or biases or unquantized)
    if not counts:
        return torch.float32
    return counts.most_common(1)[0][0]


def has_fp8_layers(model: nn.Module) -> bool:
    """Returns whether any layer of the model can multiply in FP8.

    Layers of fp8cfg, torchao's Float8Linear and layers of Transformer Engine count. A layer does
    not count if it only stores its weight in a low-bit codec.

    Raises:
        ConfigError: `model` is not an nn.Module.
    """
    expect("has_fp8_layers", model, nn.Module, "a torch.nn.Module, such as job.model")
    for layer in _converted_layers(model):
        # An FP8Linear that only stores its weight in a codec has three GEMMs in high precision.
        if not all(getattr(layer, "high_precision", (False,))):
            return True
    for name in registry.names():
        for module in registry.capabilities(name).layer_modules:
            if _has_layer_of(model, module):
                return True
    return False


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Returns whether the model has layers of Transformer Engine.

    They may still run in high precision. Use `coverage` to see what ran.

    Raises:
        ConfigError: `model` is not an nn.Module.
    """
    expect(
        "has_transformer_engine_layers", model, nn.Module, "a torch.nn.Module, such as job.model"
    )
    return _has_layer_of(model, "transformer_engine") or _has_layer_of(
        model, "fp8cfg.backends.te.layers"
    )


def prove(model: nn.Module, plan: Sequence[PlannedLinear], choice: Choice, fp8: FP8) -> Coverage:
    """Returns what ran in `model` since its conversion.

    Args:
        model: The converted model, or a wrapper around it.
        plan: The plan of the conversion.
        choice: The backend of the conversion.
        fp8: The FP8 settings, for fp8.min_coverage.

    Raises:
        NotFP8Error: A layer did not run as planned, or less than fp8.min_coverage ran in FP8.
    """
    observed = registry.backend(choice.backend).observed(model)
    # A library may swap layers after the conversion, for example to add adapters. Replaced layers
    # would otherwise be missing from the record.
    lines = conversion_state.replaced_layers(model, plan)
    lines += not_engaged(conversion_state.with_current_names(model, plan), observed)
    if lines:
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        raise NotFP8Error(f"this model did not run as planned: {'; '.join(lines[:3])}{more}")
    observed_coverage = coverage(model)
    if observed_coverage.share < fp8.min_coverage:
        raise NotFP8Error(
            f"fp8.min_coverage={fp8.min_coverage:g}: {observed_coverage.share:.1%} of"
            f" {observed_coverage.denominator} ran in FP8"
        )
    warn_of_low_coverage(model, observed_coverage)
    return observed_coverage


def adapt_recipe(recipe: Recipe, model: nn.Module) -> Recipe:
    """Returns a copy of `recipe`, adapted to the layers of `model` and checked.

    Raises:
        ConfigError: With every problem.
    """
    refuse_if(argument_errors(recipe, model))
    refuse_if(unsupported_settings(recipe))
    recipe = recipe.model_copy(deep=True)
    lists = layer_lists(model)
    # The rules check fp8.high_precision_at_start and fp8.high_precision_at_end against it.
    recipe.model.num_layers = max(lists.values(), default=recipe.model.num_layers)
    recipe = resolved_for_build(fit_layers(recipe, lists))
    recipe.check()
    return recipe


def argument_errors(recipe: Recipe, model: nn.Module) -> list[str]:
    """Returns an error for each argument of the wrong type."""
    errors = recipe_errors(recipe)
    if not isinstance(model, nn.Module):
        errors.append(f"expected a torch.nn.Module, got {type(model).__name__}")
    return errors


def recipe_errors(argument: Any) -> list[str]:
    """Returns an error if `argument` is not a Recipe."""
    if isinstance(argument, Recipe):
        return []
    return [
        f"expected a Recipe, got {type(argument).__name__}; compose(['precision=bf16_fp8']) gives"
        " one"
    ]


def prepare_build(recipe: Recipe, model: nn.Module) -> tuple[Recipe, nn.Module]:
    """Returns the adapted recipe and the model for `fp8cfg.build` with a custom model.

    Raises:
        ConfigError: The recipe does not fit the model, or the model has FP8 layers already.
    """
    recipe = adapt_recipe(recipe, model)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(
            "build: no parameter of the model requires a gradient, so there is nothing to train;"
            " set requires_grad, or use fp8cfg.convert_model(model, recipe)"
        )
    if recipe.trainer.compile == "on":
        raise ConfigError(
            "trainer.compile=on: has no effect on a custom model; remove it, call"
            " job.compile_model() and run job.forward in your loop"
        )
    if _converted_layers(model) or has_fp8_layers(model):
        raise ConfigError(
            "build: the model has FP8 layers already; call fp8cfg.convert_back(model) to"
            " remove layers of fp8cfg"
        )
    # The root cannot be replaced in place, so a single layer gets a parent.
    if _is_single_layer(model):
        return recipe, nn.Sequential(model)
    return recipe, model


def _is_single_layer(model: nn.Module) -> bool:
    """Whether the model itself is a layer that the conversion replaces."""
    return isinstance(model, nn.Linear) or layout_of(model) is not None


def _fp8_of(recipe: Recipe, model: nn.Module) -> FP8:
    """Returns the FP8 settings for `model`. Raises ConfigError for settings without effect here."""
    precision = without_fp8_params(adapt_recipe(recipe, model)).precision
    fp8 = precision.fp8
    if not fp8.enabled:
        raise ConfigError(
            f"convert_model: precision.compute={precision.compute} runs no FP8; set"
            " precision=bf16_fp8"
        )
    storage_settings = [*changed(precision.storage)]
    if precision.opt_level:
        storage_settings.insert(0, f"opt_level={precision.opt_level}")
    refuse_if(
        [
            f"{setting}: has no effect in convert_model, which keeps parameters and optimizer as"
            " they are; use fp8cfg.build(recipe, model=model)"
            for setting in storage_settings
        ]
    )
    if fp8_weights(precision):
        raise ConfigError(
            "fp8.params=true: weights stored only in FP8 need an optimizer with master weights;"
            " fp8cfg.build(recipe, model=model) makes one, or set fp8.params=false"
        )
    return fp8


def _hardware(model: nn.Module) -> Hardware:
    """Returns the hardware that `model` runs on.

    A model on the meta device gets its memory later: on the GPU, if the machine has one.
    """
    device = "cpu"
    is_on_meta = any(p.is_meta for p in model.parameters())
    if _is_on_gpu(model) or (is_on_meta and torch.cuda.is_available()):
        device = "cuda"
    return find_hardware(device)


def _is_on_gpu(model: nn.Module) -> bool:
    """Whether any parameter of `model` is on a GPU."""
    return any(p.is_cuda for p in model.parameters())


def refuse_emulation_on_gpu(model: nn.Module, choice: Choice, fp8: FP8) -> None:
    """Checks that a model was not moved to a GPU after its conversion.

    Args:
        model: The converted model.
        choice: The backend of the conversion, and how it multiplies.
        fp8: The FP8 settings of the conversion.

    Raises:
        ConfigError: Layers that were converted elsewhere would emulate FP8 on a GPU.
    """
    if torch.compiler.is_compiling() or choice.product != "emulate" or fp8.emulate:
        return
    if _is_on_gpu(model):
        raise ConfigError(
            "convert_model: the model is on a GPU, but was not when it was converted, so its layers"
            " only emulate FP8; move it to the GPU before convert_model, or set fp8.emulate=true"
        )


def _converted_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the layers that a backend converted, and layers with weights in a codec."""
    layers = []
    for backend in registry.loaded_backends():
        layers += [model.get_submodule(name) for name in backend.observed(model)]
    return layers


def _has_layer_of(model: nn.Module, package: str) -> bool:
    """Returns whether a layer of `model`, or a base class of one, comes from `package`."""
    for module in model.modules():
        for base in type(module).__mro__:
            if f"{base.__module__}.".startswith(f"{package}."):
                return True
    return False
