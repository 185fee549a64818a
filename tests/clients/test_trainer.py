"""transformers' Trainer around a plain, a converted and a built model: losses, proof, save_pretrained and resume."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import fp8cfg
from tests.clients.gpt import BATCH, VOCABULARY, batch
from tests.clients.made import CLIP, LR, Made, Way, made

STEPS = 20


def llama() -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
            initializer_range=0.05,
        )
    )


def trainer(run: Made, folder: Path, **given: Any) -> Trainer:
    rows = [{"input_ids": row, "labels": row} for step in range(STEPS) for row in batch(step)[0]]
    more: dict[str, Any] = {}
    if run.job:
        more = {
            "optimizers": (run.optimizer, run.job.scheduler()),
            "callbacks": [run.job.trainer_callback()],
        }
    words = (
        {"bf16": True}
        if run.job
        else {
            "learning_rate": LR,
            "adam_beta2": 0.95,
            "adam_epsilon": 1e-8,
            "max_grad_norm": CLIP,
            "lr_scheduler_type": "constant",
        }
    )
    args = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH // 2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        train_sampling_strategy="sequential",
        save_strategy="steps",
        save_steps=15,
        **words,
        **given,
    )
    return Trainer(model=run.model, args=args, train_dataset=rows, **more)


def bring(way: Way) -> Made:
    return made(way, llama(), autowrap=True)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Losses, model and folder of each way, trained once."""

    @functools.cache
    def run(way: Way) -> tuple[list[float], Made, Path]:
        folder = tmp_path_factory.mktemp(way)
        one = bring(way)
        loop = trainer(one, folder)
        loop.train()
        loop.save_model(str(folder / "saved"))
        return [line["loss"] for line in loop.state.log_history if "loss" in line], one, folder

    return run


@pytest.mark.parametrize("way", ["converted", "built"])
def test_losses_are_those_of_the_plain_trainer_in_fp8(way: Way, trained: Any) -> None:
    (plain, _, _), (ours, run, _) = trained("plain"), trained(way)
    assert len(plain) == len(ours) == STEPS and plain[-1] < plain[0] - 0.3
    assert (
        max(abs(a - b) for a, b in zip(plain[-5:], ours[-5:], strict=True)) < 0.01 and plain != ours
    )
    (run.job or run.conversion).prove()
    assert fp8cfg.coverage(run.model).layers_in_fp8 == 14


@pytest.mark.parametrize("way", ["converted", "built"])
def test_what_is_saved_is_the_model_that_was_trained(way: Way, trained: Any) -> None:
    """As transformers reads it, without a word about keys; and the trained model reads it too."""
    _, run, folder = trained(way)
    read, report = LlamaForCausalLM.from_pretrained(folder / "saved", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = run.model.state_dict()
    for name, value in read.state_dict().items():
        assert torch.equal(value.float(), ours[name].float()), name
    tokens = batch(99)[0]
    with torch.no_grad():
        run.model.eval()
        assert read(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(
            run.model(input_ids=tokens, labels=tokens).loss.item(), abs=0.01
        )
        run.model.train()
    run.model.load_state_dict(read.state_dict(), strict=True)


@pytest.mark.parametrize("way", ["converted", "built"])
def test_a_checkpoint_goes_on(way: Way, trained: Any, tmp_path: Path) -> None:
    """A converted model takes its weights and starts its scales anew; a job's optimizer has its masters."""
    losses, _, folder = trained(way)
    again = bring(way)
    loop = trainer(again, tmp_path)
    with (
        pytest.warns(RuntimeWarning, match="scales and amax histories were reset")
        if way == "converted"
        else nullcontext()
    ):
        loop.train(resume_from_checkpoint=str(folder / "checkpoint-15"))
    found = [line["loss"] for line in loop.state.log_history if "loss" in line][-5:]
    assert max(abs(a - b) for a, b in zip(found, losses[-5:], strict=True)) < 0.01
