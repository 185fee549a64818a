"""The transpose cache of weights that are stored in FP8: one transpose an optimizer step, and no other bit of what passes compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics import E2M1, E4M3, FP8Linear, Region, Scaling, fp8_linears
from fp8cfg.numerics.fp8_weights import FP8Weight
from fp8cfg.numerics.linear_operands import NO_OPERANDS, cached_weights
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.small import small, steps

SCALINGS = [
    Scaling(),
    Scaling("current"),
    Scaling("current", granularity="row"),
    Scaling("block", weights_2d=True),
    Scaling("mxfp8", backward=E4M3, weights_2d=True),
    Scaling("nvfp4", forward=E2M1, backward=E2M1),
]
KEY = "fp8.keep_transpose_cache"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The dimensions of stored weights that products were to contract, each time one was read for them."""
    seen: list[int] = []
    plain = FP8Weight.operand

    def operand(stored: FP8Weight, dim: int, *rest: Any) -> Any:
        seen.append(dim)
        return plain(stored, dim, *rest)

    monkeypatch.setattr(FP8Weight, "operand", operand)
    return seen


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FP8Linear]:
    """The layers that made what they keep, each time they did."""
    seen: list[FP8Linear] = []
    plain = FP8Linear._cached_operands

    def cached_operands(self: FP8Linear, *args: Any, **kwargs: Any) -> Any:
        before = self.weight_cache.operands
        operands = plain(self, *args, **kwargs)
        is_new = operands is not NO_OPERANDS and operands is not before
        if is_new and not torch.compiler.is_compiling():
            seen.append(self)
        return operands

    monkeypatch.setattr(FP8Linear, "_cached_operands", cached_operands)
    return seen


def layer(scaling: Scaling, keeps: bool) -> FP8Linear:
    torch.manual_seed(1)
    one = FP8Linear.from_linear(nn.Linear(64, 48), scaling, Region(active=True), fp8_params=True)
    one.seed_rounding(1)
    one.keeps_transpose = keeps
    return one


def inputs(seed: int) -> Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: f"{s.kind}-{s.granularity}")
def test_passes_read_one_transpose_and_compute_what_they_would(
    scaling: Scaling, read: list[int]
) -> None:
    found = []
    for keeps in (False, True):
        one, results = layer(scaling, keeps), []
        read.clear()
        with cached_weights(one):
            for i in range(3):
                x = inputs(i)
                y = one(x)
                y.sum().backward()
                results += [y, x.grad]
            if keeps:
                kept = one.weight_cache.operands
                assert kept and kept.fprop is None and kept.dgrad
                assert kept.dgrad.data.shape == (64, 48) and kept.dgrad.data.is_contiguous()
        assert one.weight_cache.operands is None
        found.append([t for t in (*results, one.parameter.grad, *one.buffers()) if t is not None])
    assert len(read) == 3 + 1, "of each forward pass, and of the first alone for dgrad"
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_weight_that_was_written_is_transposed_again() -> None:
    one, other = (layer(Scaling("current"), keeps) for keeps in (True, False))
    with cached_weights(one):
        for i in range(2):
            x, same = inputs(i), inputs(i)
            one(x).sum().backward(), other(same).sum().backward()
            assert torch.equal(x.grad, same.grad)
            master = torch.randn(48, 64, generator=torch.Generator().manual_seed(i))
            one.set_weight(master), other.set_weight(master)


def test_without_a_gradient_of_the_input_nothing_is_kept() -> None:
    one = layer(Scaling(), keeps=True)
    with cached_weights(one):
        one(inputs(0).detach()).sum().backward()
        assert one.weight_cache.operands is None
        with torch.no_grad():
            one(inputs(0))
        assert one.weight_cache.operands is None


RUNS = {
    "precision=bf16_fp8 trainer.micro_batch_size=2": 8,
    "precision=bf16_fp8_current fp8.params=true fp8.high_precision_at_start=1 fp8.high_precision_at_end=0 trainer.micro_batch_size=4 "
    "model.recompute_granularity=full": 4,
    "precision=bf16_fp8_block fp8.params=true trainer.micro_batch_size=4 model.recompute_granularity=selective": 8,
    "precision=fp16_fp8 precision.loss_scale=1e30 trainer.micro_batch_size=4 fp8.output_layer=true": 9,
    "precision=bf16_fp8 opt_level=O3 trainer.micro_batch_size=4": 8,
    "precision=bf16_fp8 task=lora trainer.micro_batch_size=4": 7,
}
"""Words of a run, and how many transposes each of its steps makes: of an input without a gradient, as the first layer's beside
adapters, none at all."""


def ran(
    words: str, keeps: bool, count: int = 2, compiled: bool = False
) -> tuple[str, dict[str, Tensor]]:
    job = fp8cfg.build(
        small(*words.split(), "optim.warmup_steps=0", *([f"{KEY}=true"] if keeps else []))
    )
    if compiled:
        job.compile_model()
    done = [*steps(job, count)]
    assert not any(one.weight_cache.operands for one in fp8_linears(job.model))
    return str(done), stored_state_dict(job.model)  # a norm may be NaN


@pytest.mark.parametrize("words", RUNS)
def test_a_run_makes_a_transpose_a_step_and_has_the_bits_of_one_that_keeps_none(
    words: str, made: list[FP8Linear]
) -> None:
    plain, state = ran(words, keeps=False)
    before = len(made)  # of a weight that no layer stores
    kept, other = ran(words, keeps=True)
    assert kept == plain and all(
        torch.equal(t.float(), other[name].float()) for name, t in state.items()
    )
    assert before == 0 and len(made) == 2 * RUNS[words]


@pytest.mark.slow
def test_compiled_code_reads_the_transposes_that_are_kept(made: list[FP8Linear]) -> None:
    words = "precision=bf16_fp8 model.num_layers=1 trainer.micro_batch_size=4 fp8.include=['*.linear_fc2']"
    (plain, state), (kept, other) = (ran(words, keeps, compiled=True) for keeps in (False, True))
    assert kept == plain and all(
        torch.equal(t.float(), other[name].float()) for name, t in state.items()
    )
    assert len(made) == 2
