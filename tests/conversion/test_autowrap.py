"""Autowrap: a converted model whose forward enters FP8 by itself, in training and, where it is asked to, in evaluation."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics import FP8Linear, fp8_linears
from tests.support.convert_models import BACKENDS, DELAYED, TOKENS, Model, loss_of, recipe


@pytest.mark.parametrize("backend", BACKENDS)
def test_autowrap_runs_training_in_fp8_and_evaluation_not(backend: str) -> None:
    model, r = Model(), recipe(backend=backend)
    plain = copy.deepcopy(model)
    fp8cfg.convert_model(model, r)
    assert fp8cfg.apply_fp8_autowrap(model, r) is model
    assert not torch.equal(loss_of(model), loss_of(plain))
    model.eval(), plain.eval()
    assert torch.equal(loss_of(model), loss_of(plain))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    late = recipe("fp8.use_autocast_during_eval=true", backend=backend)
    model.forward = MethodType(fp8cfg.contextual_fp8_autocast(plain.forward, late), model)
    assert not torch.equal(loss_of(model), loss_of(plain))


def test_the_function_of_autowrap_takes_a_recipe_and_then_the_model() -> None:
    model = Model()
    fp8cfg.convert_model(model, recipe())
    with pytest.raises(fp8cfg.ConfigError, match="expected a Recipe, got int"):
        fp8cfg.contextual_fp8_autocast(model.forward, 8)
    model.forward = fp8cfg.contextual_fp8_autocast(model.forward, recipe())
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"takes the model first, not a Tensor; write model\.forward = types\.MethodType\(function, model\)",
    ):
        loss_of(model)


def test_autowrap_of_a_forward_that_was_wrapped_keeps_its_arguments() -> None:
    """As Accelerate's hooks leave it; a Trainer picks the columns of its data by them."""
    model = Model()
    fp8cfg.convert_model(model, recipe())
    forward = model.forward
    model.forward = functools.update_wrapper(
        functools.partial(lambda module, *args: forward(*args), model), forward
    )
    fp8cfg.apply_fp8_autowrap(model, recipe())
    assert [*inspect.signature(model.forward).parameters] == ["tokens", "targets"] and loss_of(
        model
    ).isfinite()


def test_autowrap_of_a_copy_and_back_again() -> None:
    model = Model()
    fp8cfg.convert_model(model, recipe())
    fp8cfg.apply_fp8_autowrap(model, recipe())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embedding.weight.mul_(2)
    assert not torch.equal(loss_of(other), loss_of(model)), "a copy runs itself"
    fp8cfg.convert_back(model)
    assert "forward" not in vars(model) and fp8cfg.has_fp8_layers(other)
    loss_of(model)


def test_autowrap_is_not_lost_by_pickling() -> None:
    model = Model()
    fp8cfg.convert_model(model, recipe())
    assert isinstance(pickle.loads(pickle.dumps(model)).h[0].up, FP8Linear)
    fp8cfg.apply_fp8_autowrap(model, recipe())
    with pytest.raises((AttributeError, pickle.PicklingError), match="contextual_fp8_autocast"):
        pickle.dumps(model)


def test_autowrap_needs_converted_layers_and_their_recipe() -> None:
    model = Model()
    with pytest.raises(
        fp8cfg.ConfigError, match=r"has no converted layers; call fp8cfg\.convert_model"
    ):
        fp8cfg.apply_fp8_autowrap(model, recipe())
    fp8cfg.convert_model(model, recipe())
    with pytest.raises(
        fp8cfg.ConfigError, match=r"fp8\.format=e4m3: the model's layers were converted with hybrid"
    ):
        fp8cfg.apply_fp8_autowrap(model, recipe("fp8.format=e4m3"))
    fp8cfg.apply_fp8_autowrap(model, recipe())
    with pytest.raises(fp8cfg.ConfigError, match="enters FP8 already"):
        fp8cfg.apply_fp8_autowrap(model, recipe())


def test_autowrap_finds_out_a_stand_in_that_never_enters(monkeypatch: pytest.MonkeyPatch) -> None:
    from contextlib import nullcontext

    from fp8cfg.backends.native import backend as native

    model = Model()
    fp8cfg.convert_model(model, recipe())
    fp8cfg.apply_fp8_autowrap(model, recipe())
    monkeypatch.setattr(native, "autocast", lambda model, enabled=True: nullcontext())
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8 before this backward pass"):
        loss_of(model).backward()
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        loss_of(model)


def test_delayed_scaling_rolls_in_a_loop_of_ones_own() -> None:
    """With `step` after the optimizer, and with autowrap alone, the scales are those that a job's optimizer leaves."""

    def scales(model: nn.Module) -> list[Tensor]:
        return [
            t for layer in fp8_linears(model) for t in (layer.fp8_scale, layer.fp8_amax_history)
        ]

    r = fp8cfg.compose([*DELAYED, "backend=native"])
    stepped, wrapped = Model(), Model()
    fp8 = fp8cfg.convert_model(stepped, r)
    fp8cfg.convert_model(wrapped, r)
    fp8cfg.apply_fp8_autowrap(wrapped, r)
    unset = scales(stepped)[0].clone()
    for _ in range(3):
        with fp8.autocast():
            loss_of(stepped).backward()
        loss_of(wrapped).backward()
        fp8.step()
    assert not torch.equal(unset, scales(stepped)[0])
    wrapped(TOKENS)  # which rolls the third pass, and records its own
    for ours, theirs in zip(fp8_linears(stepped), fp8_linears(wrapped), strict=True):
        assert torch.equal(ours.fp8_scale, theirs.fp8_scale) and torch.equal(
            ours.fp8_amax_history[1:], theirs.fp8_amax_history[1:]
        )
