"""Losses of samples with unlike numbers of targets: the mean over all targets of the global batch, however it is cut."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8cfg
from fp8cfg.checkpoint import job_state
from fp8cfg.data import IGNORED
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.parallel.process_group import World
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import microbatches
from fp8cfg.training.data import run_data
from fp8cfg.training.evaluation import evaluate, validation_batches
from fp8cfg.training.finished_run import held_out_loss
from fp8cfg.training.step import train_step
from fp8cfg.training.trained_model import RunModel
from tests.support import whole_checkpoints
from tests.support.small import PACKED, small, steps

ANSWERS = [
    "yes",
    "a much longer answer than the others",
    "no",
    "perhaps",
    "one two three",
    "x",
    "it is eight bits",
    "4",
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": f"{n} {ANSWERS[n % 8]}"},
            ]
        }
        for n in range(40)
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    return [
        "data=chat",
        f"data.path={file}",
        "model.seq_length=48",
        "data.validation_fraction=0.2",
        "trainer.global_batch_size=8",
    ]


def by_hand(job: fp8cfg.Job, tokens: Tensor, targets: Tensor) -> float:
    """One step of plain AdamW on the whole global batch, of the sum of losses over all targets divided by how many there are."""
    logits = job.model(tokens)
    picked = targets != IGNORED
    loss = (
        -logits.float().log_softmax(-1)[picked].gather(-1, targets[picked][:, None]).sum()
        / picked.sum()
    )
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("micro", [8, 2, 1])
def test_the_loss_and_gradients_are_those_of_a_loop_by_hand(micro: int, words: list[str]) -> None:
    recipe = small(
        *words, "precision=fp32", f"trainer.micro_batch_size={micro}", "trainer.gradient_clip_val=0"
    )
    job, plain = fp8cfg.build(recipe), fp8cfg.build(recipe)
    batches, _ = run_data(recipe)
    tokens, targets = batches.batch(0)
    counts = (targets != IGNORED).sum(1)
    assert counts.min() < counts.max()
    want = by_hand(plain, tokens, targets)
    gradients = {n: p.grad.clone() for n, p in plain.model.named_parameters()}
    job.optimizer.register_step_pre_hook(
        lambda *_: found.update((n, p.grad.clone()) for n, p in job.model.named_parameters())
    )
    found: dict[str, Tensor] = {}
    assert train_step(job, batches, 0, World()).wait().loss == pytest.approx(want, rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-4, atol=1e-7)
    means = [
        F.cross_entropy(job.model(t[None])[0].float(), y).item()
        for t, y in zip(tokens, targets, strict=True)
    ]
    assert abs(sum(means) / len(means) - want) > 1e-3, "a mean of means would pass"


def test_fp8_trains_on_the_same_loss_however_it_is_cut(words: list[str]) -> None:
    losses = [
        [
            s.loss
            for s in steps(
                fp8cfg.build(
                    small(*words, "precision=bf16_fp8", f"trainer.micro_batch_size={micro}")
                ),
                3,
            )
        ]
        for micro in (8, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3)


def test_evaluation_is_the_mean_over_targets(words: list[str]) -> None:
    recipe = small(
        *words, "precision=fp32", "trainer.micro_batch_size=2", "trainer.limit_val_batches=1"
    )
    job = fp8cfg.build(recipe)
    _, held_out = run_data(recipe)
    ((tokens, targets),) = validation_batches(recipe, held_out, World())
    with torch.no_grad():
        want = F.cross_entropy(job.model(tokens).float().flatten(0, 1), targets.flatten()).item()
    assert evaluate(job, [(tokens, targets)], World(), masked=True) == pytest.approx(want, rel=1e-6)


def test_a_run_on_conversations_resumes_bit_for_bit(words: list[str], tmp_path: Path) -> None:
    recipe = small(*words, "precision=bf16_fp8", "trainer.micro_batch_size=4")
    job = fp8cfg.build(recipe)
    list(steps(job, 2))
    path = whole_checkpoints.save(
        tmp_path, 2, *whole_checkpoints.collect(job, run_data(recipe)[0], 2), keep=1
    )
    again = fp8cfg.build(recipe)
    assert job_state.restore(again, *whole_checkpoints.load(path), run_data(recipe)[0]) == 2
    assert [s.loss for s in steps(again, 2, first=2)] == [s.loss for s in steps(job, 2, first=2)]


def test_a_batch_without_targets_has_a_loss_of_zero_and_no_gradient() -> None:
    model = fp8cfg.build(small("precision=fp32")).model
    tokens = torch.zeros(2, 32, dtype=torch.long)
    loss = model(tokens, torch.full_like(tokens, IGNORED))
    loss.backward()
    assert loss.item() == 0 and not any(p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("host_waits", [False, True])
def test_a_step_without_targets_on_several_ranks(
    host_waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device skips it, or the host raises the error if it waits for the loss anyway."""
    monkeypatch.setattr(microbatches, "can_run_ahead", lambda job: True)
    job = fp8cfg.build(small("precision=bf16_fp8"))
    two_ranks: Any = SimpleNamespace(size=2, sum=lambda total: total)
    tokens = torch.zeros(2, 32, dtype=torch.long)
    loaded = [(tokens, torch.full_like(tokens, IGNORED))]
    with DeferredSteps(job.optimizer):
        if host_waits:
            with pytest.raises(microbatches.NoTargets):
                microbatches.weight_by_targets(job, loaded, 0, two_ranks, host_waits)
        else:
            _, total = microbatches.weight_by_targets(job, loaded, 0, two_ranks, host_waits)
            assert total is not None and not total


def test_the_first_token_of_a_document_is_left_out() -> None:
    recipe = small("data.eod_mask_loss=true")
    tokens, targets = run_data(recipe)[0].batch(0)
    assert ((targets == IGNORED) == (tokens == 256)).all() and (targets == IGNORED).any()
    plain = run_data(small())[0].batch(0)
    assert torch.equal(tokens, plain[0]) and torch.equal(
        targets, plain[1].masked_fill(tokens == 256, IGNORED)
    )


def of_each_document(model: torch.nn.Module, batches: list[tuple[Tensor, ...]]) -> float:
    """The mean loss over all documents of `batches`, each computed alone, of what follows inside of it."""
    losses = []
    for tokens, targets, _ in batches:
        for row, wanted in zip(tokens, targets, strict=True):
            ends = [*(torch.nonzero(row == 256)[:, 0] + 1).tolist(), len(row)]
            for first, last in zip([0, *ends], ends, strict=False):
                seen = slice(
                    first, last - (row[last - 1] == 256).int().item()
                )  # its end token is followed by nothing
                if seen.start < seen.stop:
                    logits = model(row[None, seen])[0].float()
                    losses.append(F.cross_entropy(logits, wanted[seen], reduction="none"))
    return torch.cat(losses).mean().item()


@torch.no_grad()
def test_packed_documents_have_the_loss_of_each_alone() -> None:
    recipe = small("precision=fp32", "model.seq_length=256", "trainer.micro_batch_size=2", *PACKED)
    job = fp8cfg.build(recipe)
    batches, held_out = run_data(recipe)
    assert (batches.batch(0)[2] > 0).any(), "no window has two documents"
    validation = list(validation_batches(recipe, held_out, World()))
    want = of_each_document(job.model, validation)
    assert evaluate(job, validation, World(), masked=True) == pytest.approx(want, rel=1e-6)
    count = sum(len(tokens) for tokens, *_ in validation)
    run = RunModel(recipe, job.model, job.plan, job.choice, 0)
    assert held_out_loss(run, held_out, count).loss == pytest.approx(want, rel=1e-6)
    want = of_each_document(job.model, [batches.batch(0)])
    with torch.enable_grad():
        assert train_step(job, batches, 0, World()).wait().loss == pytest.approx(want, rel=1e-6)


def test_validation_data_without_targets_are_an_error() -> None:
    """Not a loss of NaN, which a run would take for a divergence."""
    recipe = small("precision=bf16")
    job = fp8cfg.build(recipe)
    _, held_out = run_data(recipe)
    batches = [
        (tokens, torch.full_like(targets, IGNORED))
        for tokens, targets in validation_batches(recipe, held_out, World())
    ]
    with pytest.raises(ConfigError, match=r"no token of the validation data has a loss; set an"):
        evaluate(job, batches, World(), masked=True)
