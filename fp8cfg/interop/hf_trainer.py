"""TrainingArguments of transformers' Trainer around a job: whose word counts, and what of them contradicts the recipe.

A Trainer that is given an optimizer and a scheduler does not say that it drops the learning rate, the warm-up and the rest of its
arguments; those about clipping and precision it applies on top.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from types import FrameType
from typing import Any

from fp8cfg.schema.errors import ConfigError, refuse_if
from fp8cfg.schema.recipe import Recipe

_STYLES = {"constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}
"""transformers' schedules by the name of the recipe's that has the same shape."""
_PRECISION = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")


def settle(recipe: Recipe, args: Any, max_steps: int, clipped: bool) -> None:
    """Let the recipe's words count in a Trainer with the TrainingArguments `args` that runs `max_steps` optimizer steps, and say
    so in a line to the logger. `clipped` says that it has clipped gradients already. Raises ConfigError with a line for each
    argument that was written and that the recipe contradicts."""
    refuse_if(
        [
            *_contradicted(recipe, args, max_steps),
            *_steps(recipe, max_steps),
            *_precision(recipe, args),
            *_clipping(recipe, args, clipped),
        ]
    )
    args.max_grad_norm = 0.0  # the job's optimizer clips, after the loss scale is divided out
    clip, batch = recipe.trainer.gradient_clip_val, args.per_device_train_batch_size
    logging.getLogger("fp8cfg").warning(
        f"note: Trainer: optim.* (lr={recipe.optim.lr:g}, warm-up, {recipe.optim.lr_decay_style}"
        f" schedule, weight decay), clipping (trainer.gradient_clip_val={clip:g}) and precision are"
        f" the recipe's; steps, batches of {batch} x {args.gradient_accumulation_steps}, data, logs"
        " and checkpoints are TrainingArguments'"
    )


def callback(recipe: Recipe, optimizer: Any) -> Any:
    """A transformers.TrainerCallback that calls `settle` before the first step, and refuses a Trainer without `optimizer`."""
    import transformers

    class RecipeCallback(transformers.TrainerCallback):
        """Whose words count, at the beginning of a Trainer's run."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            own = given.get("optimizer")
            if getattr(own, "optimizer", own) is not optimizer:  # Accelerate wraps it
                raise ConfigError(
                    "Trainer: trains with its own optimizer, not the job's; write "
                    "Trainer(optimizers=(job.optimizer, job.scheduler()), ...)"
                )
            settle(recipe, args, state.max_steps, clipped=False)

    return RecipeCallback()


def running() -> Any | None:
    """The transformers.Trainer in whose loop this is called; None outside of one."""
    module = sys.modules.get("transformers.trainer")
    frame: FrameType | None = sys._getframe(1) if module else None
    while frame:
        owner = frame.f_locals.get("self")
        if frame.f_globals.get("__name__") == "transformers.trainer" and isinstance(
            owner, getattr(module, "Trainer", ())
        ):
            return owner
        frame = frame.f_back
    return None


def _contradicted(recipe: Recipe, args: Any, max_steps: int) -> list[str]:
    """A line for each argument, written other than its default, for which the recipe has another value."""
    o, warmup = recipe.optim, args.get_warmup_steps(max_steps)
    style = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    name = str(getattr(args.optim, "value", args.optim))
    ours: dict[
        str, tuple[str, Any, Any]
    ] = {  # argument -> our key, our value, their value in our terms
        "learning_rate": ("optim.lr", o.lr, args.learning_rate),
        "warmup_steps": ("optim.warmup_steps", o.warmup_steps, warmup),
        "lr_scheduler_type": (
            "optim.lr_decay_style",
            o.lr_decay_style,
            _STYLES.get(style, style),
        ),
        "optim": (
            "optim.name",
            o.name,
            "adamw" if name in ("adamw_torch", "adamw_torch_fused") else name,
        ),
        "weight_decay": ("optim.weight_decay", o.weight_decay, args.weight_decay),
    }
    if o.name != "sgd":
        ours |= {
            "adam_beta1": ("optim.betas[0]", o.betas[0], args.adam_beta1),
            "adam_beta2": ("optim.betas[1]", o.betas[1], args.adam_beta2),
            "adam_epsilon": ("optim.eps", o.eps, args.adam_epsilon),
        }
    return [
        f"TrainingArguments.{theirs}={_shown(getattr(args, theirs))}: the optimizer and the"
        f" schedule are the job's, with {key}={mine}; drop it, or write {key.partition('[')[0]} in"
        " the recipe"
        for theirs, (key, mine, meant) in ours.items()
        if _written(args, theirs) and meant != mine
    ]


def _steps(recipe: Recipe, max_steps: int) -> list[str]:
    most = recipe.trainer.max_steps
    if recipe.optim.lr_decay_style == "constant" or max_steps == most:
        return []
    return [
        f"TrainingArguments.max_steps={max_steps}: the recipe's {recipe.optim.lr_decay_style}"
        f" schedule ends at trainer.max_steps={most}; write trainer.max_steps={max_steps}, or"
        " optim.lr_decay_style=constant"
    ]


def _precision(recipe: Recipe, args: Any) -> list[str]:
    """A line for each argument that asks for torch.autocast, or casts the model. `bf16` around a job in bf16 asks for the autocast
    that it has; TRL's configurations write it where nobody has, and what it would do to another job cannot be taken back here.
    """
    compute = recipe.precision.compute
    return [
        f"TrainingArguments.{name}=True: precision is the job's, with precision.compute={compute};"
        f" write {name}=False"
        for name in _PRECISION
        if getattr(args, name, False) and (name, compute) != ("bf16", "bf16")
    ]


def _clipping(recipe: Recipe, args: Any, clipped: bool) -> list[str]:
    """Clipping at another norm than the recipe's, or of gradients that are still multiplied by a loss scale."""
    norm, own = args.max_grad_norm or 0.0, recipe.trainer.gradient_clip_val
    if not norm or (norm == own and not (clipped and recipe.precision.compute == "fp16")):
        return []
    if not clipped and not _written(args, "max_grad_norm"):
        return []
    return [
        f"TrainingArguments.max_grad_norm={norm:g}: the job's optimizer clips, with"
        f" trainer.gradient_clip_val={own:g}; write max_grad_norm=0"
    ]


def _written(args: Any, name: str) -> bool:
    """Whether the argument differs from the default of its class."""
    field = {f.name: f for f in dataclasses.fields(args)}[name]
    value = getattr(args, name)
    return bool(getattr(value, "value", value) != field.default)


def _shown(value: Any) -> str:
    value = getattr(value, "value", value)
    return f"{value:g}" if isinstance(value, float) else str(value)
