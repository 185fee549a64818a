"""Averages (EMA) that torch's AveragedModel and timm's ModelEma would keep in weights of a job that are stored in FP8: refused with
one line by every backend, at the first update that would move them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import fp8cfg
from fp8cfg.backends.msamp import rules as msamp_rules
from fp8cfg.backends.te import rules as te_rules
from tests.support import msamp_standin, te_standin
from tests.support.small import small, steps

ENDS = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
CASES = {
    "native": ("precision=bf16_fp8",),
    "codec": ("precision=bf16_mixed", "storage.weight=fp8"),
    "torchao": (
        "precision=bf16_fp8_current",
        "opt_level=O2",
        "backend=torchao",
        "storage.master_weight=fp32",
        "fp8.params=false",
    ),
    "te": ("precision=bf16_fp8_current", "backend=te", ENDS, "fp8.params=true"),
    "te mxfp8": ("precision=bf16_mxfp8", "backend=te", ENDS, "fp8.params=true"),
    "msamp": (
        "precision=bf16_fp8",
        "backend=msamp",
        "fp8.amax_history_len=16",
        "fp8.reduce_amax=false",
        "storage.accumulate=stored",
    ),
}
INSTEAD = r"fp8cfg\.averaged\(job\) averages the masters, and fp8cfg\.convert_back\(model\) returns plain weights$"


@pytest.fixture(scope="module", params=CASES)
def job(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[fp8cfg.Job]:
    """Trained for a step, whose gradients are still there, as where an EMA is made in the middle of a run."""
    with pytest.MonkeyPatch.context() as patch:
        within: Any = pytest.MonkeyPatch.context()
        if request.param.startswith("te"):
            patch.setattr(te_rules, "_hardware_lacks", lambda *_: [])
            patch.setattr(te_rules, "unavailable", lambda: "")
            within = te_standin.transformer_engine()
        elif request.param == "msamp":
            patch.setattr(msamp_rules, "_hardware_lacks", lambda *_: [])
            within = msamp_standin.msamp(tmp_path_factory.mktemp("msamp"), patch)
        elif request.param == "torchao":
            pytest.importorskip("torchao")
        with within:
            built = fp8cfg.build(small(*CASES[request.param]))
            list(steps(built, 1))
            yield built


@pytest.mark.parametrize(
    "options",
    [{}, {"multi_avg_fn": get_ema_multi_avg_fn(0.5)}, {"avg_fn": get_ema_avg_fn(0.5)}],
    ids=["swa", "foreach", "ema"],
)
def test_torchs_averaged_model(job: fp8cfg.Job, options: dict[str, Any]) -> None:
    average = AveragedModel(job.model, **options)

    def update() -> None:
        for _ in range(2):  # the first copies
            average.update_parameters(job.model)

    with pytest.raises(RuntimeError, match=INSTEAD):
        update()


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "v1": lambda mine, now: mine.copy_(0.5 * mine + 0.5 * now),
    "v3": lambda mine, now: mine.lerp_(now, weight=0.5),
    "foreach": lambda mine, now: torch._foreach_lerp_([mine], [now], 0.5),
}


@pytest.mark.parametrize("write", WRITES)
@torch.no_grad()
def test_timms_way_which_writes_into_the_state_dict_of_a_copy(job: fp8cfg.Job, write: str) -> None:
    """timm.utils.ModelEma, ModelEmaV2 and ModelEmaV3, but for the classes."""
    ema = copy.deepcopy(job.model).eval()
    before = {name: value.clone() for name, value in ema.state_dict().items()}

    def update() -> None:
        for mine, now in zip(
            ema.state_dict().values(), job.model.state_dict().values(), strict=True
        ):
            WRITES[write](mine, now)

    with pytest.raises(
        RuntimeError,
        match=f"a change of its copy would be lost; load_state_dict stores a weight, {INSTEAD}",
    ):
        update()
    ema.load_state_dict(before)
    assert all(
        torch.allclose(value.float(), before[name].float(), rtol=0.07, atol=1e-3)
        for name, value in ema.state_dict().items()
    ), "encoded again"


@torch.no_grad()
def test_what_the_line_names_works(job: fp8cfg.Job) -> None:
    """An average over masters, and AveragedModel over plain weights; and state_dict() of the model itself is written to at will, as
    torch.distributed.checkpoint does before it is loaded."""
    with_gradient = [p.grad is not None for p in job.model.parameters()]
    plain = fp8cfg.convert_back(copy.deepcopy(job.model)).float()
    average, of_plain = (
        fp8cfg.averaged(job, decay=0.5),
        AveragedModel(plain, avg_fn=get_ema_avg_fn(0.5)),
    )
    of_plain.update_parameters(plain)
    for p in plain.parameters():
        p.add_(1.0)
    of_plain.update_parameters(plain)
    assert all(
        torch.allclose(p, now - 0.5, atol=1e-6)
        for p, now in zip(of_plain.module.parameters(), plain.parameters(), strict=True)
    )
    average.update()
    assert isinstance(average.model, nn.Module) and average.updates == 1
    state = job.model.state_dict()
    for value in state.values():
        value.copy_(value * 0.5)
    assert [p.grad is not None for p in job.model.parameters()] == with_gradient


def test_a_copy_is_saved_as_its_original(job: fp8cfg.Job, tmp_path: Path) -> None:
    saved = copy.deepcopy(job.model).state_dict()
    torch.save(saved, tmp_path / "model.pt")
    read = torch.load(tmp_path / "model.pt", weights_only=True)
    want = job.model.state_dict()
    assert list(read) == list(want) and all(
        type(t) is torch.Tensor and torch.equal(t, want[name]) for name, t in read.items()
    )
