"""Mixed-precision optimization against hand-written loops, bit for bit."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from fp8cfg.models import TransformerConfig
from fp8cfg.models.transformer import Transformer
from fp8cfg.optim import LossScaler
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer, param_groups
from tests.support.mixed_precision import (
    DTYPES,
    INNER,
    backward,
    hand_loop,
    make_model,
    make_optimizer,
    save,
    scaler_for,
    train,
)


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_hand_written_loop_gives_the_same_bits(dtype: torch.dtype, inner: str) -> None:
    ours, theirs = make_model(dtype), make_model(dtype)
    scaler = scaler_for(dtype)
    scale = 1.0 if scaler is None else scaler.scale
    optimizer = make_optimizer(ours, inner, loss_scaler=scaler)
    took: list[bool] = []
    optimizer.on_step.append(lambda: took.append(True))
    optimizer.on_skip.append(lambda: took.append(False))
    losses = train(ours, optimizer, range(10))
    assert losses == hand_loop(theirs, INNER[inner], range(10), scale)
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    assert len(set(losses)) == 20
    assert all(master.grad is None for p, master in optimizer.masters.items() if master is not p)
    assert set(took) == ({True} if scaler is None else {True, False})


def test_it_is_an_optimizer_of_the_models_parameters() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    assert optimizer.param_groups[0]["params"][0] is next(model.parameters())
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    before = [p.clone() for p in model.parameters()]
    backward(model, 0)
    optimizer.step()
    scheduler.step()
    assert all(
        torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)
    )  # lr 0 reached the inner one
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())


def test_tied_parameters_once_and_vectors_without_decay() -> None:
    config = TransformerConfig(1, 16, 24, 2, 1, 8, 32, 8, tie_embeddings=True)
    matrices, vectors = param_groups(Transformer(config), 0.1)
    assert [matrices["weight_decay"], vectors["weight_decay"]] == [0.1, 0.0]
    assert len(matrices["params"]) == 5 and len(vectors["params"]) == 3
    assert all(p.dim() > 1 for _, p in matrices["params"])
    assert "output_layer.weight" not in dict(matrices["params"])
    assert len(param_groups(nn.Linear(2, 2, bias=False), 0.1)) == 1


def test_updates_too_small_for_bfloat16_add_up() -> None:
    weight = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer([("weight", weight)], partial(torch.optim.SGD, lr=1e-4))
    for _ in range(100):
        weight.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    assert torch.equal(weight, torch.full((4,), 0.99).bfloat16())


def test_norm_and_clipping_are_of_the_unscaled_float32_gradient() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    options = {"loss_scaler": LossScaler(loss_scale=1024.0), "clip_grad": 1.0}
    optimizer = MixedPrecisionOptimizer(
        [("weight", weight)], partial(torch.optim.SGD, lr=1.0), **options
    )
    weight.grad = torch.tensor([3.0, 4.0], dtype=torch.float16) * 1024
    assert optimizer.step()
    assert optimizer.grad_norm == 5.0
    torch.testing.assert_close(weight, torch.tensor([-0.6, -0.8], dtype=torch.float16))
    assert torch.equal(weight.grad, torch.tensor([3.0, 4.0], dtype=torch.float16) * 1024)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_skipped_step_changes_nothing_but_the_scale(dtype: torch.dtype, bad: float) -> None:
    model = make_model(dtype)
    scaler = LossScaler(initial_loss_scale=8.0, hysteresis=1)
    optimizer = make_optimizer(model, loss_scaler=scaler)
    called: list[str] = []
    optimizer.on_step.append(lambda: called.append("step"))
    optimizer.on_skip.append(lambda: called.append("skip"))
    train(model, optimizer, range(3))
    weights, tensors, state = save(model, optimizer)
    backward(model, 3)
    model.layers[0].mlp.linear_fc2.weight.grad[3, 2] = bad
    assert optimizer.step() is False
    assert called == ["step"] * 3 + ["skip"]
    assert not torch.tensor(optimizer.grad_norm).isfinite()
    assert save(model, optimizer)[:2] == (weights, tensors)
    assert json.loads(state)["state"] == optimizer.state_json()["state"]
    assert scaler.scale == 4.0


class Float8Weight(nn.Module):
    """A weight in FP8 with its scale, as FP8 parameters are stored."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.scale = weight.abs().max() / 448
        self.weight = nn.Parameter((weight / self.scale).to(torch.float8_e4m3fn))
        self.weight.grad_dtype = torch.float32

    def set_weight(self, master: Tensor) -> None:
        self.weight.copy_((master / self.scale).to(torch.float8_e4m3fn))


def test_float8_parameters_keep_exact_masters() -> None:
    start = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    module = Float8Weight(start)
    order: list[str] = []

    def write(master: Tensor) -> None:
        order.append("write")
        module.set_weight(master)

    optimizer = MixedPrecisionOptimizer(
        module.named_parameters(),
        partial(torch.optim.SGD, lr=1.0),
        masters={module.weight: start.clone()},
        writers={module.weight: write},
    )
    optimizer.on_step.append(lambda: order.append("hook"))
    total = torch.zeros(4, 4)
    for step in range(20):
        module.weight.grad = torch.full((4, 4), 1e-3 * step)
        total += module.weight.grad
        optimizer.step()
    assert order == ["hook", "write"] * 20
    master = optimizer.state_tensors()["weight.master"]
    torch.testing.assert_close(master, start - total)
    assert torch.equal(
        module.weight.float(), (master / module.scale).to(torch.float8_e4m3fn).float()
    )


def test_parameters_without_gradient_stay() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    backward(model, 0)
    model.embedding.weight.grad = None
    before = model.embedding.weight.clone()
    optimizer.step()
    assert torch.equal(model.embedding.weight, before)
    assert optimizer.state_json()["state"]["embedding.weight"] == {"tensors": []}


def test_weights_written_by_someone_else_are_not_undone_silently() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    model.load_state_dict(make_model(torch.bfloat16, seed=1).state_dict())
    backward(model, 0)
    with pytest.raises(
        RuntimeError, match=r"9 parameters, embedding.weight among them, were written after"
    ):
        optimizer.step()


def test_what_cannot_work_is_refused() -> None:
    linear = nn.Linear(2, 2, dtype=torch.bfloat16)
    sgd = torch.optim.SGD
    with pytest.raises(ValueError, match=r"pass param_groups\(model, weight_decay\)"):
        MixedPrecisionOptimizer(linear.parameters(), sgd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parameters have one name"):
        MixedPrecisionOptimizer([("w", linear.weight), ("w", linear.bias)], sgd)
    with pytest.raises(ValueError, match="masters for 1 parameters that are not optimized"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd, masters={linear.bias: torch.zeros(2)})
    with pytest.raises(
        ValueError, match=r"the master of w must be float32 \[2, 2\], not torch.bfloat16 \[2, 2\]"
    ):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd, masters={linear.weight: linear.weight})
    with pytest.raises(ValueError, match="writers are for optimized parameters"):
        MixedPrecisionOptimizer(
            [("w", linear.weight)], sgd, writers={linear.bias: lambda master: None}
        )
    float8 = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(
        ValueError, match=r"w is torch.float8_e4m3fn: its float32 master must be given"
    ):
        MixedPrecisionOptimizer([("w", float8)], sgd)
    with pytest.raises(TypeError, match="takes no closure"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd).step(lambda: 0.0)  # type: ignore[arg-type]


def test_a_group_added_after_construction_is_refused() -> None:
    """Its parameters would have no master, and the next step would fail inside of `zip`."""
    optimizer = make_optimizer(make_model(torch.bfloat16))
    with pytest.raises(ValueError, match="add_param_group: masters are made when"):
        optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.zeros(2)))]})
