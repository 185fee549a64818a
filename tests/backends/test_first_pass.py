"""A model that never multiplies in FP8 is found out without being asked; libraries that replace `forward`, or call it, do not end FP8."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MethodType

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8cfg
from fp8cfg.backends.any_model.conversion_state import converted
from fp8cfg.numerics import fp8_linears
from tests.support.convert_models import BACKENDS, DELAYED, recipe


class Stack(nn.Module):
    """Four linear layers, of which `used` multiply."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(24, 32)  # which stays in high precision, and trains
        self.layers, self.used = nn.ModuleList(nn.Linear(32, 32) for _ in range(4)), 4

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in list(self.layers)[: self.used]:
            x = x + torch.tanh(layer(x))
        return x.pow(2).mean()


X = torch.randn(16, 24, generator=torch.Generator().manual_seed(1))


def delayed() -> fp8cfg.Recipe:
    return fp8cfg.compose([*DELAYED, "backend=native"])


def wrapped() -> Stack:
    model = Stack()
    fp8cfg.convert_model(model, delayed())
    fp8cfg.apply_fp8_autowrap(model, delayed())
    return model


def scales(model: nn.Module) -> list[Tensor]:
    return [
        t
        for layer in fp8_linears(model)
        for t in (layer.fp8_scale, layer.fp8_amax_history)
        if t is not None
    ]


def trained(model: nn.Module, call: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Losses of three passes, and the state that they leave."""
    losses = []
    for _ in range(3):
        losses.append(call(X))
        losses[-1].backward()
    assert converted(model).forward_passes == 3 and converted(model).open_passes == 0
    return [*losses, *scales(model)]


@pytest.fixture(scope="module")
def as_it_is() -> list[Tensor]:
    """What autowrap leaves of a model that nobody touches."""
    model = wrapped()
    return trained(model, model)


def replace_forward(model: Stack) -> Callable[[Tensor], Tensor]:
    """TRL's SFTTrainer: a forward of its own, which computes the loss with less memory."""
    model.forward = MethodType(lambda self, x: Stack.forward(self, x), model)  # type: ignore[method-assign]
    return model


def call_forward(model: Stack) -> Callable[[Tensor], Tensor]:
    """PEFT's tuners: `self.model.forward(*args, **kwargs)`."""

    class Tuner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            return self.model.forward(x)

    return Tuner()


@pytest.mark.parametrize("library", [replace_forward, call_forward])
def test_autowrap_survives_libraries_and_rolls_once_a_pass(
    library: Callable[[Stack], Callable[[Tensor], Tensor]], as_it_is: list[Tensor]
) -> None:
    model = wrapped()
    found = trained(model, library(model))
    assert all(torch.equal(a, b) for a, b in zip(found, as_it_is, strict=True))
    assert not torch.equal(found[0], Stack()(X)), "it is FP8 indeed"
    fp8cfg.convert_back(model)
    assert (
        not model._forward_pre_hooks
        and not model._forward_hooks
        and not model._forward_hooks_always_called
    )


def test_a_copy_enters_by_hooks_of_its_own(as_it_is: list[Tensor]) -> None:
    model = copy.deepcopy(wrapped())
    assert all(
        torch.equal(a, b)
        for a, b in zip(trained(model, replace_forward(model)), as_it_is, strict=True)
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("library", [lambda model: model, replace_forward])
def test_a_pass_that_was_interrupted_is_over(
    library: Callable[[Stack], nn.Module], error: type[BaseException]
) -> None:
    """After Ctrl-C torch calls no hook, not even those that it always calls."""
    model = library(wrapped())

    def interrupt(*_: object) -> None:
        raise error

    handle = model.layers[2].register_forward_pre_hook(interrupt)
    with suppress(error):
        model(X)
    handle.remove()
    model.eval()
    assert torch.equal(model(X), Stack()(X)) and converted(model).open_passes == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_backward_pass_in_high_precision_ends_it(backend: str) -> None:
    model = Stack()
    fp8 = fp8cfg.convert_model(model, recipe(backend=backend))
    for loss in (lambda: model(X), lambda: checkpoint(model, X, use_reentrant=False)):
        with pytest.raises(
            fp8cfg.NotFP8Error,
            match=r"^no layer ran in FP8 before this backward pass; run the forward pass inside autocast",
        ):
            loss().backward()
    with fp8.autocast():
        model(X).backward()
    model(X).backward()  # `prove` names what runs outside later
    with pytest.warns(
        RuntimeWarning,
        match=r"only 0\.0% of the linear layers' FLOPs ran in FP8; the largest part .* outside of the autocast context",
    ):
        fp8.step()


@pytest.mark.parametrize(
    "way", ["evaluation", "left out", "frozen", "asked for", "no layer is used"]
)
def test_who_is_not_accused(way: str) -> None:
    model = Stack()
    fp8 = fp8cfg.convert_model(model, delayed())
    if way == "evaluation":
        model.eval()
        model(X)
        with torch.no_grad():
            model.train()(X)
    elif way == "left out":
        model.used = 0
        model(X).backward()
    elif way == "frozen":
        model.requires_grad_(False)
        model(X + torch.zeros(1))
    elif way == "asked for":
        with fp8.autocast(enabled=False):
            model(X).backward()
    fp8.step()
    model.used = 4
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        model.requires_grad_(True).train()(X).backward()
    with fp8.autocast():
        model(X).backward()
    fp8.step(), fp8.prove()


def test_a_frozen_model_under_adapters_is_seen_by_its_gradients() -> None:
    model = Stack()
    model.layers.requires_grad_(False)
    fp8 = fp8cfg.convert_model(model, recipe())
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        model(X).backward()
    with fp8.autocast():
        model(X).backward()
    fp8.prove()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_step_of_a_job_finds_it_out(backend: str) -> None:
    job = fp8cfg.build(recipe(backend=backend), model=Stack())
    weight = job.model.layers[0].weight.detach().clone()
    job.backward(job.model(X.bfloat16()))
    with pytest.raises(fp8cfg.NotFP8Error, match=r"^no layer ran in FP8 before this step"):
        job.optimizer.step()
    assert torch.equal(job.model.layers[0].weight, weight), "before anything is written"
    with job.autocast():
        job.backward(job.model(X.bfloat16()))
    assert job.optimizer.step()
    plain = fp8cfg.build(fp8cfg.compose(["precision=bf16"]), model=Stack())
    plain.backward(plain.model(X.bfloat16()))
    assert plain.optimizer.step()


def test_weights_that_are_multiplied_past_their_layers_are_found_out_at_the_step() -> None:
    model = Stack()
    fp8 = fp8cfg.convert_model(model, recipe())
    with fp8.autocast():
        (torch.randn(16, 32) @ model.layers[0].weight.T).sum().backward()
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8 before this step"):
        fp8.step()


# Contexts.


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("whose", ["convert_model", "build"])
def test_a_context_is_made_once_and_entered_often(backend: str, whose: str) -> None:
    """nanoGPT makes `ctx` before its loop."""
    model = Stack()
    fp8 = (
        fp8cfg.convert_model(model, recipe(backend=backend))
        if whose == "convert_model"
        else fp8cfg.build(recipe("precision.compute=fp32", backend=backend), model=model)
    )
    with torch.no_grad():
        plain, ctx = model(X), fp8.autocast()
        with ctx:
            inside = model(X)
            with fp8.autocast(enabled=False):
                assert torch.equal(model(X), plain)
            with ctx:
                assert torch.equal(model(X), inside)
            assert torch.equal(model(X), inside), "what was left is the inner one"
        with suppress(ValueError), ctx:
            raise ValueError
        assert torch.equal(model(X), plain)
        with ctx:
            assert torch.equal(model(X), inside)
        assert torch.equal(ctx(model)(X), inside) and torch.equal(model(X), plain), "as a decorator"
    assert not torch.equal(plain, inside)


def test_a_step_that_is_never_called_is_said_of_a_context_that_was_made_once() -> None:
    model = Stack()
    ctx, optimizer = (
        fp8cfg.convert_model(model, delayed()).autocast(),
        torch.optim.SGD(model.parameters()),
    )
    with pytest.warns(RuntimeWarning, match=r"updated without fp8\.step\(\)") as said:
        for _ in range(3):
            with ctx:
                model(X).backward()
            optimizer.step()
    assert len(said) == 1 and said[0].filename == __file__


@pytest.mark.parametrize("scaling", ["delayed", "current"])
def test_a_step_beside_autowrap_says_so_and_does_nothing(scaling: str) -> None:
    r = delayed() if scaling == "delayed" else recipe()
    model = Stack()
    fp8 = fp8cfg.convert_model(model, r)
    fp8cfg.apply_fp8_autowrap(model, r)
    model(X).backward()
    before = [t.clone() for t in scales(model)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fp8.step()
    assert [str(w.message).partition(":")[0] for w in said] == [
        "fp8.step() has no effect with apply_fp8_autowrap"
    ] * (scaling == "delayed")
    assert all(torch.equal(a, b) for a, b in zip(before, scales(model), strict=True))


# transformers' Trainer itself.


@pytest.mark.parametrize("way", ["wrapped", "forward replaced", "never enters"])
def test_a_trainer_of_transformers_trains_in_fp8_or_not_at_all(way: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            use_cache=False,
        )
    )
    r, plain = delayed(), copy.deepcopy(model)
    fp8 = fp8cfg.convert_model(model, r)
    if way != "never enters":
        fp8cfg.apply_fp8_autowrap(model, r)
    if way == "forward replaced":
        model.forward = MethodType(lambda self, **batch: type(self).forward(self, **batch), model)
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(96).reshape(6, 16) % 64]
    trainer = transformers.Trainer(
        model=model,
        train_dataset=rows,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            report_to="none",
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        ),
    )
    if way == "never enters":
        with pytest.raises(
            fp8cfg.NotFP8Error, match="no layer ran in FP8 before this backward pass"
        ):
            trainer.train()
        return
    trainer.train()
    fp8.prove()
    assert converted(model).forward_passes == 3 and converted(model).steps == 2, (
        "each pass rolls the one before it"
    )
    assert not any(
        torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )
