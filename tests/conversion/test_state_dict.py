"""What a model in FP8 looks like from outside: state_dict() has the plain model's keys and usable weights, FP8 state is apart."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.numerics.weight_storage import NarrowWeight
from fp8cfg.training.data import run_data
from tests.support.convert_models import DELAYED, TOKENS, Model, loss_of, recipe
from tests.support.small import small, steps

JOBS = {
    "delayed": ("precision=bf16_fp8", "fp8.params=true"),
    "mxfp8": ("precision=bf16_mxfp8", "fp8.params=true"),
    "nvfp4": ("precision=bf16_nvfp4", "fp8.params=true"),
    "O2": ("precision=bf16_fp8", "opt_level=O2"),
    "codec": ("precision=bf16_mixed", "storage.weight=fp8"),
    "wide": ("precision=bf16_fp8", "fp8.params=false", "storage.weight=fp32"),
    "torchao": (
        "precision=bf16_fp8_current",
        "opt_level=O2",
        "backend=torchao",
        "storage.master_weight=fp32",
    ),
}
ANEW = "scales and amax histories were reset"


def built(case: str, count: int = 2) -> Job:
    words = JOBS[case]
    if case == "torchao":
        pytest.importorskip("torchao")
        words = (*words, "fp8.params=false")
    job = fp8cfg.build(small(*words))
    list(steps(job, count))
    return job


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(
            t.contiguous().view(-1).view(torch.uint8), b[k].contiguous().view(-1).view(torch.uint8)
        )
        for k, t in a.items()
    )


@pytest.mark.parametrize("case", JOBS)
def test_a_jobs_weights_load_strictly_into_the_plain_model_and_back(case: str) -> None:
    job, batch = built(case), run_data(small())[0].batch(3)
    plain = fp8cfg.build(small("precision=bf16_mixed")).model
    weights = job.model.state_dict()
    assert list(weights) == list(plain.state_dict()) and {t.dtype for t in weights.values()} <= {
        torch.bfloat16,
        torch.float32,
    }
    held = [
        name
        for name, layer in job.model.named_modules()
        if isinstance(layer, NarrowWeight) and layer.has_scale
    ]
    assert bool(held) == (case != "wide") and all(
        weights[f"{name}.weight"].dtype == torch.bfloat16 for name in held
    )
    assert not {n for n in weights if "fp8_" in n} and all(
        type(t) is torch.Tensor for t in weights.values()
    )
    plain.load_state_dict(weights, strict=True)
    with torch.no_grad():
        want = job.model(*batch)
        assert plain(*batch).item() == pytest.approx(want.item(), abs=3e-3)
    other = built(case, count=0)
    other.model.load_state_dict(weights, strict=True)
    assert all(
        torch.allclose(t.float(), weights[k].float(), rtol=0.07, atol=1e-3)
        for k, t in other.model.state_dict().items()
    ), "encoded again"


@pytest.mark.parametrize("case", ["delayed", "nvfp4", "O2", "torchao"])
def test_model_and_optimizer_are_enough_to_resume_bit_for_bit(case: str, tmp_path: Path) -> None:
    """As Trainer, Accelerate and Fabric save a job: the optimizer carries the FP8 state."""
    job = built(case)
    torch.save([job.model.state_dict(), job.optimizer.state_dict()], tmp_path / "saved.pt")
    want = [s.loss for s in steps(job, 2, first=2)]
    resumed = built(case, count=0)
    model, optimizer = torch.load(tmp_path / "saved.pt", weights_only=True)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer)
    assert [s.loss for s in steps(resumed, 2, first=2)] == want and equal(
        stored_state_dict(resumed.model), stored_state_dict(job.model)
    )


def test_the_state_of_a_job_is_apart_and_goes_where_it_fits() -> None:
    job, other = built("delayed"), built("delayed", count=0)
    state = job.state_dict()
    assert {n.rpartition(".")[2] for n in state} == {
        "weight",
        "fp8_scale",
        "fp8_amax_history",
        "fp8_weight_scale_inv",
    }
    other.load_state_dict(state)
    assert equal(other.state_dict(), state)
    with pytest.raises(
        ValueError,
        match=r"^FP8 state: \d+ entries missing, among them layers\.0\.mlp\.linear_fc1\.fp8_weight_scale_inv; the state is from another",
    ):
        other.load_state_dict({n: t for n, t in state.items() if not n.endswith("scale_inv")})
    with pytest.raises(ValueError, match=r"1 entries unexpected, among them lm_head\.fp8_scale"):
        other.load_state_dict({**state, "lm_head.fp8_scale": torch.zeros(3)})
    assert fp8cfg.build(small("precision=bf16_mixed")).state_dict() == {}


def trained(model: nn.Module, fp8: Any, count: int = 2) -> list[float]:
    optimizer, found = (
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        [],
    )
    for _ in range(count):
        with fp8.autocast():
            loss = loss_of(model)
        loss.backward()
        optimizer.step(), fp8.step(), optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_converted_models_checkpoint_is_the_plain_models() -> None:
    """Loaded strictly both ways; with FP8 state a run goes on bit for bit, and without it one line says that scales start anew."""
    model, plain = Model(), Model()
    fp8 = fp8cfg.convert_model(model, recipe(*DELAYED))
    trained(model, fp8)
    weights, state = copy.deepcopy(model.state_dict()), fp8.state_dict()
    assert list(weights) == list(plain.state_dict()) and {n.rpartition(".")[2] for n in state} == {
        "fp8_scale",
        "fp8_amax_history",
    }
    plain.load_state_dict(weights, strict=True)
    with torch.no_grad():
        assert torch.equal(loss_of(plain), loss_of(model))
    want = trained(model, fp8)
    for given in (state, None):
        other = Model()
        again = fp8cfg.convert_model(other, recipe(*DELAYED))
        other.load_state_dict(weights, strict=True)
        if given:
            again.load_state_dict(given)
            assert trained(other, again) == want
        else:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                trained(other, again)
            assert [ANEW in str(w.message) for w in seen] == [True], "once"


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            use_cache=False,
        )
    )


@pytest.mark.parametrize("case", ["delayed", "O2", "nvfp4"])
def test_what_save_pretrained_writes_of_a_job_is_the_model(case: str, tmp_path: Path) -> None:
    """A trained job, saved as Trainer saves it too; nothing is unexpected or missing where transformers reads it."""
    transformers = pytest.importorskip("transformers")
    job = fp8cfg.build(small(*JOBS[case]), model=llama())
    for _ in range(2):
        with job.autocast():
            job.backward(job.model(input_ids=TOKENS, labels=TOKENS).loss)
        job.optimizer.step(), job.optimizer.zero_grad()
    job.model.save_pretrained(tmp_path)
    read, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()) and read.dtype == torch.bfloat16
    weights = job.model.state_dict()
    assert all(torch.equal(t, weights[name]) for name, t in read.state_dict().items())
    with torch.no_grad():
        here, there = (
            model(input_ids=TOKENS, labels=TOKENS).loss.item() for model in (job.model, read)
        )
    assert there == pytest.approx(here, abs=2e-3)


def test_t5_asks_a_held_weight_for_its_dtype() -> None:
    """`wo.weight.dtype` is what T5 casts to: float8 went into the CPU's amax before."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {
        "d_model": 64,
        "d_kv": 16,
        "d_ff": 128,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "vocab_size": 64,
        "decoder_start_token_id": 0,
    }
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**shape))
    job = fp8cfg.build(small("precision=bf16_fp8"), model=model)
    held = model.encoder.block[0].layer[-1].DenseReluDense.wo
    assert held.parameter.dtype == torch.float8_e4m3fn and held.weight.dtype == torch.bfloat16
    with job.autocast():
        job.backward(model(input_ids=TOKENS, labels=TOKENS).loss)
    assert job.optimizer.step() and job.prove()
