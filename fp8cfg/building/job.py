"""Job: a built recipe, for `fit` or your own training loop."""

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
from fp8cfg.planning import layout
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
    from fp8cfg.optim import LossScaler, Schedule
    from fp8cfg.optim.low_bit.adam import LowBitTraining
    from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer
    from fp8cfg.optim.scheduler import StepScheduler
    from fp8cfg.parallel.process_group import World
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
    """Returns the summary that `print(job)` shows.

    Args:
        recipe: The recipe of the job.
        plan: The planned GEMMs.
        choice: The backend.
        model: Class name of the model.
        parameters: Number of parameters, over all ranks.
        device: Device of the model.
        steps: Optimizer steps done.
        foreign: Whether the model is a custom model.
    """
    origin = "given" if foreign else f"recipe {recipe.name}"
    rows = {
        "model": f"{model} ({origin}), {amount(parameters)} parameters, on {device}",
        "precision": precision(recipe),
        "backend": f"{choice.backend}: {choice.why}",
        "coverage": _coverage(recipe, plan, foreign),
        "optimizer": _optimizer(recipe),
        "schedule": _schedule(recipe),
        "state": f"{steps} of {recipe.trainer.max_steps} optimizer steps done",
    }
    return "\n".join(wrapped(text, f"{name:11}", " " * 11) for name, text in rows.items())


def parameter_count(recipe: Recipe) -> int:
    """Returns the number of parameters of the recipe's Transformer, over all ranks."""
    return sum(map(prod, parameter_shapes(transformer_config(recipe)).values()))


def precision(recipe: Recipe) -> str:
    """Returns a short description of the recipe's precision."""
    p, f = recipe.precision, recipe.fp8
    if not f.enabled:
        return f"{p.compute}, no FP8"
    parts = [p.compute, f"{scalings.title(f.scaling)} {f.format}"]
    if SCALINGS[f.scaling].history:
        parts += [f"history {f.amax_history_len} {f.amax_compute_algo}", f"margin {f.margin}"]
    if p.opt_level:
        parts.append(f"opt_level {p.opt_level}")
    return ", ".join(parts)


def _coverage(recipe: Recipe, plan: Sequence[PlannedLinear], foreign: bool) -> str:
    """Describes the planned share of FP8."""
    if not recipe.fp8.enabled:
        return "no FP8 planned"
    if foreign:
        # How often a custom model runs each layer is unknown, so the share counts weights, not
        # FLOPs.
        coverage = coverage_of_layers(plan, (), recipe.fp8)
        unit = "their weights"
    else:
        coverage = planned_coverage(recipe, plan)
        unit = coverage.denominator
    return (
        f"{coverage.layers_in_fp8} of {len(plan)} linear layers planned in FP8,"
        f" {coverage.share:.1%} of {unit}; job.prove() shows what ran"
    )


def _optimizer(recipe: Recipe) -> str:
    """Describes the optimizer and the dtypes of its state."""
    optim = recipe.optim
    columns = resolved(recipe.precision)
    clip = recipe.trainer.gradient_clip_val
    parts = [optim.name, f"weights {columns['weight']}"]
    if columns["master_weight"] == "none":
        parts.append("no masters")
    else:
        parts.append(f"{columns['master_weight']} masters")
    if optim.name != "sgd":
        moments = dict.fromkeys((columns["exp_avg"], columns["exp_avg_sq"]))
        parts.append(f"moments {'/'.join(moments)}")
    parts.append(f"weight decay {optim.weight_decay:g}")
    parts.append(f"gradients clipped at {clip:g}" if clip else "no clipping")
    return ", ".join(parts)


def _schedule(recipe: Recipe) -> str:
    """Describes the learning-rate schedule."""
    optim = recipe.optim
    text = f"{optim.lr_decay_style}: {optim.warmup_steps} warm-up steps to lr {optim.lr:g}"
    if optim.lr_decay_style != "constant":
        last_step = recipe.trainer.max_steps - optim.constant_steps
        text += f", then to {optim.end_lr:g} at step {last_step}"
    return text


class JobAutocast:
    """Makes autocast contexts for a job. FP8 layers run in FP8 inside, in high precision outside.

    A context can be nested and entered several times. For a custom model it also enters
    torch.autocast in the compute dtype, so losses and norms run in float32. With activation
    checkpointing, run the backward pass inside the context too: it repeats forward passes.

    Args:
        prepared: The model.
        choice: Backend of the FP8 layers.
        precision: Precision of the recipe.
        custom_model: Whether the model is a custom model.

    Attributes:
        torch_dtype: Dtype of torch.autocast for a custom model, "bf16" or "fp16". Empty without
            torch.autocast: the recipe's own Transformer casts by itself.
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
        # The optimizer was built without these. `check_frozen` reports one that is trained later.
        self._frozen = {}
        for name, parameter in prepared.model.named_parameters():
            if not parameter.requires_grad:
                self._frozen[name] = parameter

    def __call__(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Returns a context. FP8 layers run in FP8 inside, or in high precision if not `enabled`."""
        from fp8cfg.backends.any_model import checks

        model = self.prepared.model
        backend = registry.backend(self.backend)

        def enter() -> AbstractContextManager[None]:
            """Makes a new context at each entry, so one object can be entered again."""
            self.check_frozen()
            if self.has_fp8_layers():
                checks.note_context(model, enabled)
            return autocast(backend, model, enabled, self.torch_dtype)

        return AutocastContext(enter)

    def has_fp8_layers(self) -> bool:
        """Whether this rank's model has FP8 layers. A pipeline stage may have none."""
        from fp8cfg.backends.any_model.conversion_state import PLANNED

        if not self.fp8_enabled:
            return False
        # Only a pipeline stage can be without FP8 layers, so other jobs need no search.
        if self.prepared.pipeline is None:
            return True
        return any(PLANNED in vars(layer) for layer in self.prepared.model.modules())

    def check_frozen(self) -> None:
        """Raises ConfigError if the user has unfrozen a parameter after the build."""
        for name, parameter in self._frozen.items():
            if parameter.requires_grad:
                raise ConfigError(
                    f"{name}: was frozen when the job was built, so the optimizer does not train"
                    " it; unfreeze it before fp8cfg.build, or build another job from this one's"
                    " plain model: fp8cfg.convert_back(copy.deepcopy(job.model))"
                )


@dataclass(repr=False)
class Job:
    """A built recipe: model, optimizer, schedule and autocast context.

    Train it with `fp8cfg.fit`, or in your own loop:

        with job.autocast():
            loss = job.model(tokens, targets)
            job.backward(loss)
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step(); job.optimizer.zero_grad()

    If a library such as Accelerate calls `backward` and steps a scheduler, use `scaled(loss)` and
    `scheduler()` instead.

    Attributes:
        recipe: A copy of the recipe.
        prepared: The model with its masters and its layout over ranks.
        optimizer: The optimizer of the model's parameters. Its step also rolls FP8 histories and
            updates scales.
        schedule: The learning-rate schedule.
        autocast: Makes the contexts in which FP8 layers multiply in FP8.
        plan: The planned operand formats of each linear layer.
        choice: The backend of the FP8 layers.
        loss_scaler: The loss scale of fp16, otherwise None.
        foreign: Whether the model is a custom model.
        forward: The model, compiled after `compile_model`.
        compiled: Whether `compile_model` was called.
        summed: Whether `sum_gradients` was called in this step.
        steps_begun: Calls of the optimizer's step, failed ones included.
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
    _traffic: dict[int, list[Sent]] = field(init=False, default_factory=dict)
    _sums_checked: bool = field(init=False, default=False)
    _trainer_checked: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.forward = self.prepared.model
        # Trainer, Accelerate and Fabric save only the model and the optimizer. The optimizer's
        # state dict carries the FP8 state.
        self.optimizer.fp8_state = self
        self.optimizer.register_step_pre_hook(lambda *_: self.autocast.check_frozen())
        self.optimizer.register_step_pre_hook(lambda *_: self._check_sums())
        if self.recipe.fp8.enabled:
            self.optimizer.register_step_pre_hook(lambda *_: self._check_first_pass())
        self.optimizer.register_step_pre_hook(lambda *_: self._check_trainer())
        # Hooks run in this order. A step with a failed check is not counted.
        self.optimizer.register_step_pre_hook(lambda *_: self._count_step())
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "summed", False))
        if self.foreign and self.recipe.fp8.enabled:
            from fp8cfg.backends.any_model import conversion_state

            # Custom models may run a layer several times. Its rows are counted for the FLOPs of
            # `prove`.
            conversion_state.watch(self.prepared.model)

    def __repr__(self) -> str:
        model = self.prepared.model
        # A rank of a mesh has only parts of the parameters, so the count comes from the recipe.
        if self.prepared.mesh is None:
            count = sum(parameter.numel() for parameter in model.parameters())
        else:
            count = parameter_count(self.recipe)
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
        """Returns copies of the model's FP8 state by name.

        The state has scales, amax histories, random draw counts, and the stored form of quantized
        weights. `model.state_dict()` does not contain it, but `optimizer.state_dict()` does.
        """
        from fp8cfg.numerics.stored_state import fp8_state_dict

        return fp8_state_dict(self.model) | self._encoded_weights()

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Loads the FP8 state that `state_dict` returned.

        Load the model's weights first. If you load the optimizer's state separately, load it last.

        Raises:
            ValueError: The state belongs to other FP8 layers. Nothing was changed.
        """
        from fp8cfg.numerics.stored_state import load_fp8_state_dict

        # Encoded weights are not loaded. FSDP2 encodes them from the masters.
        derived = self._encoded_weights()
        loaded = {name: tensor for name, tensor in state_dict.items() if name not in derived}
        load_fp8_state_dict(self.model, loaded)

    def backward(self, loss: Tensor, parts: float | Tensor = 1) -> None:
        """Runs the backward pass of a loss, divided by `parts`.

        Under fp16 the loss is also multiplied by the loss scale. Gradients are added up over
        microbatches and ranks. The division happens before the backward pass, so that FP8 sees
        gradients of the same size for any microbatch size.

        Args:
            loss: Mean loss of a microbatch, [].
            parts: Number of microbatches in the step, over all ranks. If microbatches have
                different numbers of targets, the targets of the step divided by the targets of this
                loss. A number or float64 [] on the device.
        """
        from fp8cfg.optim.loss_scale import loss_factors

        self._scales = True
        (factor,) = loss_factors(self.loss_scaler, [parts])
        if not isinstance(factor, float):
            # A float32 factor on the device. The product with a bfloat16 loss [] would be bfloat16.
            loss = loss.float()
        (loss * factor).backward()

    def scaled(self, loss: Tensor) -> Tensor:
        """Returns `loss` with a hook that applies the fp16 loss scale to its gradient.

        Use it if other code runs the backward pass: `accelerator.backward(job.scaled(loss))`.
        """
        self._scales = True
        if self.loss_scaler is not None:
            # The value of the loss stays unscaled, so that the other code can log it.
            scale = self.loss_scaler.scale
            loss.register_hook(lambda gradient: gradient * scale)
        return loss

    def sum_gradients(self) -> None:
        """Sums the gradients over the ranks in the dtype of storage.comm.

        Call it once per optimizer step, after the last microbatch. It replaces
        DistributedDataParallel, which supports neither FP8 weights nor float32 gradients of
        bfloat16 weights. Divide the loss by the number of ranks, for example with `parts` of
        `backward`. Under FSDP2 the backward pass has summed data-parallel gradients already. The
        call then only sums gradients of tensor-parallel ranks.

        Without this call a step on several ranks warns once.

        Raises:
            RuntimeError: The gradients of this step were summed already.
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
        # One rank sums nothing, so a second call is harmless there.
        self.summed = world.size > 1

    def scheduler(self) -> StepScheduler:
        """Returns `schedule` as a torch scheduler, for a loop that calls `scheduler.step()`.

        Do not call `schedule.apply` as well. Under fp16 the optimizer's step then raises
        RuntimeError if no loss was multiplied by the loss scale.
        """
        from fp8cfg.optim.scheduler import StepScheduler

        if self.loss_scaler is not None:
            self.optimizer.register_step_pre_hook(lambda *_: self._refuse_unscaled())
        return StepScheduler(self.optimizer, self.schedule)

    def trainer_callback(self) -> Any:
        """Returns a callback for transformers.Trainer.

        Pass `optimizers=(job.optimizer, job.scheduler())` to the Trainer too. Before the first step
        the callback logs which settings apply. It sets max_grad_norm to 0, because the job's
        optimizer clips gradients. Without the callback these checks run in the first step, after
        the Trainer has clipped once.

        Raises:
            ConfigError: In training: TrainingArguments contradict the recipe.
        """
        from fp8cfg.interop.hf_trainer import make_callback

        self._trainer_checked = True
        return make_callback(self.recipe, self.optimizer)

    def prove(self) -> Coverage:
        """Returns the coverage since the build, and checks it. Call it after the first step.

        With pipeline stages all ranks must call it, and the result covers all stages.

        Raises:
            NotFP8Error: A layer did not run as planned, or less than fp8.min_coverage ran in FP8.
        """
        return prove_engagement(self.recipe, self.model, self.plan, self._observed(), self.foreign)

    def _observed(self) -> Observed:
        """Returns the observed operand kinds of all GEMMs. All pipeline ranks call it."""
        observed = registry.backend(self.choice.backend).observed(self.model)
        if self.prepared.pipeline is None:
            return observed
        from fp8cfg.parallel.process_group import pipeline_world

        all_stages: Observed = {}
        for text in pipeline_world(self.prepared).texts(json.dumps(observed)):
            for name, gemms in json.loads(text).items():
                # JSON turns tuples into lists.
                all_stages[name] = {
                    gemm: tuple(kinds) if isinstance(kinds, list) else kinds
                    for gemm, kinds in gemms.items()
                }
        return all_stages

    def quantizes_weights_once(self, num_microbatches: int) -> bool:
        """Whether the native backend quantizes each weight once in a step of `num_microbatches`."""
        prepared = self.prepared
        return layout.quantizes_weights_once(
            self.recipe, prepared.state, prepared.shard, num_microbatches
        )

    def pass_traffic(self, num_samples: int, world: World) -> list[Sent]:
        """Returns what this rank sends in a forward and backward pass of `num_samples` sequences."""
        # `lower` imports this module but needs neither of them.
        from fp8cfg.parallel.mesh import coordinates
        from fp8cfg.planning import communication

        if num_samples not in self._traffic:
            # Cached: it takes milliseconds for a model with many layers.
            strategy = self.recipe.trainer.strategy
            stage = coordinates(strategy, world.rank, world.size)["pp"]
            part = layout.stage_parts(self.recipe, strategy.size)[stage]
            traffic = communication.pass_traffic(self.recipe, part, num_samples)
            self._traffic[num_samples] = list(traffic)
        return self._traffic[num_samples]

    def compile_model(self) -> None:
        """Compiles the model's training passes and the step of a low-bit optimizer.

        The recipe's own Transformer is compiled layer by layer. A graph break is an error.
        Evaluation stays eager.
        """
        from fp8cfg.backends.compiled_layers import compile_layers, weights_ready

        if self.foreign:
            self.forward = weights_ready(self.model, self.compiler()(self.model))
        else:
            layers: Any = self.model.layers
            compile_layers(layers.children(), self.compiler())
        self.compiled = self.optimizer.compiled = True

    def compiler(self) -> Callable[[Any], Any]:
        """Returns torch.compile with the options of this job."""
        import warnings

        import torch

        from fp8cfg.backends.compiled_layers import compile_options

        # Inductor of torch 2.13 warns if fp16_scaled weights are decoded to bf16. Passes compile
        # when they first run, so the filters must stay. They only match these modules of torch.
        warnings.filterwarnings(
            "ignore", "bf16 and fp16 are mixed", UserWarning, r"torch\._inductor\.codegen\.cpp$"
        )
        # torch 2.13 warns that a graph with FP8-gathered weights is not cached on disk.
        warnings.filterwarnings(
            "ignore", "Float8TrainingTensor does not implement", UserWarning, r"torch\._functorch\."
        )
        options = compile_options(self.device.type)
        return partial(torch.compile, fullgraph=True, dynamic=False, options=options)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Raises TypeError: the optimizer belongs to one model."""
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

    def _encoded_weights(self) -> dict[str, Tensor]:
        """Returns the encoded weights that FSDP2 makes from float32 masters, by name."""
        if not self.prepared.fsdp2 or self.prepared.shard != "none":
            return {}
        from fp8cfg.parallel.sharded_state import encoded_weights

        return encoded_weights(self.prepared)

    def _count_step(self) -> None:
        """Counts a call of the optimizer's step."""
        self.steps_begun += 1

    def _check_first_pass(self) -> None:
        """Raises NotFP8Error if the model was trained and no layer has run in FP8."""
        from fp8cfg.backends.any_model import checks

        # Only for custom models: `fit` reports the coverage of the recipe's own Transformer.
        if self.autocast.has_fp8_layers() and checks.check(self.model) and self.foreign:
            coverage = observed_coverage(
                self.recipe, self.model, self.plan, self._observed(), self.foreign
            )
            warn_of_low_coverage(self.model, coverage)

    def _check_sums(self) -> None:
        """Warns once if a step on several ranks uses gradients that were not summed."""
        if self.summed or self._sums_checked:
            return
        # FSDP2 sums in the backward pass, except the gradients of tensor-parallel ranks.
        if self.prepared.fsdp2 and self.prepared.tensor_parallel is None:
            return
        from fp8cfg.backends.any_model.checks import warn_of_sums

        self._sums_checked = True
        warn_of_sums(self.model)

    def _check_trainer(self) -> None:
        """Checks TrainingArguments in the first step, unless `trainer_callback` was called."""
        if self._trainer_checked:
            return
        from fp8cfg.interop.hf_trainer import adapt_arguments, find_running_trainer

        self._trainer_checked = True
        trainer = find_running_trainer()
        if trainer is not None:
            adapt_arguments(self.recipe, trainer.args, trainer.state.max_steps, is_clipped=True)

    def _refuse_unscaled(self) -> None:
        """Raises RuntimeError if no loss was multiplied by the fp16 loss scale."""
        if not self._scales:
            raise RuntimeError(
                "no loss was multiplied by the fp16 loss scale, but the optimizer divides by it;"
                " call job.backward(loss), or job.scaled(loss) before your own backward"
            )
