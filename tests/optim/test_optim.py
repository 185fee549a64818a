"""Mixed-precision optimization against hand-written loops, bit for bit, and its resume, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from fp8cfg.models import TransformerConfig
from fp8cfg.models.transformer import Transformer
from fp8cfg.optim import LossScaler, Schedule
from fp8cfg.optim.groups import param_groups, set_grad_dtype
from fp8cfg.optim.mixed_precision import MixedPrecisionOptimizer

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
INNER: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-5, fused=True),
    "adamw unfused": partial(torch.optim.AdamW, betas=(0.9, 0.95), eps=1e-5, foreach=False),
    "adam": partial(torch.optim.Adam, betas=(0.9, 0.95), fused=True),
    "sgd": partial(torch.optim.SGD, momentum=0.9, fused=True),
    "plain sgd": torch.optim.SGD,
}
SCHEDULE = Schedule(max_lr=1e-2, min_lr=1e-3, warmup_steps=3, max_steps=12)
CONFIG = TransformerConfig(1, 16, 24, 2, 1, 8, 32, 8)
CLIP, DECAY = 0.5, 0.1


def make_model(dtype: torch.dtype, seed: int = 0) -> Transformer:
    model = Transformer(CONFIG).to(dtype)
    model.init_weights(seed)
    if dtype == torch.bfloat16:
        set_grad_dtype(model.parameters(), torch.float32)
    return model


def make_optimizer(model: nn.Module, inner: str = "adamw", **options: Any) -> MixedPrecisionOptimizer:
    return MixedPrecisionOptimizer(param_groups(model, DECAY), INNER[inner], clip_grad=CLIP, **options)


def scaler_for(dtype: torch.dtype) -> LossScaler | None:
    return LossScaler(initial_loss_scale=2.0**18, loss_scale_window=2) if dtype == torch.float16 else None


def tokens_of(step: int, microbatch: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + microbatch)
    tokens = torch.randint(CONFIG.vocab_size, (2, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def backward(model: Transformer, step: int, scale: float = 1.0) -> list[float]:
    """Two microbatches, accumulated."""
    losses = [model(*tokens_of(step, microbatch)) for microbatch in range(2)]
    for loss in losses:
        (loss * scale / 2).backward()
    return [loss.item() for loss in losses]


def train(model: Transformer, optimizer: MixedPrecisionOptimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        scale = 1.0 if optimizer.loss_scaler is None else optimizer.loss_scaler.scale
        losses += backward(model, step, scale)
        SCHEDULE.apply(optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def hand_loop(model: Transformer, make_inner: Callable[..., torch.optim.Optimizer], steps: range, scale: float) -> list[float]:
    """What `train` must do, with nothing of ours in it; a skipped step where a gradient is not finite."""
    named = list(model.named_parameters())
    masters = {name: p.detach().clone().float() for name, p in named}
    groups = [
        {"params": [masters[name] for name, p in named if p.dim() > 1], "weight_decay": DECAY},
        {"params": [masters[name] for name, p in named if p.dim() == 1], "weight_decay": 0.0},
    ]
    inner, losses, good = make_inner(groups), [], 0
    forgiven = False
    for step in steps:
        losses += backward(model, step, scale)
        for name, p in named:
            masters[name].grad = p.grad.detach().float() * (1.0 / scale)
            p.grad = None
        if all(bool(m.grad.isfinite().all()) for m in masters.values()):
            ordered = [m for group in groups for m in group["params"]]
            torch.nn.utils.clip_grad_norm_(ordered, CLIP)
            for group in inner.param_groups:
                group["lr"] = SCHEDULE.lr_at(step)
            inner.step()
            with torch.no_grad():
                for name, p in named:
                    p.copy_(masters[name])
            good += 1
            if good % 2 == 0 and scale != 1.0:
                scale, forgiven = scale * 2, False
        else:
            good = 0
            scale, forgiven = (scale / 2, True) if forgiven else (scale, True)
    return losses


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
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))
    assert len(set(losses)) == 20
    assert all(master.grad is None for p, master in optimizer.masters.items() if master is not p)
    assert set(took) == ({True} if scaler is None else {True, False})


def save(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> tuple[bytes, bytes, str]:
    tensors = safetensors.torch.save(optimizer.state_tensors())
    return safetensors.torch.save(model.state_dict()), tensors, json.dumps(optimizer.state_json())


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("dtype", DTYPES)
def test_resume_gives_the_same_bits(dtype: torch.dtype, inner: str) -> None:
    model = make_model(dtype)
    optimizer = make_optimizer(model, inner, loss_scaler=scaler_for(dtype))
    train(model, optimizer, range(5))
    weights, tensors, state = save(model, optimizer)
    expected = train(model, optimizer, range(5, 10))

    fresh = make_model(dtype, seed=99)
    resumed = make_optimizer(fresh, inner, loss_scaler=scaler_for(dtype))
    fresh.load_state_dict(safetensors.torch.load(weights))
    resumed.load_state(safetensors.torch.load(tensors), json.loads(state))
    assert train(fresh, resumed, range(5, 10)) == expected
    assert save(fresh, resumed) == save(model, optimizer)


def test_a_fresh_state_resumes_too() -> None:
    model = make_model(torch.bfloat16)
    before = make_optimizer(model)
    fresh = before.state_json()
    after = make_optimizer(model)
    tensors = {name: tensor.clone() for name, tensor in before.state_tensors().items()}
    train(model, after, range(2))
    after.load_state(tensors, fresh)
    assert after.state_json() == fresh
    assert after.state_tensors().keys() == {f"{name}.master" for name, _ in model.named_parameters()}


def test_loaded_state_shares_no_memory_with_the_file() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    tensors = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    other = make_optimizer(model)
    other.load_state(tensors, optimizer.state_json())
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in other.state_tensors().items())


def test_state_dict_and_its_inverse() -> None:
    model = make_model(torch.float16)
    optimizer = make_optimizer(model, loss_scaler=scaler_for(torch.float16))
    train(model, optimizer, range(3))
    other = make_optimizer(model, loss_scaler=scaler_for(torch.float16))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == SCHEDULE.lr_at(2)
    assert save(model, other) == save(model, optimizer)


def test_state_is_named_tensors_and_json() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, loss_scaler=LossScaler(loss_scale=4.0))
    train(model, optimizer, range(3))
    name = "layers.0.mlp.linear_fc1.weight"
    tensors, state = optimizer.state_tensors(), optimizer.state_json()
    assert {key.removeprefix(name + ".") for key in tensors if key.startswith(name)} == {"master", "exp_avg", "exp_avg_sq"}
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert state["optimizer"] == "AdamW"
    assert state["state"][name] == {"tensors": ["exp_avg", "exp_avg_sq"], "step": 3}
    assert state["loss_scale"]["scale"] == 4.0


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
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))  # lr 0 reached the inner one
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


def test_gradients_accumulate_in_the_asked_dtype() -> None:
    gradients = [torch.full((4,), value, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]

    def accumulated(dtype: torch.dtype) -> Tensor:
        weight = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
        set_grad_dtype([weight], dtype)
        for gradient in gradients:
            (weight * gradient).sum().backward()
        assert weight.grad is not None and weight.grad.dtype == dtype
        return weight.grad

    assert accumulated(torch.float32)[0] == 258.0
    assert accumulated(torch.bfloat16)[0] == 256.0  # 257 is no bfloat16
    exact = nn.Parameter(torch.zeros(4))
    set_grad_dtype([exact], torch.bfloat16)
    assert exact.grad_dtype == torch.float32


def test_norm_and_clipping_are_of_the_unscaled_float32_gradient() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.float16))
    options = {"loss_scaler": LossScaler(loss_scale=1024.0), "clip_grad": 1.0}
    optimizer = MixedPrecisionOptimizer([("weight", weight)], partial(torch.optim.SGD, lr=1.0), **options)
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
        set_grad_dtype([self.weight], torch.float32)

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
    assert torch.equal(module.weight.float(), (master / module.scale).to(torch.float8_e4m3fn).float())


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
    with pytest.raises(RuntimeError, match=r"9 parameters, embedding.weight among them, were written after"):
        optimizer.step()


def broken(change: str, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    name = "layers.0.mlp.linear_fc1.weight"
    if change == "missing":
        del tensors[f"{name}.exp_avg"]
    elif change == "unexpected":
        tensors["more"] = torch.zeros(1)
    elif change == "shape":
        tensors[f"{name}.exp_avg"] = torch.zeros(3)
    elif change == "dtype":
        tensors[f"{name}.master"] = tensors[f"{name}.master"].bfloat16()
    elif change == "parameter":
        del state["state"][name]
    elif change == "optimizer":
        state["optimizer"] = "SGD"
    elif change == "scale":
        state["loss_scale"] = LossScaler().state()
    elif change == "json":
        del state["loss_scale"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "1 tensors missing, among them layers.0.mlp.linear_fc1.weight.exp_avg"),
        ("unexpected", "1 tensors unexpected, among them more"),
        ("shape", r"linear_fc1.weight.exp_avg is torch.float32 \[3\], expected torch.float32 \[48, 16\]"),
        ("dtype", r"linear_fc1.weight.master is torch.bfloat16 \[48, 16\], expected torch.float32"),
        ("parameter", "1 parameters missing, among them layers.0.mlp.linear_fc1.weight"),
        ("optimizer", "the saved state is of SGD, this optimizer is AdamW"),
        ("scale", "the loss must be scaled by both"),
        ("json", "the JSON has"),
    ],
)
def test_other_state_is_refused_untouched(change: str, message: str) -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(2))
    tensors, state = dict(optimizer.state_tensors()), optimizer.state_json()
    broken(change, tensors, state)
    other = make_optimizer(model)
    before = save(model, other)
    with pytest.raises(ValueError, match=message):
        other.load_state(tensors, state)
    assert save(model, other) == before


def test_what_cannot_work_is_refused() -> None:
    linear = nn.Linear(2, 2, dtype=torch.bfloat16)
    sgd = torch.optim.SGD
    with pytest.raises(ValueError, match=r"pass param_groups\(model, weight_decay\)"):
        MixedPrecisionOptimizer(linear.parameters(), sgd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="two parameters have one name"):
        MixedPrecisionOptimizer([("w", linear.weight), ("w", linear.bias)], sgd)
    with pytest.raises(ValueError, match="masters for 1 parameters that are not optimized"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd, masters={linear.bias: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"the master of w must be float32 \[2, 2\], not torch.bfloat16 \[2, 2\]"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd, masters={linear.weight: linear.weight})
    with pytest.raises(ValueError, match="writers are for optimized parameters"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd, writers={linear.bias: lambda master: None})
    float8 = nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn))
    with pytest.raises(ValueError, match=r"w is torch.float8_e4m3fn: its float32 master must be given"):
        MixedPrecisionOptimizer([("w", float8)], sgd)
    with pytest.raises(TypeError, match="takes no closure"):
        MixedPrecisionOptimizer([("w", linear.weight)], sgd).step(lambda: 0.0)  # type: ignore[arg-type]
