"""Scripts of others, plain, converted and built: their losses, the proof of FP8, and checkpoints both ways."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from tests.clients.gpt import batch
from tests.clients.loops import LOOPS, model
from tests.clients.made import Made, Way
from tests.clients.made import made as bring

FP8: tuple[Way, ...] = ("converted", "built")
both = pytest.mark.parametrize("way", FP8)
every = pytest.mark.parametrize("name", LOOPS)


@functools.cache
def run(name: str, way: Way) -> Made:
    return LOOPS[name](way)


def loss_of(model: nn.Module) -> float:
    """Of an evaluation, in high precision."""
    model.eval()
    with torch.no_grad():
        loss = float(model(*batch(999))[1])
    model.train()
    return loss


@both
@every
def test_losses_are_those_of_the_plain_script(name: str, way: Way) -> None:
    plain, ours = run(name, "plain").losses, run(name, way).losses
    assert len(plain) == len(ours) and plain[-1] < plain[0] - (0.2 if name == "PEFT" else 1.0)
    differences = [abs(a - b) for a, b in zip(plain, ours, strict=True)]
    assert max(differences[-5:]) < 0.01 and max(differences) > 0, differences
    assert sum(differences) / len(differences) < 0.0025, (
        "a loss in bfloat16 alone is 0.008 off, on the average"
    )


@both
@every
def test_it_ran_in_fp8(name: str, way: Way) -> None:
    """Every product that was planned, and nothing but the head and adapters is left out."""
    made = run(name, way)
    (made.job or made.conversion).prove()
    seen = fp8cfg.coverage(made.model)
    left_out = {
        p.name.rpartition("h.")[2] if ".h." in f".{p.name}" else p.name
        for p in seen.linears
        if not p.fp8
    }
    head = {"x-transformers": "to_logits"}.get(name, "lm_head")
    adapters = (
        {f"{i}.c_attn.lora_{side}.default" for i in range(2) for side in "AB"}
        if name == "PEFT"
        else set()
    )
    assert (
        {n.removeprefix("base_model.") for n in left_out} == {head} | adapters
        and seen.layers_in_fp8 == 8
        and seen.share > 0.4
    )


@both
@every
def test_checkpoints_load_both_ways_strictly(name: str, way: Way) -> None:
    """The plain model has the keys and the weights of the trained one, and gives its loss; that one takes the plain one's."""
    made, plain = run(name, way), copy.deepcopy(run(name, "plain").model)
    vars(plain).pop("forward", None)  # of the fused head
    trained = {key: value.clone() for key, value in made.model.state_dict().items()}
    assert all(value.dtype in (torch.float32, torch.bfloat16) for value in trained.values())
    plain_weights = copy.deepcopy(plain.state_dict())
    plain.load_state_dict(trained, strict=True)
    assert loss_of(plain) == pytest.approx(
        loss_of(made.model), abs=1e-5 if way == "converted" else 0.05
    )  # of bfloat16, whose steps are 1/64 there
    assert loss_of(plain) != loss_of(run(name, "plain").model)
    assert {k: v.shape for k, v in plain.state_dict().items()} == {
        k: v.shape for k, v in trained.items()
    }
    assert all(
        torch.equal(value.float(), trained[key].float())
        for key, value in plain.state_dict().items()
    )
    made.model.load_state_dict(plain_weights, strict=True)
    for key, value in made.model.state_dict().items():
        wanted = plain_weights[key].float()
        assert torch.allclose(value.float(), wanted, rtol=0.07, atol=2e-3) and (
            way == "built" or torch.equal(value.float(), wanted)
        ), key
    made.model.load_state_dict(trained, strict=True)


def test_a_stock_sample_script_reads_the_checkpoint_of_a_converted_model(tmp_path: Any) -> None:
    """nanoGPT's order: the script builds the plain model, loads, and compiles or converts after; one that resumes converts after."""
    made, file = run("nanoGPT", "converted"), tmp_path / "ckpt.pt"
    torch.save({"model": made.model.state_dict(), "optimizer": made.optimizer.state_dict()}, file)
    saved = torch.load(file, weights_only=True)
    resumed = copy.deepcopy(run("nanoGPT", "plain").model)
    resumed.load_state_dict(saved["model"])
    want = loss_of(made.model)
    assert loss_of(resumed) == want
    again = bring("converted", resumed)
    again.optimizer.load_state_dict(saved["optimizer"])
    with again.context:
        loss = again.model(*batch(0))[1]
        again.backward(loss)
    again.optimizer.step()
    again.step()
    again.conversion.prove()
    assert loss.item() == pytest.approx(made.losses[-1], abs=0.5)


def test_an_average_of_weights() -> None:
    """torch's EMA goes over the parameters of a converted model, fp8cfg.averaged over a job's masters."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    converted, job = copy.deepcopy(run("minGPT", "converted").model), bring("built", model()).job
    assert job is not None
    average = AveragedModel(converted, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    average.update_parameters(converted)
    before = {name: p.detach().clone() for name, p in converted.named_parameters()}
    with torch.no_grad():
        for p in converted.parameters():
            p.add_(0.25)
    average.update_parameters(converted)
    for name, p in average.module.named_parameters():
        assert torch.allclose(p, before[name] + 0.125, atol=1e-6), name
    of_job = fp8cfg.averaged(job, decay=0.5)
    start = {name: p.detach().clone() for name, p in of_job.model.named_parameters()}
    with job.autocast():
        job.backward(job.model(*batch(0))[1])
    job.optimizer.step()
    job.optimizer.zero_grad()
    of_job.update()
    moved = [not torch.equal(p, start[name]) for name, p in of_job.model.named_parameters()]
    assert all(moved), "held weights too"


@pytest.mark.slow
def test_a_compiled_script() -> None:
    """Converted, and then traced as torch.compile does; what Inductor makes of the layers is tests/numerics' subject."""
    whole = model(tied=False)
    made = bring("converted", whole)
    compiled = torch.compile(whole, backend="aot_eager", dynamic=False)
    losses = []
    for step in range(10):
        with made.context:
            loss = compiled(*batch(step))[1]
            loss.backward()
        made.clip()
        made.optimizer.step()
        made.step()
        made.optimizer.zero_grad()
        losses.append(loss.item())
    made.conversion.prove()
    assert losses == pytest.approx(run("nanochat", "plain").losses[:10], abs=0.01)
