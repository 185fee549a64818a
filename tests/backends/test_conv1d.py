"""GPT-2, whose linear layers are transformers' Conv1D: converted, saved and loaded as the plain model, and put back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.numerics.stored_state import stored_state_dict
from tests.support.convert_models import BACKENDS, TOKENS, recipe
from tests.support.small import small

transformers = pytest.importorskip("transformers")
WORDS = ("precision=bf16_fp8_current", "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
SCHEDULE = ("optim.lr_decay_style=constant", "optim.warmup_steps=0")


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64,
            n_layer=2,
            n_embd=64,
            n_head=4,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    )


def loss(model: nn.Module) -> Tensor:
    made: Tensor = model(input_ids=TOKENS, labels=TOKENS).loss
    return made


def trained(
    model: nn.Module, context: Any, optimizer: Any, backward: Any, step: Any = lambda: None
) -> list[float]:
    found = []
    for _ in range(4):
        with context:
            one = loss(model)
            backward(one)
        optimizer.step()
        step()
        optimizer.zero_grad()
        found.append(one.item())
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_gpt2_converts_as_any_model(backend: str) -> None:
    model, plain = gpt2(), gpt2()
    parameters, text = dict(model.named_parameters()), str(model)
    fp8 = fp8cfg.convert_model(model, recipe(*WORDS, backend=backend))
    assert {p.name for p in fp8.plan if p.fp8} == {
        f"transformer.h.{i}.{name}"
        for i in range(2)
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    }
    assert dict(model.named_parameters()) == parameters and model.transformer.h[
        0
    ].attn.c_attn.weight.shape == (192, 64)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3) for m in (model, plain)]
    context: Any = torch.enable_grad()
    losses = (
        trained(model, fp8.autocast(), optimizers[0], lambda one: one.backward(), fp8.step),
        trained(plain, context, optimizers[1], lambda one: one.backward()),
    )
    assert losses[0] == pytest.approx(losses[1], abs=0.02) and losses[0] != losses[1]
    fp8.prove()
    assert fp8cfg.coverage(model).layers_in_fp8 == 8 and fp8cfg.coverage(model).other_weights == []
    weights, other = model.state_dict(), copy.deepcopy(plain.state_dict())
    assert {k: (t.shape, t.dtype) for k, t in weights.items()} == {
        k: (t.shape, t.dtype) for k, t in other.items()
    }
    copied = copy.deepcopy(model)
    plain.load_state_dict(weights, strict=True)
    with torch.no_grad():
        assert loss(plain).item() == pytest.approx(loss(model).item(), abs=1e-5)
        model.load_state_dict(other, strict=True)
        assert all(
            torch.equal(t, other[k]) for k, t in model.state_dict().items()
        ) and not torch.equal(loss(model), loss(copied))
    back = fp8cfg.convert_back(model)
    assert str(back) == text and all(p is parameters[name] for name, p in back.named_parameters())
    assert (
        vars(back.transformer.h[0].attn.c_attn).keys()
        == vars(plain.transformer.h[0].attn.c_attn).keys()
    )
    back.load_state_dict(plain.state_dict(), strict=True)
    with torch.no_grad():
        assert torch.equal(loss(back), loss(plain))


@pytest.mark.parametrize(
    "words",
    [
        (*WORDS, "fp8.params=true"),
        (*WORDS, "fp8.params=false", "opt_level=O2"),
        ("precision=bf16_mixed", "storage.weight=fp8"),
    ],
    ids=["float8", "O2", "codec"],
)
def test_a_job_of_gpt2_saves_and_loads_weights_as_the_plain_model(words: tuple[str, ...]) -> None:
    job = fp8cfg.build(small(*SCHEDULE, *words), model=gpt2())
    average = fp8cfg.averaged(job, decay=0.0)
    losses = trained(job.model, job.autocast(), job.optimizer, job.backward)
    assert losses[-1] < losses[0] - 0.1
    plain, weights, state = gpt2(), job.model.state_dict(), job.state_dict()
    plain.load_state_dict(weights, strict=True)
    average.update()
    with torch.no_grad():
        want = loss(job.model).item()
        assert loss(plain).item() == pytest.approx(want, abs=0.01) and loss(
            average.model
        ).item() == pytest.approx(want, abs=0.02)
    again = fp8cfg.build(job.recipe, model=gpt2())
    again.model.load_state_dict(weights, strict=True)
    again.load_state_dict(state)
    codes = stored_state_dict(job.model)
    assert all(
        torch.equal(t.float(), codes[k].float()) for k, t in stored_state_dict(again.model).items()
    )
    wide = gpt2().state_dict()
    again.model.load_state_dict(wide, strict=True)  # is encoded
    assert all(
        torch.allclose(t.float(), wide[k], rtol=0.07, atol=2e-3)
        for k, t in again.model.state_dict().items()
    )
    assert (
        type(fp8cfg.convert_back(job.model).transformer.h[0].mlp.c_fc)
        is transformers.pytorch_utils.Conv1D
    )


def test_an_adapter_is_told_which_way_the_weight_lies() -> None:
    """PEFT's layers have it from the class of the layer that they were put around, and merge by it."""
    model, adapter = gpt2(), nn.Module()
    adapter.base_layer, adapter.fan_in_fan_out = model.transformer.h[0].mlp.c_fc, True  # type: ignore[assignment]
    holder = nn.ModuleList([adapter, model.transformer.h[1]])
    fp8cfg.convert_model(holder, recipe(*WORDS))
    assert adapter.base_layer.weight.shape == (256, 64) and adapter.fan_in_fan_out is False
    fp8cfg.convert_back(holder)
    assert adapter.base_layer.weight.shape == (64, 256) and adapter.fan_in_fan_out is True


def test_excluded_layers_and_those_that_cannot_be_converted() -> None:
    """Excluded ones are listed; a weight that another module reads is left [in, out]; a recipe that reaches no layer changes none."""
    model = gpt2()
    model.other = nn.Module()
    model.other.weight = model.transformer.h[0].attn.c_proj.weight
    fp8 = fp8cfg.convert_model(model, recipe(*WORDS, "fp8.exclude=['*.mlp.*']"))
    assert {p.reason for p in fp8.plan if ".mlp." in p.name} == {
        "fp8.exclude *.mlp.*"
    } and model.other.weight.shape == (64, 64)
    assert [p.name for p in fp8cfg.coverage(model).other_weights] == ["transformer.h.0.attn.c_proj"]
    with torch.no_grad():
        assert loss(model).item() == pytest.approx(loss(gpt2()).item(), abs=1e-5)
    model = gpt2()
    with pytest.raises(fp8cfg.ConfigError, match=r"leaves no linear layer in FP8 \(0 of 9\)"):
        fp8cfg.convert_model(model, recipe(*WORDS, "fp8.exclude=['*']"))
    assert str(model) == str(gpt2())
