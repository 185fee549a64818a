"""What users do to a model after it was converted: copy it, replace or unfreeze layers, ask for its classes."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.conversion.convert import Conversion
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.schema.backends import Hardware

PRESETS = ["bf16_fp8", "bf16_fp8_block"]


class CastingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype))


class ModulesToSave(nn.Module):
    """Trains a copy of a layer next to the frozen original, as PEFT's modules_to_save does."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.trained = copy.deepcopy(layer)
        self.original = layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.trained(x)
        return y


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
    )


def convert(
    model: nn.Module, preset: str = "bf16_fp8", backend: str = "native", **options: object
) -> Conversion:
    recipe = fp8cfg.compose([f"precision={preset}", "fp8.params=false", f"backend={backend}"])
    return fp8cfg.convert_model(model, recipe, **options)


def train(fp8: Conversion, model: nn.Module) -> None:
    with fp8.autocast():
        loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_outside_of_the_context_does_not_train_in_high_precision(
    preset: str, how: str
) -> None:
    model = net()
    fp8 = convert(model, preset)
    train(fp8, model)
    fp8.step()
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        train(fp8, twin)
    train(fp8, model)  # the original goes on
    fp8.prove()


def test_a_copied_layer_inside_of_the_model_joins_its_context() -> None:
    model = net()
    fp8 = convert(model)
    train(fp8, model)
    fp8.step()
    model[2] = ModulesToSave(model[2])
    train(fp8, model)
    fp8.step()
    (row,) = [p for p in fp8cfg.coverage(model).linears if p.name == "2.trained"]
    assert row.gemms == (("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e5m2", "e4m3"))


@pytest.mark.parametrize("index", [0, 4])
def test_prove_names_a_planned_layer_that_was_replaced(index: int) -> None:
    model = net()
    fp8 = convert(model)
    model[index] = nn.Linear(64, 64)
    train(fp8, model)
    fp8.step()
    with pytest.raises(fp8cfg.NotFP8Error, match=rf"{index}: planned in FP8, but no longer"):
        fp8.prove()


def test_prove_follows_layers_that_a_wrapper_renames() -> None:
    model = net()
    fp8 = convert(model)
    model[2] = nn.Sequential(model[2])
    train(fp8, model)
    assert fp8.prove().share > 0.8


@pytest.mark.parametrize(
    "words",
    [["precision=bf16_mixed"], ["precision=bf16_fp8", "fp8.params=false"], ["precision=bf16_fp8"]],
    ids=["bf16", "fp8", "fp8 params"],
)
def test_a_parameter_unfrozen_after_build_is_an_error(words: list[str]) -> None:
    model = net()
    model[0].requires_grad_(False)
    recipe = fp8cfg.compose([*words, "optim.warmup_steps=0", "trainer.max_steps=4"])
    job = fp8cfg.build(recipe, model=model)
    with job.autocast():
        job.backward(job.model(torch.randn(32, 64)).square().mean())
    job.optimizer.step()
    job.model.requires_grad_(True)
    with pytest.raises(fp8cfg.ConfigError, match=r"0\.weight: was frozen when the job was built"):
        job.autocast().__enter__()
    with pytest.raises(fp8cfg.ConfigError, match=r"0\.weight: was frozen when the job was built"):
        job.optimizer.step()


@pytest.mark.parametrize("backend", ["native", "torchao"])
def test_converted_layers_are_still_instances_of_their_class(backend: str) -> None:
    pytest.importorskip("torchao")
    model = nn.Sequential(
        CastingLinear(64, 64, bias=False), nn.ReLU(), CastingLinear(64, 64, bias=False)
    )
    recipe = fp8cfg.compose(
        ["precision=bf16_fp8_current", f"backend={backend}", "fp8.params=false"]
    )
    fp8 = fp8cfg.convert_model(model, recipe, linear=[CastingLinear])
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for each in (model, twin, torch.load(file, weights_only=False)):
        assert [isinstance(layer, CastingLinear) for layer in each] == [True, False, True]
    train(fp8, model)
    assert fp8cfg.coverage(model).share > 0.5
    assert type(fp8cfg.convert_back(model)[0]) is CastingLinear


@pytest.mark.parametrize("preset", PRESETS)
def test_an_overflowed_float16_gradient_reaches_grad_scaler(preset: str) -> None:
    model = net()
    fp8 = fp8cfg.convert_model(model, fp8cfg.compose([f"precision={preset}", "fp8.params=false"]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    with torch.autocast("cpu", torch.float16), fp8.autocast():
        loss = model(torch.randn(32, 64)).sum()  # times the scale it is infinite in float16
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    fp8.step()
    assert scaler.get_scale() == 2.0**23
    model.zero_grad()
    with torch.autocast("cpu", torch.float16), fp8.autocast():
        loss = model(torch.randn(32, 64)).sum()
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New memory has NaN and the largest integers in it, as arbitrary memory may have."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("preset", "backend"),
    [
        ("bf16_fp8", "native"),
        ("bf16_fp8_current", "native"),
        ("bf16_fp8_block", "native"),
        ("bf16_mxfp8", "native"),
        ("bf16_nvfp4", "native"),
        ("bf16_fp8_current", "torchao"),
        ("bf16_mxfp8", "torchao"),
    ],
)
@pytest.mark.parametrize("how", ["to_empty", "assign"])
@pytest.mark.usefixtures("filled_memory")
def test_a_model_converted_on_the_meta_device_trains_as_one_converted_last(
    preset: str, backend: str, how: str
) -> None:
    if backend == "torchao":
        pytest.importorskip("torchao")
    weights = net().state_dict()
    losses = []
    for convert_first in (False, True):
        with torch.device("meta"):
            model = net()
        if convert_first:
            fp8 = convert(model, preset, backend)
            assert "FP8: " in str(fp8)
            assert fp8cfg.coverage(model).share == 0
        if how == "to_empty":
            model.to_empty(device="cpu")
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.copy_(weights[name])
        else:
            model.load_state_dict(weights, assign=True)
        if not convert_first:
            fp8 = convert(model, preset, backend)
        torch.manual_seed(0)
        for _ in range(2):
            with fp8.autocast():
                loss = model(torch.randn(32, 64)).square().mean()
            loss.backward()
            fp8.step()
            losses.append(loss.item())
        fp8.prove()
    assert losses[:2] == losses[2:]


def test_a_presets_name_is_a_recipe() -> None:
    named, composed = net(), net()
    fp8 = fp8cfg.convert_model(named, "bf16_fp8_block")
    assert fp8.fp8 == convert(composed, "bf16_fp8_block").fp8
    with pytest.raises(fp8cfg.ConfigError, match="precision=bf16_fp9: no such precision preset"):
        fp8cfg.convert_model(net(), "bf16_fp9")


@pytest.mark.parametrize("autowrap", [False, True])
def test_a_model_moved_to_a_gpu_after_its_conversion_is_refused(
    autowrap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would emulate FP8 there, slower than in high precision, and nothing would say so."""
    model = net()
    fp8 = convert(model)
    if autowrap:
        fp8cfg.apply_fp8_autowrap(model, fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false"]))
    monkeypatch.setattr("fp8cfg.conversion.convert._is_on_gpu", lambda model: True)
    message = "was not when it was converted, so its layers only emulate FP8"
    context = nullcontext() if autowrap else fp8.autocast()
    with pytest.raises(fp8cfg.ConfigError, match=message), context:
        model(torch.randn(32, 64))


@pytest.mark.parametrize(("device", "hardware"), [("meta", "cuda"), ("cpu", "cpu")])
def test_a_model_without_memory_is_converted_for_the_gpu(
    device: str, hardware: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP's scripts build on the meta device and call to_empty(device="cuda") afterward."""
    asked = []

    def find(device: str) -> Hardware:
        asked.append(device)
        return find_hardware("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("fp8cfg.conversion.convert.find_hardware", find)
    with torch.device(device):
        model = net()
    fp8cfg.convert_model(model, "bf16_fp8_block")
    assert asked == [hardware]
