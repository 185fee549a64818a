"""fp8cfg.averaged: an EMA over masters, held against one written by hand in float32."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.numerics.stored_state import high_precision_state_dict, stored_state_dict
from fp8cfg.training.data import run_data
from tests.conversion.test_state_dict import llama
from tests.support.small import small, steps

CASES = {
    "fp8": ("precision=bf16_fp8",),
    "bf16": ("precision=bf16_mixed",),
    "fp32": ("precision=fp32",),
    "O2": ("precision=bf16_fp8", "opt_level=O2"),
    "no masters": (
        "precision=bf16_mixed",
        "storage.weight=fp16_scaled",
        "storage.master_weight=none",
    ),
}


def weights(job: fp8cfg.Job) -> dict[str, torch.Tensor]:
    """The weights in float32: masters from the checkpoint's tensors, times their scale, and what has none from the model's."""
    state = job.optimizer.state_tensors()
    found = {}
    for name, t in high_precision_state_dict(stored_state_dict(job.model)).items():
        master = state.get(f"{name}.master", t).float()
        found[name] = (
            master * state[f"{name}.master.scale_inv"]
            if f"{name}.master.scale_inv" in state
            else master
        )
    return found


@pytest.mark.parametrize("case", CASES)
def test_an_average_of_masters_is_the_one_by_hand(case: str) -> None:
    job = fp8cfg.build(small(*CASES[case]))
    average, by_hand = fp8cfg.averaged(job, decay=0.9), copy.deepcopy(weights(job))
    start = copy.deepcopy(average.model.state_dict())
    for step in range(3):
        list(steps(job, 1, first=step))
        average.update()
        for name, now in weights(job).items():
            by_hand[name].lerp_(now, 1.0 - 0.9)
    found = average.model.state_dict()
    assert {t.dtype for t in found.values()} == {
        torch.float32
    } and found.keys() == by_hand.keys() == job.model.state_dict().keys()
    assert all(torch.equal(found[name], by_hand[name]) for name in by_hand) and average.updates == 3
    assert any(not torch.equal(found[name], start[name]) for name in start)
    plain, batch = fp8cfg.build(small("precision=fp32")).model, run_data(job.recipe)[0].batch(3)
    plain.load_state_dict(found, strict=True)
    with torch.no_grad():
        assert torch.equal(average.model(*batch), plain(*batch))
    assert not fp8cfg.has_fp8_layers(average.model) and not any(
        p.requires_grad for p in average.model.parameters()
    )


def test_an_average_is_saved_as_its_library_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    job = fp8cfg.build(small("precision=bf16_fp8"), model=llama())
    average = fp8cfg.averaged(job, decay=0.5)
    average.update()
    average.model.save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert read.dtype == torch.float32
    names = dict(job.model.named_parameters())
    assert all(
        torch.equal(read.get_parameter(name), job.optimizer.masters[p]) for name, p in names.items()
    )


def test_an_average_that_cannot_be_had_is_refused() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8"))
    with pytest.raises(
        fp8cfg.ConfigError, match=r"^averaged: decay=1\.5 is not between 0 and 1; 0\.999 is usual$"
    ):
        fp8cfg.averaged(job, decay=1.5)
    job.prepared.owner = {"layers": 1}
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"^averaged: storage\.shard=none gives each rank only shards of weights or masters",
    ):
        fp8cfg.averaged(job)
