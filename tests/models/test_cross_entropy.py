"""Cross entropy in chunks against torch's: losses and gradients, parts of a vocabulary, and whole training runs."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fp8cfg
from fp8cfg.models import cross_entropy as module
from fp8cfg.models.cross_entropy import IGNORED, VocabularyPart, cross_entropy
from fp8cfg.planning.activation_memory import CHUNK
from tests.support.small import PACKED, small, steps

TOKENS, VOCABULARY = 45, 700
CHUNKS = [1, 3 * VOCABULARY, 7 * VOCABULARY + 5]
"""Of one token, of three, and of seven with a rest: 45 is no multiple of it."""


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    targets[::4] = IGNORED
    return (4 * torch.randn(TOKENS, VOCABULARY, generator=generator)).to(dtype), targets


def found(
    logits: Tensor, targets: Tensor, part: VocabularyPart | None = None
) -> tuple[Tensor, Tensor]:
    """The loss, and the gradient of the logits, of a loss that is scaled as that of one of several microbatches."""
    leaf = logits.clone().requires_grad_()
    loss = cross_entropy(leaf, targets, part)
    (loss * 0.37).backward()
    assert loss.dtype == torch.float32 and loss.dim() == 0 and leaf.grad is not None
    return loss.detach(), leaf.grad


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_and_gradients_are_torchs(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    logits, targets = drawn(dtype)
    loss, gradient = found(logits, targets)
    leaf = logits.clone().requires_grad_()
    want = F.cross_entropy(leaf.float(), targets, reduction="sum") / (targets != IGNORED).sum()
    (want * 0.37).backward()
    assert torch.equal(loss, want.detach()) and torch.equal(gradient, leaf.grad)
    exact = logits.double().requires_grad_()
    (F.cross_entropy(exact, targets) * 0.37).backward()
    torch.testing.assert_close(
        gradient,
        exact.grad.to(dtype),
        rtol=4e-6 if dtype == torch.float32 else torch.finfo(dtype).eps,
        atol=1e-7,
    )
    assert not gradient[::4].any()


def test_targets_that_are_all_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1)
    loss, gradient = found(drawn(torch.bfloat16)[0], torch.full((TOKENS,), IGNORED))
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_logit_that_is_not_finite_makes_the_loss_so(
    value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2 * VOCABULARY)
    logits, targets = drawn(torch.bfloat16)
    logits[3, 10] = value
    loss, gradient = found(logits, targets)
    assert (
        not loss.isfinite() and not gradient[3].isfinite().all() and gradient[:3].isfinite().all()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_of_a_vocabulary_make_the_loss_of_the_whole(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads stand for two ranks."""
    logits, targets = drawn(dtype)
    want, whole = found(logits, targets)
    monkeypatch.setattr(module, "CHUNK", 4 * VOCABULARY)
    meet, given = threading.Barrier(2, timeout=60), [torch.empty(0)] * 2

    def reduce(rank: int, how: str, t: Tensor) -> Tensor:
        given[rank] = t
        meet.wait()
        made = torch.maximum(*given) if how == "largest" else given[0] + given[1]
        meet.wait()
        return made

    def rank(n: int) -> tuple[Tensor, Tensor]:
        first, last = (0, 300) if n == 0 else (300, VOCABULARY)
        return found(
            logits[:, first:last],
            targets,
            VocabularyPart(first, partial(reduce, n, "largest"), partial(reduce, n, "summed")),
        )

    with ThreadPoolExecutor(2) as ranks:
        (loss, left), (other, right) = ranks.map(rank, (0, 1))
    assert torch.equal(loss, other)
    torch.testing.assert_close(loss, want, rtol=3e-7, atol=0)
    torch.testing.assert_close(
        torch.cat([left, right], 1),
        whole,
        rtol=2e-6 if dtype == torch.float32 else 2**-8,
        atol=1e-9,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=fp16", "precision.loss_scale=1024", "trainer.micro_batch_size=2"),
        ("precision=bf16_fp8", "fp8.output_layer=true", *PACKED),
        (
            "precision=bf16_fp8_current",
            "backend=torchao",
            "fp8.params=false",
            "fp8.output_layer=true",
        ),
        ("precision=bf16_fp8", "lora.enabled=true"),
        ("precision=bf16_fp8", "model.final_logit_softcapping=3"),
    ],
)
def test_runs_have_the_bits_of_the_loss_of_all_tokens(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever multiplies the output layer: its products stay one each, and coverage is what was planned."""
    if "backend=torchao" in words:
        pytest.importorskip("torchao", minversion="0.18")

    def run() -> tuple[list[float], list[float], list[object]]:
        job = fp8cfg.build(small("trainer.max_steps=3", *words))
        made = list(steps(job, 2))
        return [s.loss for s in made], [s.grad_norm for s in made], job.prove().data()["linears"]

    whole = run()
    monkeypatch.setattr(module, "CHUNK", 5 * 272)
    calls: list[object] = []
    monkeypatch.setattr(
        module, "_chunks", lambda logits, made=module._chunks: calls.append(0) or made(logits)
    )
    assert run() == whole and calls


def test_the_plan_knows_the_chunks() -> None:
    assert CHUNK == {"cpu": module.CHUNK, "cuda": module.GPU_CHUNK}
