"""The weight workspace: a weight is quantized once for the passes of an optimizer step, and changes no bit of what they compute."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp8cfg
from fp8cfg.numerics import E2M1, E4M3, WEIGHT, FP8Linear, Region, Scaling, fp8_linears
from fp8cfg.numerics.linear_operands import LinearCall, cached_weights
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.training import step
from tests.support.small import small, steps

SCALINGS = [
    Scaling(),
    Scaling(first_step="te"),
    Scaling("current"),
    Scaling("current", granularity="row"),
    Scaling("block"),
    Scaling("block", weights_2d=True),
    Scaling("mxfp8", backward=E4M3),
    Scaling("nvfp4", forward=E2M1, backward=E2M1),
]


@pytest.fixture
def quantized(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The weights that are quantized, one entry for each product that has scales of its own, in high precision ones left out."""
    seen: list[Tensor] = []
    plain = LinearCall._fp8_operand

    def operand(self: LinearCall, source: Tensor, role: int, *rest: Any) -> Any:
        if role == WEIGHT:
            seen.append(source)
        return plain(self, source, role, *rest)

    monkeypatch.setattr(LinearCall, "_fp8_operand", operand)
    return seen


def layer(scaling: Scaling, **more: Any) -> FP8Linear:
    torch.manual_seed(1)
    return FP8Linear.from_linear(nn.Linear(64, 48), scaling, Region(active=True), **more)


def inputs(seed: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize(
    "scaling", SCALINGS, ids=lambda s: f"{s.kind}-{s.granularity}-{s.weights_2d}-{s.first_step}"
)
@pytest.mark.parametrize("dgrad_in_high_precision", [False, True])
def test_passes_that_share_a_weight_compute_what_each_would(
    scaling: Scaling, dgrad_in_high_precision: bool, quantized: list[Tensor]
) -> None:
    found = []
    for on in (False, True):
        one = layer(scaling, high_precision=(False, dgrad_in_high_precision, False))
        one.seed_rounding(1)
        quantized.clear()
        results = []
        with cached_weights(one, on):
            for i in range(3):
                x = inputs(i)
                y = one(x)
                y.sum().backward()
                results += [y, x.grad]
        state = [*results, one.weight.grad, *one.buffers()]
        found.append(([t for t in state if t is not None], len(quantized)))
    (plain, every), (kept, once) = found
    assert every == 3 * once > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, kept, strict=True))
    assert not one.weight_cache.enabled and one.weight_cache.operands is None


def test_a_weight_that_was_written_or_is_another_one_is_quantized_again(
    quantized: list[Tensor],
) -> None:
    one = layer(Scaling("current"))
    with cached_weights(one):
        one(inputs(0))
        with torch.no_grad():
            one.weight.mul_(2)
        assert torch.equal(one(inputs(0)), copy.deepcopy(one)(inputs(0)))
        one.weight.data = one.weight.detach() * 2  # torch counts no write
        assert torch.equal(one(inputs(0)), copy.deepcopy(one)(inputs(0)))
        one.weight = nn.Parameter(one.weight.detach() * 2)
        kept = one(inputs(0))
        assert torch.equal(one(inputs(1)), copy.deepcopy(one)(inputs(1)))
        assert torch.equal(kept, copy.deepcopy(one)(inputs(0)))
    assert len(quantized) == 4 + 4  # and each copy its own: it keeps nothing


def test_a_kept_weight_is_of_its_precision_and_of_passes_that_record_alone(
    quantized: list[Tensor],
) -> None:
    one = layer(Scaling())
    plain = copy.deepcopy(one)
    with cached_weights(one):
        with torch.no_grad():
            one(inputs(0)), plain(inputs(0))
        assert one.weight_cache.operands is None, "an evaluation records no amax, and keeps nothing"
        one(inputs(0)), plain(inputs(0))
        with one.region.entered(active=False):
            assert torch.equal(
                one(inputs(0)), nn.functional.linear(inputs(0), one.weight, one.bias)
            )
        with torch.autocast("cpu", torch.bfloat16), plain.region.entered():
            assert torch.equal(one(inputs(0)), plain(inputs(0)))
    assert torch.equal(one.fp8_amax_history, plain.fp8_amax_history)


def test_under_a_selective_checkpoint_nothing_is_kept() -> None:
    """It counts operations of a pass off against those of the pass that is repeated, which would have fewer."""
    found = []
    for on in (False, True):
        one = layer(Scaling("current"))
        with cached_weights(one, on):
            for i in range(2):
                context = lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])  # noqa: E731
                checkpoint(one, inputs(i), use_reentrant=False, context_fn=context).sum().backward()
        found.append(one.weight.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_fp8 fp8.params=false trainer.micro_batch_size=2",
        "precision=bf16_fp8_block trainer.micro_batch_size=4 model.recompute_granularity=full",
        "precision=bf16_mxfp8 fp8.params=false trainer.micro_batch_size=4 model.recompute_granularity=selective",
        "precision=bf16_fp8 model.share_embeddings_and_output_weights=true fp8.output_layer=true trainer.micro_batch_size=4",
        "precision=fp16_fp8 fp8.params=false precision.loss_scale=1e30 trainer.micro_batch_size=4",
    ],
)
def test_a_run_has_the_bits_of_one_that_quantizes_in_each_pass(
    words: str, quantized: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for on in (True, False):
        if not on:
            monkeypatch.setattr(step, "cached_weights", lambda *_: nullcontext())
        job = fp8cfg.build(small(*words.split(), "optim.warmup_steps=0"))
        quantized.clear()
        done = list(steps(job, 3))
        assert not any(layer.weight_cache.enabled for layer in fp8_linears(job.model))
        found.append((done, stored_state_dict(job.model), len(quantized)))
    (kept, state, once), (plain, other, every) = found
    assert str(kept) == str(plain)  # a norm may be NaN
    assert state.keys() == other.keys() and all(
        torch.equal(t.float(), other[name].float()) for name, t in state.items()
    )
    assert once < every


@pytest.mark.slow
def test_compiled_code_reads_the_weights_that_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    found, fill, filled = [], FP8Linear.quantize_weight, []

    def watched(self: FP8Linear, dtype: torch.dtype) -> None:
        before = self.weight_cache.operands
        fill(self, dtype)
        filled.append(self.weight_cache.operands is not before)

    monkeypatch.setattr(FP8Linear, "quantize_weight", watched)
    for on in (True, False):
        if not on:
            monkeypatch.setattr(step, "cached_weights", lambda *_: nullcontext())
        job = fp8cfg.build(
            small(
                "precision=bf16_fp8",
                "fp8.params=false",
                "model.num_layers=1",
                "trainer.micro_batch_size=4",
            )
        )
        job.compile_model()
        found.append((list(steps(job, 2)), stored_state_dict(job.model)))
    (kept, state), (plain, other) = found
    assert kept == plain and all(
        torch.equal(t.float(), other[name].float()) for name, t in state.items()
    )
    assert filled == ([True] * 4 + [False] * 4) * 2 + [False] * 16


def loop_losses(
    quantized: list[Tensor], keeps: bool, preset: str, update: str, calls_step: bool = True
) -> tuple[list[float], list[int]]:
    """The losses of a user's loop with two microbatches and an evaluation a step, and the weights quantized in each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    recipe = fp8cfg.compose([f"precision={preset}", "fp8.params=false", "fp8.output_layer=true"])
    fp8 = fp8cfg.convert_model(model, recipe)
    for one in fp8_linears(model):
        one.weight_cache.in_loop = keeps
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=update == "fused")
    losses, counts = [], []
    for number in range(4):
        quantized.clear()
        for micro in range(2):
            with fp8.autocast():
                loss = model(inputs(2 * number + micro)).square().mean()
                loss.backward()
            losses.append(loss.item())
        counts.append(len(quantized))
        if update == "data":
            for p in model.parameters():
                p.data.sub_(p.grad, alpha=1e-2)
        else:
            optimizer.step()
        with torch.no_grad(), fp8.autocast():  # before the step is ended
            losses.append(model(inputs(99)).square().mean().item())
        optimizer.zero_grad()
        if calls_step:
            fp8.step()
    return losses, counts


@pytest.mark.parametrize("update", ["fused", "data"])
@pytest.mark.parametrize("preset", ["bf16_fp8", "bf16_fp8_current"])
def test_a_users_loop_quantizes_each_weight_once_a_step(
    quantized: list[Tensor], preset: str, update: str
) -> None:
    """From the second step on. Neither fused optimizers nor writes to `.data` raise the version of a weight."""
    losses, counts = loop_losses(quantized, True, preset, update)
    expected, all_passes = loop_losses(quantized, False, preset, update)
    assert losses == expected
    assert all_passes == [4] * 4
    assert counts == [4, 2, 2, 2]


def test_a_users_loop_without_fp8_step_never_reads_an_old_weight(quantized: list[Tensor]) -> None:
    arguments = "bf16_fp8_current", "data", False
    losses, counts = loop_losses(quantized, True, *arguments)
    assert losses == loop_losses(quantized, False, *arguments)[0]
    assert counts == [4] * 4


def test_weights_changed_between_passes_of_a_step_are_quantized_again(
    quantized: list[Tensor],
) -> None:
    """Sharpness-aware minimization: gradients are cleared between the two passes."""
    model = nn.Sequential(nn.Linear(64, 64))
    words = ["precision=bf16_fp8_current", "fp8.params=false", "fp8.output_layer=true"]
    fp8 = fp8cfg.convert_model(model, fp8cfg.compose(words))
    for _ in range(2):
        quantized.clear()
        outputs = []
        for _ in range(2):
            with fp8.autocast():
                outputs.append(model(inputs(0)))
                outputs[-1].sum().backward()
            model[0].weight.data.mul_(1.5)
            model.zero_grad()
        assert len(quantized) == 2 and not torch.equal(*outputs)
        fp8.step()


def test_a_loop_without_microbatches_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    words = ["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true"]
    fp8 = fp8cfg.convert_model(model, fp8cfg.compose(words))
    for _ in range(3):
        with fp8.autocast():
            model(inputs(0)).sum().backward()
        fp8.step()
        model.zero_grad()
    assert [layer.weight_cache.num_bytes for layer in fp8_linears(model)] == [0]
