"""Linear layers that cast or compute something else: known by running them, converted, refused by name."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends.any_model.module_swap import Casts, casts_of
from tests.support.convert_models import BACKENDS, recipe


class ToInput(nn.Linear):
    """nanochat's Linear."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(
            x, self.weight.to(dtype=x.dtype), None if self.bias is None else self.bias.to(x.dtype)
        )


class ToWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


class ToBfloat16(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp(-100, 100))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.1, self.training))


class OtherGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.detach())


class Doubled(nn.Linear):
    """It does not read its bias, so that there is no gradient of that."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * F.linear(x, self.weight)


class Constant(nn.Linear):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Strange(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise AttributeError("needs what a small copy has not")


@pytest.mark.parametrize(
    ("cls", "casts"),
    [
        (ToInput, Casts("input", False)),
        (ToWeight, Casts("weight", True)),
        (ToBfloat16, Casts(torch.bfloat16, False)),
        *((cls, None) for cls in (Clamped, Noisy, OtherGradient, Doubled, Constant, Strange)),
    ],
)
def test_a_forward_is_known_by_running_it(cls: type[nn.Linear], casts: Casts | None) -> None:
    state = torch.get_rng_state()
    layer = cls(64, 64)
    assert casts_of(layer) == casts
    layer = cls(64, 64, dtype=torch.bfloat16)
    assert (casts_of(layer) is None) == (casts is None)
    torch.set_rng_state(state)
    assert layer.weight.grad is None and layer.weight.shape == (64, 64) and layer.training


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cls", [ToInput, ToWeight, ToBfloat16])
def test_layers_that_cast_are_converted_and_cast_as_theirs(
    cls: type[nn.Linear], backend: str
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(cls(64, 64), nn.ReLU(), cls(64, 64))
    theirs, x = copy.deepcopy(model), torch.randn(16, 64).bfloat16()
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    assert all(p.fp8 for p in fp8.plan)
    for given in (x, x.float()):
        with torch.no_grad():
            assert torch.equal(model(given), theirs(given)), "outside of the context, bit by bit"
        with fp8.autocast():
            y = model(given)
        want = theirs(given)
        assert (
            y.dtype == want.dtype
            and not torch.equal(y, want)
            and torch.allclose(y.float(), want.float(), atol=0.1)
        )
        y.float().square().mean().backward()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(model(x.float()), theirs(x.float()))
    fp8.prove()
    assert model[0].weight.grad.dtype == torch.float32
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x)) and twin[0].weight is not model[0].weight
    back = fp8cfg.convert_back(model)
    assert (
        type(back[0]) is cls
        and vars(back[0]).keys() == vars(theirs[0]).keys()
        and torch.equal(back(x), theirs(x))
    )
    assert str(back) == str(theirs)


def test_a_job_converts_them_too() -> None:
    job = fp8cfg.build(recipe(), model=nn.Sequential(ToInput(64, 64), ToInput(64, 64)))
    with job.autocast():
        job.backward(job.model(torch.randn(16, 64).bfloat16()).float().mean())
    job.optimizer.step()
    assert job.prove().layers_in_fp8 == 2


def test_a_class_that_cannot_be_run_is_named() -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"none of 1 linear layers would run in FP8 \(Strange has its own forward\); write convert_model\(model, recipe, linear=\[THEIR_CLASS\]\)",
    ):
        fp8cfg.convert_model(nn.Sequential(Strange(64, 64)), recipe())
    model = nn.Sequential(Strange(64, 64), ToInput(64, 64))
    fp8 = fp8cfg.convert_model(model, recipe(), linear=[Strange])
    with fp8.autocast():
        assert model(torch.randn(16, 64)).shape == (16, 64)
    assert type(fp8cfg.convert_back(model)[0]) is Strange
    for named, line in (
        ([Clamped], "linear=Clamped: the model has no such layer"),
        ([nn.Conv1d], "expected a subclass of torch.nn.Linear"),
    ):
        with pytest.raises(fp8cfg.ConfigError, match=line):
            fp8cfg.convert_model(model, recipe(), linear=named)  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [Clamped, Noisy, OtherGradient, Doubled, Constant])
def test_a_class_that_computes_something_else_is_refused_by_its_name(cls: type[nn.Linear]) -> None:
    with pytest.raises(
        fp8cfg.ConfigError,
        match=rf"^linear={cls.__name__}: its forward is not F\.linear of input and weight",
    ):
        fp8cfg.convert_model(nn.Sequential(cls(64, 64), nn.Linear(64, 64)), recipe(), linear=[cls])


def test_a_subclass_without_a_forward_comes_back_as_itself() -> None:
    class Named(nn.Linear):
        pass

    model = nn.Sequential(Named(64, 64))
    fp8cfg.convert_model(model, recipe())
    assert type(fp8cfg.convert_back(model)[0]) is Named
