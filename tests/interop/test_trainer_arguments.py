"""Words of TrainingArguments around a job: each that the recipe contradicts is refused, and one line says whose count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8cfg
from fp8cfg.interop.hf_trainer import adapt_arguments
from tests.support.small import small

WORDS = (
    "precision=bf16_fp8",
    "trainer.max_steps=2",
    "optim.warmup_steps=1",
    "trainer.val_check_interval=0",
)


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    return TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "logging_steps": 1,
            **given,
        }
    )


def trainer(job: fp8cfg.Job, args: TrainingArguments, **given: Any) -> Trainer:
    rows = [
        {"input_ids": list(range(i, i + 16)), "labels": list(range(i, i + 16))} for i in range(4)
    ]
    return Trainer(
        model=job.model,
        args=args,
        train_dataset=rows,
        **{"optimizers": (job.optimizer, job.scheduler()), **given},
    )


def job(*words: str) -> fp8cfg.Job:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    built = fp8cfg.build(small(*WORDS, *words), model=LlamaForCausalLM(config))
    fp8cfg.apply_fp8_autowrap(built.model, built.recipe)
    return built


@pytest.mark.parametrize(
    ("given", "words", "line"),
    [
        (
            {"learning_rate": 1e-2},
            (),
            "TrainingArguments.learning_rate=0.01: the job's optimizer and schedule have optim.lr=0.003; remove it or "
            "set optim.lr in the recipe",
        ),
        (
            {"warmup_steps": 2},
            (),
            "TrainingArguments.warmup_steps=2: the job's optimizer and schedule have optim.warmup_steps=1; remove it or "
            "set optim.warmup_steps in the recipe",
        ),
        (
            {"lr_scheduler_type": "constant"},
            (),
            "TrainingArguments.lr_scheduler_type=constant: the job's optimizer and schedule have "
            "optim.lr_decay_style=cosine; remove it or set optim.lr_decay_style in the recipe",
        ),
        (
            {"optim": "adafactor"},
            (),
            "TrainingArguments.optim=adafactor: the job's optimizer and schedule have optim.name=adamw; remove it or "
            "set optim.name in the recipe",
        ),
        (
            {"adam_beta2": 0.98},
            (),
            "TrainingArguments.adam_beta2=0.98: the job's optimizer and schedule have optim.betas[1]=0.95; remove it "
            "or set optim.betas in the recipe",
        ),
        (
            {"weight_decay": 0.3},
            (),
            "TrainingArguments.weight_decay=0.3: the job's optimizer and schedule have optim.weight_decay=0.1; remove "
            "it or set optim.weight_decay in the recipe",
        ),
        (
            {"max_grad_norm": 0.5},
            (),
            "TrainingArguments.max_grad_norm=0.5: the job's optimizer clips gradients already (trainer.gradient_clip_val=1); set max_grad_norm=0",
        ),
        (
            {"bf16": True},
            ("precision=fp32",),
            "TrainingArguments.bf16=True: the job sets the precision, precision.compute=fp32; set bf16=False",
        ),
        (
            {"bf16": True},
            ("precision=fp16_fp8",),
            "TrainingArguments.bf16=True: the job sets the precision, precision.compute=fp16; set bf16=False",
        ),
        (
            {"bf16_full_eval": True},
            (),
            "TrainingArguments.bf16_full_eval=True: the job sets the precision, precision.compute=bf16; set bf16_full_eval=False",
        ),
        ({"bf16": True}, (), None),
        ({"bf16": True}, ("precision=bf16_mixed",), None),
        (
            {"max_steps": 9},
            (),
            "TrainingArguments.max_steps=9: the recipe's cosine schedule ends at trainer.max_steps=2; set trainer.max_steps=9 or "
            "optim.lr_decay_style=constant",
        ),
        (
            {
                "learning_rate": 3e-3,
                "warmup_steps": 0.5,
                "lr_scheduler_type": "cosine",
                "optim": "adamw_torch",
                "adam_epsilon": 1e-5,
            },
            (),
            None,
        ),
        (
            {"max_steps": 9, "lr_scheduler_type": "constant_with_warmup"},
            ("optim.lr_decay_style=constant",),
            None,
        ),
        ({"adam_beta2": 0.98}, ("optim.name=sgd",), None),
        ({"max_grad_norm": 0.5}, ("trainer.gradient_clip_val=0.5",), None),
        ({}, (), None),
    ],
)
def test_what_the_recipe_contradicts_is_refused_by_both_names(
    given: dict[str, Any],
    words: tuple[str, ...],
    line: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    args, recipe = arguments(tmp_path, **given), small(*WORDS, *words)
    caplog.clear()
    if line:
        with pytest.raises(fp8cfg.ConfigError) as refused:
            adapt_arguments(recipe, args, args.max_steps, is_clipped=False)
        assert refused.value.problems == [line] and not caplog.messages
    else:
        adapt_arguments(recipe, args, args.max_steps, is_clipped=False)
        assert (
            args.max_grad_norm == 0
            and len(caplog.messages) == 1
            and "TrainingArguments set steps, batches of 2 x 1, data" in caplog.messages[0]
        )


@pytest.mark.parametrize(
    ("norm", "precision", "refused"),
    [
        (1.0, "bf16_fp8", False),
        (0.0, "fp16_fp8", False),
        (1.0, "fp16_fp8", True),
        (0.5, "bf16_fp8", True),
    ],
)
def test_what_is_clipped_already(
    norm: float, precision: str, refused: bool, tmp_path: Path
) -> None:
    """At the recipe's norm that changes nothing, but for gradients that are multiplied by a loss scale."""
    recipe, args = small(*WORDS, f"precision={precision}"), arguments(tmp_path, max_grad_norm=norm)
    if refused:
        with pytest.raises(
            fp8cfg.ConfigError,
            match=f"TrainingArguments.max_grad_norm={norm:g}: the job's optimizer clips",
        ):
            adapt_arguments(recipe, args, 2, is_clipped=True)
    else:
        adapt_arguments(recipe, args, 2, is_clipped=True)


def test_a_trainer_with_the_callback_and_one_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line each, before the first step or at it; and the same losses as with the arguments written out."""
    found = []
    for given, more in (({}, True), ({}, False), ({"max_grad_norm": 0}, False)):
        caplog.clear()
        built, args = job(), arguments(tmp_path, **given)
        run = trainer(built, args, callbacks=[built.trainer_callback()] if more else None)
        run.train()
        assert [m[:14] for m in caplog.messages if m.startswith("note: Trainer")] == [
            "note: Trainer:"
        ] and args.max_grad_norm == 0
        found.append([line["loss"] for line in run.state.log_history if "loss" in line])
    assert len(found[0]) == 2 and found[0] == found[2]
    assert found[1] == pytest.approx(
        found[2], abs=1e-3
    )  # clipped twice at one norm in the first step


def test_a_contradiction_stops_a_trainer_before_the_first_step_is_done(tmp_path: Path) -> None:
    for more in (True, False):
        built = job()
        run = trainer(
            built,
            arguments(tmp_path, learning_rate=1e-2),
            callbacks=[built.trainer_callback()] if more else None,
        )
        with pytest.raises(fp8cfg.ConfigError, match=r"TrainingArguments\.learning_rate=0\.01"):
            run.train()
        assert built.optimizer.steps == 0


def test_a_trainer_with_an_optimizer_of_its_own(tmp_path: Path) -> None:
    built = job("fp8.params=false")
    run = trainer(
        built, arguments(tmp_path), optimizers=(None, None), callbacks=[built.trainer_callback()]
    )
    with pytest.raises(
        fp8cfg.ConfigError,
        match="Trainer: does not use the job's optimizer; pass ",
    ):
        run.train()


def test_a_loop_without_a_trainer_is_not_asked() -> None:
    built = fp8cfg.build(small(*WORDS), model=nn.Sequential(nn.Linear(32, 32)))
    with built.autocast():
        built.backward(built.model(torch.ones(16, 32, dtype=torch.bfloat16)).float().sum())
    built.optimizer.step()
    assert built.optimizer.steps == 1
