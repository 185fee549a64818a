"""State of mixed-precision optimization: resumed bit for bit, named tensors and JSON, another's refused untouched."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.optim import LossScaler
from fp8cfg.optim.low_bit.adam import LowBitTrainingAdamW
from fp8cfg.optim.low_bit.columns import named_columns
from fp8cfg.optim.mixed_precision import param_groups
from tests.support.mixed_precision import (
    DTYPES,
    INNER,
    SCHEDULE,
    make_model,
    make_optimizer,
    save,
    scaler_for,
    train,
)


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
    assert after.state_tensors().keys() == {
        f"{name}.master" for name, _ in model.named_parameters()
    }


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
    assert all(
        torch.equal(tensor, expected[name]) for name, tensor in other.state_tensors().items()
    )


def test_state_dict_and_its_inverse() -> None:
    model = make_model(torch.float16)
    optimizer = make_optimizer(model, loss_scaler=scaler_for(torch.float16))
    train(model, optimizer, range(3))
    other = make_optimizer(model, loss_scaler=scaler_for(torch.float16))
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["lr"] == SCHEDULE.lr_at(2)
    assert save(model, other) == save(model, optimizer)


def test_what_is_no_state_dict_of_its_kind_is_one_line_and_changes_nothing() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model)
    before, good = save(model, optimizer), optimizer.state_dict()
    torchs = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))]).state_dict()
    for wrong, line in (
        ({"a": 1}, "has no param_groups, tensors, json"),
        ("x", "expected what state_dict() gives, not str"),
        (
            torchs,
            "has no tensors, json; it is keyed by position, as torch's optimizers have it, and this one by names",
        ),
        ({**good, "param_groups": [1]}, "param_groups is no list of groups"),
        ({**good, "tensors": 3}, "tensors is no table, but int"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(f'optimizer state: {line}')}$"):
            optimizer.load_state_dict(wrong)  # type: ignore[arg-type]
    assert save(model, optimizer) == before


def test_state_is_named_tensors_and_json() -> None:
    model = make_model(torch.bfloat16)
    optimizer = make_optimizer(model, loss_scaler=LossScaler(loss_scale=4.0))
    train(model, optimizer, range(3))
    name = "layers.0.mlp.linear_fc1.weight"
    tensors, state = optimizer.state_tensors(), optimizer.state_json()
    assert {key.removeprefix(name + ".") for key in tensors if key.startswith(name)} == {
        "master",
        "exp_avg",
        "exp_avg_sq",
    }
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert state["optimizer"] == "AdamW"
    assert state["state"][name] == {"tensors": ["exp_avg", "exp_avg_sq"], "step": 3}
    assert state["loss_scale"]["scale"] == 4.0


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


def test_a_refused_state_changes_no_loss_scale() -> None:
    model = make_model(torch.float16)
    optimizer = make_optimizer(model, loss_scaler=LossScaler())
    state = optimizer.state_json()
    state["loss_scale"] = {**state["loss_scale"], "scale": 2.0}
    with pytest.raises(ValueError, match="tensors missing"):
        optimizer.load_state({}, state)
    assert optimizer.loss_scaler is not None
    assert optimizer.loss_scaler.scale == LossScaler().scale


def test_a_refused_state_dict_changes_no_fp8_weight() -> None:
    """FP8 state has the codes of the weights, so it is loaded after the check of the rest."""
    jobs = []
    for seed, name in enumerate(("sgd", "adamw")):
        torch.manual_seed(seed)
        recipe = fp8cfg.compose(["precision=bf16_fp8", f"optim.name={name}"])
        jobs.append(fp8cfg.build(recipe, model=nn.Sequential(nn.Linear(32, 32))))
    sgd, adamw = jobs
    before = {key: value.clone() for key, value in adamw.model.state_dict().items()}
    with pytest.raises(ValueError, match="is of SGD, this optimizer is AdamW"):
        adamw.optimizer.load_state_dict(sgd.optimizer.state_dict())
    for key, value in adamw.model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("low_bit", [False, True])
def test_state_of_another_kind_of_optimizer_is_refused(low_bit: bool) -> None:
    """A run without low-bit state, and one with it, name both optimizers."""
    plain = make_optimizer(make_model(torch.float32))
    columns = named_columns(exp_avg="fp8")
    groups = param_groups(make_model(torch.float32), 0.1)
    quantized = LowBitTrainingAdamW([{**group, "columns": columns} for group in groups])
    saved, target = (quantized, plain) if low_bit else (plain, quantized)
    message = f"is of {saved.state_json()['optimizer']}, this optimizer is"
    with pytest.raises(ValueError, match=message):
        target.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "1 tensors missing, among them layers.0.mlp.linear_fc1.weight.exp_avg"),
        ("unexpected", "1 tensors unexpected, among them more"),
        (
            "shape",
            r"linear_fc1.weight.exp_avg is torch.float32 \[3\], expected torch.float32 \[48, 16\]",
        ),
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
