"""Transformer Engine itself on the fake GPU: its compiled part checks what the backend gives it, and says what multiplied.

Jobs are trained, evaluated, saved and resumed without an exception of its C++; whether they multiplied in FP8 is told by its
quantizers, which need no values. Runs where tools/fake_gpu/setup_te.sh has put it alone."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

import fp8cfg
from fp8cfg.backends.te.rules import unavailable
from fp8cfg.checkpoint import saver
from fp8cfg.training import microbatches
from fp8cfg.training import step as training_step
from tests.backends.test_te_extension import BOUND_IN_PARTS, recorded
from tests.support.small import small_words
from tools.fake_gpu.recorder import is_fake
from tools.gpu_rows.proof import steady_signs

if why := "" if not is_fake() else unavailable():
    pytest.skip(why, allow_module_level=True)

BLACKWELL = torch.cuda.get_device_capability() >= (10, 0)
EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
SHAPE = (
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.seq_length=128",
    "trainer.accelerator=cuda",
    "trainer.devices=1",
    "backend=te",
    EVERYWHERE,
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "checkpoint.every_n_steps=2",
)
HELD, PLAIN, ATTENTION = "fp8.params=true", "fp8.params=false", "fp8.dot_product_attention=true"
ACCUMULATED, ONE_HEAD = (
    "trainer.micro_batch_size=2",
    ("model.num_attention_heads=2", "model.num_query_groups=1", "model.kv_channels=128"),
)
HOPPER_JOBS = [
    ("bf16_fp8", HELD, ACCUMULATED, "model.recompute_granularity=full"),
    ("bf16_fp8", PLAIN, "model.recompute_granularity=selective"),
    ("bf16_fp8", ATTENTION, *ONE_HEAD),
    ("bf16_fp8", "opt_level=O2"),
    ("bf16_fp8_te_fused_adam", HELD),
    ("fp16_fp8", HELD),
    ("bf16_fp8_amp", PLAIN),
    ("bf16_fp8_current", HELD, ACCUMULATED),
    ("bf16_fp8_current", PLAIN, "fp8.override_linear_precision={dgrad: true, wgrad: true}"),
    ("bf16_fp8_current", "opt_level=O3"),
    ("bf16_fp8_block", HELD, "model.recompute_granularity=full"),
    ("bf16_fp8_block", PLAIN, ACCUMULATED),
    ("fp16_fp8_block", HELD),
    ("bf16_fp8", HELD, "recipe=gpt3_tiny"),
    ("bf16_fp8_current", PLAIN, "recipe=gemma3_tiny"),
    ("bf16_fp8_block", HELD, "recipe=nemotron_tiny"),
    ("bf16_fp8_current", HELD, "recipe=mistral_tiny"),
]
BLACKWELL_JOBS = [
    ("bf16_mxfp8", HELD, ACCUMULATED),
    ("bf16_mxfp8", PLAIN, "model.recompute_granularity=full"),
    ("bf16_nvfp4", HELD),
    ("bf16_nvfp4", PLAIN, ACCUMULATED),
    ("bf16_fp8_block", HELD),
    ("bf16_fp8_block", PLAIN),
    ("bf16_fp8", HELD),
    ("bf16_fp8_current", HELD, ATTENTION, *ONE_HEAD),
    ("bf16_mxfp8", HELD, "recipe=gpt3_tiny"),
    ("bf16_nvfp4", PLAIN, "recipe=nemotron_tiny"),
]
if torch.backends.cudnn.version() >= 92100:  # FAKE_CUDNN=92100
    BLACKWELL_JOBS.append(("bf16_mxfp8", PLAIN, ATTENTION, *ONE_HEAD))


@pytest.mark.parametrize("words", BLACKWELL_JOBS if BLACKWELL else HOPPER_JOBS, ids=" ".join)
def test_a_job_trains_evaluates_saves_and_resumes(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "_find_nonfinite", lambda *_: None)  # values are what memory held
    for module in (microbatches, training_step):
        monkeypatch.setattr(module, "refuse_without_targets", lambda *_: None)
    steady_signs()
    preset, *rest = words
    given = small_words(*SHAPE, f"precision={preset}", *rest)
    job = fp8cfg.build(fp8cfg.compose(given))
    fp8cfg.fit(job, tmp_path / "run", say=lambda _: None)
    assert job.prove().layers_in_fp8 == sum(layer.fp8 for layer in job.plan)
    resumed = fp8cfg.build(
        fp8cfg.compose(
            [*given, "trainer.max_steps=3", "log.resume=auto", f"log.folder={tmp_path / 'run'}"]
        )
    )
    fp8cfg.fit(resumed, say=lambda _: None)
    assert resumed.optimizer.steps == 3


def test_its_functions_have_the_signatures_that_the_stand_in_is_held_to() -> None:
    import transformer_engine.pytorch  # noqa: F401, which loads it
    import transformer_engine_torch as tex

    found = {name: of.__doc__ or "" for name, of in vars(tex).items() if inspect.isbuiltin(of)}
    assert all(name.startswith("ep_") for name in recorded().keys() - found.keys()), (
        "built without NCCL's expert parallelism"
    )
    assert [
        line
        for name in recorded().keys() & found.keys()
        if (line := differs(name, found[name], recorded()[name]))
    ] == []
    assert found.keys() - recorded().keys() - BOUND_IN_PARTS == {"nvte_built_with_cublasmp"}


def differs(name: str, doc: str, wanted: inspect.Signature) -> str:
    """What pybind11 says of a function beside what its source said: names and defaults, or where it has no names their number. An
    argument without a default behind one that has it stands in the record with "...", as one whose default is no literal."""
    if "Overloaded" in doc:
        return ""
    said = re.match(rf"{name}\((.*)\) -> ", doc.splitlines()[0])
    assert said, doc
    given = parameters(said[1])
    mine = [
        (p.name, has if p.default is ... else p.default is not p.empty)
        for p, (_, has) in zip(wanted.parameters.values(), given, strict=False)
    ]
    same = len(given) == len(wanted.parameters) and (
        given[:1] == [("arg0", False)] or given == mine
    )
    return "" if same else f"{name}: {given}, recorded {mine}"


def parameters(text: str) -> list[tuple[str, bool]]:
    """Names, and whether they have a default, of "a: list[int], b: object = None"."""
    parts: list[Any] = [""]
    for c in text:
        depth = parts[0].count("[") - parts[0].count("]")
        parts = ["", *parts] if c == "," and not depth else [parts[0] + c, *parts[1:]]
    return [
        (part.partition(":")[0].strip(), "=" in part)
        for part in reversed(parts)
        if part.strip() not in ("", "/", "*")
    ]
