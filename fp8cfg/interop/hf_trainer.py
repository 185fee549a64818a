"""TrainingArguments of transformers' Trainer, and their conflicts with a recipe.

A Trainer with an optimizer and a scheduler silently ignores its own learning rate, warmup and so on.
It does apply its clipping and precision, in addition to the job's.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import FrameType
from typing import Any

from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe

# lr_scheduler_type -> the optim.lr_decay_style with the same shape.
_DECAY_STYLES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
_PRECISION_ARGUMENTS = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")


def adapt_arguments(recipe: Recipe, args: Any, max_steps: int, is_clipped: bool) -> None:
    """Checks a Trainer's arguments against the recipe, and turns off its clipping.

    Logs the source of each setting: the recipe or the arguments.

    Args:
        recipe: The recipe of the job.
        args: The TrainingArguments. max_grad_norm becomes 0.
        max_steps: Number of optimizer steps of the Trainer.
        is_clipped: Whether the Trainer has already clipped gradients.

    Raises:
        ConfigError: With one line for each conflict.
    """
    refuse_if(
        [
            *_optimizer_problems(recipe, args, max_steps),
            *_step_problems(recipe, max_steps),
            *_precision_problems(recipe, args),
            *_clipping_problems(recipe, args, is_clipped),
        ]
    )
    # The job's optimizer clips gradients, after it has divided them by the loss scale.
    args.max_grad_norm = 0.0
    clip_norm, batch_size = recipe.trainer.gradient_clip_val, args.per_device_train_batch_size
    logging.getLogger("fp8cfg").warning(
        f"note: Trainer: the recipe sets optim.* (lr={recipe.optim.lr:g}, warmup,"
        f" {recipe.optim.lr_decay_style} schedule, weight decay), clipping"
        f" (trainer.gradient_clip_val={clip_norm:g}) and precision; TrainingArguments set steps,"
        f" batches of {batch_size} x {args.gradient_accumulation_steps}, data, logs and checkpoints"
    )


def make_callback(recipe: Recipe, optimizer: Any) -> Any:
    """Returns a transformers.TrainerCallback that calls `adapt_arguments` before the first step.

    It raises ConfigError if the Trainer has another optimizer than the job's `optimizer`.
    """
    import transformers

    class RecipeCallback(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer_optimizer = kwargs.get("optimizer")
            # Accelerate wraps the optimizer.
            trainer_optimizer = getattr(trainer_optimizer, "optimizer", trainer_optimizer)
            if trainer_optimizer is not optimizer:
                raise ConfigError(
                    "Trainer: does not use the job's optimizer; pass"
                    " Trainer(optimizers=(job.optimizer, job.scheduler()), ...)"
                )
            adapt_arguments(recipe, args, state.max_steps, is_clipped=False)

    return RecipeCallback()


def find_running_trainer() -> Any | None:
    """Returns the transformers.Trainer around this call, or None.

    A Trainer without the callback calls only the job's optimizer. The call stack reveals it.
    """
    module = sys.modules.get("transformers.trainer")
    if module is None:
        return None
    trainer_class = getattr(module, "Trainer", ())
    frame: FrameType | None = sys._getframe(1)
    while frame:
        instance = frame.f_locals.get("self")
        is_in_trainer = frame.f_globals.get("__name__") == "transformers.trainer"
        if is_in_trainer and isinstance(instance, trainer_class):
            return instance
        frame = frame.f_back
    return None


def _optimizer_problems(recipe: Recipe, args: Any, max_steps: int) -> list[str]:
    """Returns an error for each changed argument with another value than the recipe's."""
    optim = recipe.optim
    decay_style = str(_plain(args.lr_scheduler_type))
    optimizer_name = str(_plain(args.optim))
    if optimizer_name in ("adamw_torch", "adamw_torch_fused"):
        optimizer_name = "adamw"
    # argument -> recipe key, recipe value, value of the argument in the recipe's terms
    comparisons: dict[str, tuple[str, Any, Any]] = {
        "learning_rate": ("optim.lr", optim.lr, args.learning_rate),
        "warmup_steps": (
            "optim.warmup_steps",
            optim.warmup_steps,
            args.get_warmup_steps(max_steps),
        ),
        "lr_scheduler_type": (
            "optim.lr_decay_style",
            optim.lr_decay_style,
            _DECAY_STYLES.get(decay_style, decay_style),
        ),
        "optim": ("optim.name", optim.name, optimizer_name),
        "weight_decay": ("optim.weight_decay", optim.weight_decay, args.weight_decay),
    }
    if optim.name != "sgd":  # has no betas and no eps
        comparisons |= {
            "adam_beta1": ("optim.betas[0]", optim.betas[0], args.adam_beta1),
            "adam_beta2": ("optim.betas[1]", optim.betas[1], args.adam_beta2),
            "adam_epsilon": ("optim.eps", optim.eps, args.adam_epsilon),
        }
    problems = []
    for name, (key, value, argument) in comparisons.items():
        if argument != value and _is_changed(args, name):
            settable_key = key.partition("[")[0]
            problems.append(
                f"TrainingArguments.{name}={_format(getattr(args, name))}: the job's optimizer and"
                f" schedule have {key}={value}; remove it or set {settable_key} in the recipe"
            )
    return problems


def _step_problems(recipe: Recipe, max_steps: int) -> list[str]:
    recipe_steps, decay_style = recipe.trainer.max_steps, recipe.optim.lr_decay_style
    if decay_style == "constant" or max_steps == recipe_steps:
        return []
    return [
        f"TrainingArguments.max_steps={max_steps}: the recipe's {decay_style} schedule ends at"
        f" trainer.max_steps={recipe_steps}; set trainer.max_steps={max_steps} or"
        " optim.lr_decay_style=constant"
    ]


def _precision_problems(recipe: Recipe, args: Any) -> list[str]:
    """Returns an error for each argument for torch.autocast or for a cast of the model.

    bf16=True is accepted for a bf16 job: the autocast is the same. TRL sets it by default.
    """
    compute = recipe.precision.compute
    return [
        f"TrainingArguments.{name}=True: the job sets the precision, precision.compute={compute};"
        f" set {name}=False"
        for name in _PRECISION_ARGUMENTS
        if getattr(args, name, False) and not (name == compute == "bf16")
    ]


def _clipping_problems(recipe: Recipe, args: Any, is_clipped: bool) -> list[str]:
    """Returns an error for another norm, and for clipping of gradients with a loss scale."""
    norm, recipe_norm = args.max_grad_norm or 0.0, recipe.trainer.gradient_clip_val
    # Gradients with a loss scale had another norm when the Trainer clipped them.
    is_harmless = norm == recipe_norm and not (is_clipped and recipe.precision.compute == "fp16")
    is_unused_default = not is_clipped and not _is_changed(args, "max_grad_norm")
    if not norm or is_harmless or is_unused_default:
        return []
    return [
        f"TrainingArguments.max_grad_norm={norm:g}: the job's optimizer clips gradients already"
        f" (trainer.gradient_clip_val={recipe_norm:g}); set max_grad_norm=0"
    ]


def _is_changed(args: Any, name: str) -> bool:
    """Returns whether an argument differs from the default of its class."""
    defaults = {field.name: field.default for field in dataclasses.fields(args)}
    return bool(_plain(getattr(args, name)) != defaults[name])


def _plain(value: Any) -> Any:
    """Returns the value of an enum's member. Other values stay."""
    return getattr(value, "value", value)


def _format(value: Any) -> str:
    value = _plain(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
