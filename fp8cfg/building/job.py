"""Job: a built recipe, with its model, optimizer, schedule and autocast context, for `fit` or a training loop of your own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NoReturn

from fp8cfg.backends import registry
from fp8cfg.backends.autocast import AutocastContext, autocast
from fp8cfg.backends.choice import Choice
from fp8cfg.backends.gemm_plan import PlannedLinear
from fp8cfg.backends.protocol import PreparedModel
from fp8cfg.models.config import parameter_shapes
from fp8cfg.optim import Schedule
from fp8cfg.planning.coverage import (
    Coverage,
    coverage_of_layers,
    observed_coverage,
    planned_coverage,
    prove_engagement,
    warn_of_low_coverage,
)
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema import scalings
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.precision import Precision
from fp8cfg.schema.recipe import Recipe
from fp8cfg.schema.scalings import SCALINGS
from fp8cfg.schema.storage import resolved
from fp8cfg.schema.tables import amount, wrapped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fp8cfg.backends.protocol import Observed
    from fp8cfg.optim import LossScaler
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
    from fp8cfg.optim.scheduler import StepScheduler
    from fp8cfg.planning.communication import Sent


def summary(
    recipe: Recipe,
    plan: Sequence[PlannedLinear],
    choice: Choice,
    model: str,
    parameters: int,
    device: str,
    steps: int,
    foreign: bool,
) -> str:
    """The lines of a job whose model has the class `model` and so many `parameters`, after `steps` optimizer steps; `foreign` says
    that the model was given."""
    from_recipe = "given" if foreign else f"recipe {recipe.name}"
    rows = {
        "model": f"{model} ({from_recipe}), {amount(parameters)} parameters, on {device}",
        "precision": precision(recipe),
        "backend": f"{choice.backend}: {choice.why}",
        "coverage": _coverage(recipe, plan, foreign),
        "optimizer": _optimizer(recipe),
        "schedule": _schedule(recipe),
        "state": f"{steps} of {recipe.trainer.max_steps} optimizer steps done",
    }
    return "\n".join(wrapped(text, f"{name:11}", " " * 11) for name, text in rows.items())


def parameter_count(recipe: Recipe) -> int:
    """Parameters of the Transformer of a recipe, all of them."""
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))


def make_schedule(recipe: Recipe) -> Schedule:
    """Returns the learning-rate schedule of `recipe`."""
    optim = recipe.optim
    return Schedule(
        max_lr=optim.lr,
        min_lr=optim.end_lr,
        warmup_steps=optim.warmup_steps,
        max_steps=recipe.trainer.max_steps,
        constant_steps=optim.constant_steps,
        decay=optim.lr_decay_style,
    )


def precision(recipe: Recipe) -> str:
    """The precision of a recipe in a few words."""
    p, f = recipe.precision, recipe.fp8
    if not f.enabled:
        return f"{p.compute}, no FP8"
    history = (
        f", history {f.amax_history_len} {f.amax_compute_algo}, margin {f.margin}"
        if SCALINGS[f.scaling].history
        else ""
    )
    return f"{p.compute}, {scalings.title(f.scaling)} {f.format}{history}" + (
        f", opt_level {p.opt_level}" if p.opt_level else ""
    )


def _coverage(recipe: Recipe, plan: Sequence[PlannedLinear], foreign: bool) -> str:
    """The planned share. Of a given model the weights are known, not how often each multiplies."""
    if not recipe.fp8.enabled:
        return "no FP8 planned"
    coverage = (
        coverage_of_layers(plan, (), recipe.fp8) if foreign else planned_coverage(recipe, plan)
    )
    what = "their weights" if foreign else coverage.what
    return (
        f"{coverage.layers_in_fp8} of {len(plan)} linear layers planned in FP8,"
        f" {coverage.share:.1%} of {what}; job.prove() shows what ran"
    )


def _optimizer(recipe: Recipe) -> str:
    o, columns, clip = recipe.optim, resolved(recipe.precision), recipe.trainer.gradient_clip_val
    masters = (
        "no masters"
        if columns["master_weight"] == "none"
        else f"{columns['master_weight']} masters"
    )
    moments = (
        ""
        if o.name == "sgd"
        else f", moments {'/'.join(dict.fromkeys((columns['exp_avg'], columns['exp_avg_sq'])))}"
    )
    clipped = f"gradients clipped at {clip:g}" if clip else "no clipping"
    return (
        f"{o.name}, weights {columns['weight']}, {masters}{moments}, weight decay"
        f" {o.weight_decay:g}, {clipped}"
    )


def _schedule(recipe: Recipe) -> str:
    o, steps = recipe.optim, recipe.trainer.max_steps
    end = (
        ""
        if o.lr_decay_style == "constant"
        else f" to {o.end_lr:g} at step {steps - o.constant_steps}"
    )
    return (
        f"{o.lr_decay_style}: {o.warmup_steps} warm-up steps to lr"
        f" {o.lr:g}{', then' if end else ''}{end}"
    )


class JobAutocast:
    """Makes the contexts in which a job's FP8 layers multiply in FP8. Outside they run in high precision.

    A context can be entered any number of times, also inside of itself. Around a custom model it
    also enters torch.autocast in the compute dtype, which takes losses and norms in float32. With
    activation checkpointing stay inside until the backward pass is done: it repeats forward passes.

    Attributes:
        torch_dtype: "bf16" or "fp16" for a custom model in that dtype. Empty otherwise: the
            recipe's own Transformer casts by itself.
    """

    def __init__(
        self, prepared: PreparedModel, choice: Choice, precision: Precision, custom_model: bool
    ) -> None:
        self.prepared = prepared
        self.backend = choice.backend
        self.fp8_enabled = precision.fp8.enabled
        self.torch_dtype = ""
        if custom_model and precision.compute != "fp32":
            self.torch_dtype = precision.compute
        self._frozen = {}
        for name, parameter in prepared.model.named_parameters():
            if not parameter.requires_grad:
                self._frozen[name] = parameter

    def __call__(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context in which FP8 layers multiply in FP8, or in high precision if not `enabled`."""
        from fp8cfg.backends.any_model import checks

        model = self.prepared.model
        backend = registry.backend(self.backend)

        def enter() -> AbstractContextManager[None]:
            self.check_frozen()
            if self.has_fp8_layers():
                checks.entered(model, enabled)
            return autocast(backend, model, enabled, self.torch_dtype)

        return AutocastContext(enter)

    def has_fp8_layers(self) -> bool:
        """Whether layers were converted to FP8. A pipeline stage may have none of them."""
        from fp8cfg.backends.any_model.conversion_state import PLANNED

        if not self.fp8_enabled:
            return False
        if self.prepared.pipeline is None:
            return True
        return any(PLANNED in vars(layer) for layer in self.prepared.model.modules())

    def check_frozen(self) -> None:
        """Raises ConfigError if a parameter that was frozen at build time requires a gradient now."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name}: was frozen when the job was built, so the optimizer does not train"
                    " it; unfreeze it before fp8cfg.build, or build another job from this one's"
                    " plain model: fp8cfg.convert_back(copy.deepcopy(job.model))"
                )


@dataclass(repr=False)
class Job:
    """A built recipe. A loop of one's own:

        with job.autocast():
            loss = job.model(tokens, targets)
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step(); job.optimizer.zero_grad()

    A loop that calls `backward` and steps a scheduler by itself, such as Accelerate's, takes `scaled(loss)` and `scheduler()`.

    `optimizer` holds `model`'s parameters; its step also rolls FP8 histories and moves scales. `plan` is what each linear
    layer is meant to do, `choice` the backend that does it; `foreign` says that the model was given. `forward` is `model`,
    compiled where `compile_model` was called, as `compiled` says. `summed` says that the gradients of this step were added up over
    the ranks. `steps_begun` counts the calls of the optimizer's step, also those that failed. `sent_in_pass` is what this rank sends
    in the passes of a microbatch, by its samples, once that was counted.
    """

    recipe: Recipe
    prepared: PreparedModel
    optimizer: MixedPrecisionOptimizer | LowBitTraining
    schedule: Schedule
    autocast: JobAutocast
    plan: Sequence[PlannedLinear]
    choice: Choice
    loss_scaler: LossScaler | None
    foreign: bool = False
    forward: Callable[..., Any] = field(init=False)
    compiled: bool = field(init=False, default=False)
    _scales: bool = field(init=False, default=False)
    summed: bool = field(init=False, default=False)
    steps_begun: int = field(init=False, default=0)
    sent_in_pass: dict[int, list[Sent]] = field(init=False, default_factory=dict)
    _sums_checked: bool = field(init=False, default=False)
    _trainer_checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.forward = self.prepared.model
        self.optimizer.fp8_state = self
        self.optimizer.register_step_pre_hook(lambda *_: self.autocast.check_frozen())
        self.optimizer.register_step_pre_hook(lambda *_: self._check_sums())
        if self.recipe.fp8.enabled:
            self.optimizer.register_step_pre_hook(lambda *_: self._check_first_pass())
        self.optimizer.register_step_pre_hook(lambda *_: self._check_trainer())
        self.optimizer.register_step_pre_hook(lambda *_: self._count_step())  # after the checks
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "summed", False))
        if self.foreign and self.recipe.fp8.enabled:
            from fp8cfg.backends.any_model import conversion_state

            conversion_state.watch(self.prepared.model)

    def __repr__(self) -> str:
        model = self.prepared.model
        count = (
            sum(p.numel() for p in model.parameters())
            if self.prepared.mesh is None
            else parameter_count(self.recipe)
        )
        return summary(
            self.recipe,
            self.plan,
            self.choice,
            type(model).__name__,
            count,
            str(self.device),
            self.optimizer.steps,
            self.foreign,
        )

    @property
    def model(self) -> torch.nn.Module:
        """The model, on its device and in its precision."""
        return self.prepared.model

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.prepared.device

    def state_dict(self) -> dict[str, Tensor]:
        """FP8 state of the model by name, copies: scales, amax histories, counts of random draws, and weights that are stored in
        FP8 or in a codec with a scale as they are stored. `model.state_dict()` has none of it; `optimizer.state_dict()` carries it
        along."""
        from fp8cfg.numerics.stored_state import fp8_state_dict

        return fp8_state_dict(self.model) | self._coded()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """The inverse of `state_dict`: load the model's weights first, and the optimizer's state, where it is loaded by itself,
        afterwards. Raises ValueError, before anything is changed, for the state of other FP8 layers.
        """
        from fp8cfg.numerics.stored_state import load_fp8_state_dict

        made = self._coded().keys()  # of the masters
        load_fp8_state_dict(
            self.model, {name: t for name, t in state_dict.items() if name not in made}
        )

    def backward(self, loss: Tensor, parts: float | Tensor = 1) -> None:
        """The backward pass of `loss`, which is one of `parts` shares of a step's mean loss, times the loss scale under fp16. Where
        microbatches have unlike numbers of targets, `parts` is all targets of the step over those of `loss`, a number or a float64
        [] on the device. Shares are weighed here and summed, over microbatches and ranks alike, so that FP8 sees gradients of one
        size however a batch is cut."""
        from fp8cfg.optim.loss_scale import loss_factors

        self._scales = True
        (factor,) = loss_factors(self.loss_scaler, [parts])
        (loss * factor if isinstance(factor, float) else loss.float() * factor).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """`loss` itself, with its gradient to be multiplied by the loss scale under fp16, for a backward pass not our own:
        `accelerator.backward(job.scaled(loss))`."""
        self._scales = True
        if self.loss_scaler is not None:
            scale = self.loss_scaler.scale
            loss.register_hook(lambda gradient: gradient * scale)
        return loss

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks of the process group, each in the codec of storage.comm; nothing where there is one
        rank. Once for each step of the optimizer, after its last microbatch. A rank's loss is its share: divided by the ranks.

        It stands in the place of DistributedDataParallel, which refuses FP8 weights and float32 gradients of other weights. Raises
        RuntimeError where they were summed since the last step: they would be multiplied by the ranks. A step of several ranks
        without it warns once. Under FSDP2 each backward pass has summed, and what tensor-parallel ranks share is left.
        """
        from fp8cfg.parallel.gradient_sync import sum_gradients
        from fp8cfg.parallel.process_group import current

        if self.summed:
            raise RuntimeError(
                "the gradients of this step were summed already; call job.sum_gradients() after its"
                " last microbatch"
            )
        world = current()
        sum_gradients(self.prepared, self.optimizer, world)
        self.summed = world.size > 1

    def scheduler(self) -> StepScheduler:
        """`schedule` as a torch scheduler of `optimizer`, for a loop that steps one; do not apply `schedule` beside it. Under fp16
        a step then raises RuntimeError where no loss was multiplied by the loss scale."""
        from fp8cfg.optim.scheduler import StepScheduler

        if self.loss_scaler is not None:
            self.optimizer.register_step_pre_hook(lambda *_: self._refuse_unscaled())
        return StepScheduler(self.optimizer, self.schedule)

    def trainer_callback(self) -> Any:
        """A callback for transformers.Trainer, beside `optimizers=(job.optimizer, job.scheduler())`. Before the first step it
        raises ConfigError for TrainingArguments that the recipe contradicts, and says in a line whose words count; it sets
        max_grad_norm to 0, for `optimizer` clips. Without it the first step does so, after the Trainer has clipped once.
        """
        from fp8cfg.interop.hf_trainer import callback

        self._trainer_checked = True
        return callback(self.recipe, self.optimizer)

    def prove(self) -> Coverage:
        """What ran since the model was built, on all stages of a pipeline, whose ranks all call it. Raises NotFP8Error where that
        is not what was planned, or less than fp8.min_coverage: call it after the first step."""
        return prove_engagement(self.recipe, self.model, self.plan, self._observed(), self.foreign)

    def _observed(self) -> Observed:
        """What the call sites of the products recorded, over all stages of a pipeline, whose ranks all call it."""
        own = registry.backend(self.choice.backend).observed(self.model)
        if self.prepared.pipeline is None:
            return own
        from fp8cfg.parallel.process_group import pipeline_world

        every = [json.loads(text) for text in pipeline_world(self.prepared).texts(json.dumps(own))]
        return {
            name: {
                gemm: tuple(kinds) if isinstance(kinds, list) else kinds
                for gemm, kinds in ran.items()
            }
            for stage in every
            for name, ran in stage.items()
        }

    def compile_model(self) -> None:
        """Let `forward`, in training, be the compiled model, a recipe's Transformer layer by layer, and the step of a low-bit
        optimizer be compiled; a graph break is an error."""
        from fp8cfg.backends.compiled_layers import compile_layers, weights_ready

        if self.foreign:
            self.forward = weights_ready(self.model, self.compiler()(self.model))
        else:
            layers: Any = self.model.layers
            compile_layers(layers.children(), self.compiler())
        self.compiled = self.optimizer.compiled = True

    def compiler(self) -> Callable[[Any], Any]:
        """torch.compile with the options of this job."""
        import warnings

        import torch

        from fp8cfg.backends.compiled_layers import compile_options

        # Where fp16_scaled weights are read into bf16. Both passes are compiled as they first run, the backward pass outside of
        # any call of ours, so the filters outlive this one; they are of these lines of torch's alone. Seen with torch 2.13; it ends
        # with the torch that warns of neither.
        warnings.filterwarnings(
            "ignore", "bf16 and fp16 are mixed", UserWarning, r"torch\._inductor\.codegen\.cpp$"
        )
        # Of weights that were gathered in FP8: a graph with them is not cached on disk.
        warnings.filterwarnings(
            "ignore", "Float8TrainingTensor does not implement", UserWarning, r"torch\._functorch\."
        )
        options = compile_options(self.device.type)
        return partial(torch.compile, fullgraph=True, dynamic=False, options=options)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        if self.prepared.fsdp2:
            from fp8cfg.parallel.fsdp_refusals import copy_refusal

            raise TypeError(
                f"a Job cannot be copied, nor its model: {copy_refusal(self.prepared.shard)}"
            )
        raise TypeError(
            "a Job cannot be copied, its optimizer belongs to one model; build another, or copy"
            " job.model: fp8cfg.convert_back(copy.deepcopy(job.model)) gives plain weights,"
            " fp8cfg.averaged(job) an average (EMA)"
        )

    def _coded(self) -> dict[str, Tensor]:
        """What FP8 state has of weights that FSDP2 makes of their masters."""
        if not self.prepared.fsdp2 or self.prepared.shard != "none":
            return {}
        from fp8cfg.parallel.sharded_state import encoded_weights

        return encoded_weights(self.prepared)

    def _count_step(self) -> None:
        self.steps_begun += 1

    def _check_first_pass(self) -> None:
        from fp8cfg.backends.any_model import checks

        if (
            self.autocast.has_fp8_layers() and checks.check(self.model) and self.foreign
        ):  # `fit` says it of our own
            warn_of_low_coverage(
                self.model,
                observed_coverage(
                    self.recipe, self.model, self.plan, self._observed(), self.foreign
                ),
            )

    def _check_sums(self) -> None:
        if (
            self.summed
            or self._sums_checked
            or (self.prepared.fsdp2 and self.prepared.tensor_parallel is None)
        ):
            return
        from fp8cfg.backends.any_model.checks import warn_of_sums

        self._sums_checked = True
        warn_of_sums(self.model)

    def _check_trainer(self) -> None:
        if self._trainer_checked:
            return
        from fp8cfg.interop.hf_trainer import running, settle

        self._trainer_checked = True
        if (trainer := running()) is not None:
            settle(self.recipe, trainer.args, trainer.state.max_steps, clipped=True)

    def _refuse_unscaled(self) -> None:
        if not self._scales:
            raise RuntimeError(
                "the optimizer divides gradients by the loss scale of fp16, and no loss was"
                " multiplied by it; call job.backward(loss), or job.scaled(loss) before another"
                " backward"
            )
