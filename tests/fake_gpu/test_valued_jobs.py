"""Jobs with values on the fake GPU (tools/fake_gpu/values.py) train as on a CPU, bit for bit, and resume so.

So are all products, scales, quantized numbers and steps of the two paths of fp8cfg. What torch itself computes otherwise on a CPU is
given to it as on a GPU: attention, whose weights its kernel rounds to bfloat16, which changes a loss by 1e-4, and RMSNorm, whose
gradient has other last bits, which change one by 1e-5.

Runs on the fake GPU alone; jobs of MXFP8 and NVFP4 under FAKE_CC=100."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

import fp8cfg
from fp8cfg.building.job import Job
from tests.support.small import small, small_words, steps
from tools.fake_gpu.recorder import is_fake

if not is_fake():
    pytest.skip("a real GPU has values", allow_module_level=True)

from tools.fake_gpu.host_memory import in_host_memory
from tools.fake_gpu.value_attention import attention, attention_backward
from tools.fake_gpu.value_handlers import rms_norm, rms_norm_backward
from tools.fake_gpu.values import computed

BLACKWELL = torch.cuda.get_device_capability() >= (10, 0)
CUDA = ("trainer.accelerator=cuda", "trainer.devices=1")
NATIVE, E4M3, HELD, PLAIN = (
    "backend=native",
    "fp8.format=e4m3",
    "fp8.params=true",
    "fp8.params=false",
)
ATTENTION = ("fp8.emulate=true", "fp8.dot_product_attention=true")
HOPPER_JOBS = [
    ("fp32",),
    ("bf16",),
    ("bf16_adamw_fp8",),
    ("bf16_precision_aware",),
    ("fp16_fp8", NATIVE),
    ("bf16_fp8", NATIVE, HELD),
    ("bf16_fp8", NATIVE, PLAIN),
    ("bf16_fp8", NATIVE, "fp8.first_step=te"),
    ("bf16_fp8", NATIVE, *ATTENTION),
    ("bf16_fp8", NATIVE, "opt_level=O2"),
    ("bf16_fp8_current", NATIVE, HELD),
    ("bf16_fp8_current", NATIVE, PLAIN),
    ("bf16_fp8_current", NATIVE, "fp8.granularity=row"),
    ("bf16_fp8_current_coat", NATIVE),
    ("bf16_fp8_block", NATIVE, E4M3, HELD),
    ("bf16_fp8_block", NATIVE, E4M3, PLAIN),
    ("bf16_fp8_block_deepseek_v3", NATIVE),
    ("bf16_fp8", NATIVE, "recipe=gemma3_tiny"),
    ("bf16_fp8_block", NATIVE, E4M3, "recipe=mistral_tiny"),
    ("bf16_fp8_amp", NATIVE, "recipe=qwen2_tiny"),
    ("bf16_fp8_block", NATIVE, E4M3, "recipe=qwen2_tiny"),
    ("bf16_adamw_fp8", "recipe=qwen2_tiny"),
    ("bf16_fp8", NATIVE, "storage.shard=fsdp"),
    ("bf16_fp8_block", NATIVE, E4M3, HELD, "storage.shard=fsdp"),
]
BLACKWELL_JOBS = [
    ("bf16_mxfp8", NATIVE, HELD),
    ("bf16_mxfp8", NATIVE, PLAIN),
    ("bf16_nvfp4", NATIVE, HELD),
    ("bf16_nvfp4", NATIVE, PLAIN),
]
JOBS = BLACKWELL_JOBS if BLACKWELL else HOPPER_JOBS
METRICS = {
    "step",
    "loss",
    "val_loss",
    "grad_norm",
    "lr",
    "fp8_clipped_values",
    "fp8_infinite_values",
}
_A = torch.ops.aten


class AttentionOfGPUs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attention on a CPU in float32, rounded once."""

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        bias, scale = named.get("attn_mask"), named.get("scale")
        if op is _A._scaled_dot_product_flash_attention_for_cpu.default:
            dropout, causal = (*args[3:], *(0.0, False)[len(args) - 3 :])
            return attention(*args[:3], bias, dropout, int(causal), scale)
        if op is _A._scaled_dot_product_flash_attention_for_cpu_backward.default:
            return attention_backward(*args[:4], bias, *args[4:7], int(args[7]), scale)[:3]
        return op(*args, **named)


class NormOfGPUs(torch.autograd.Function):
    """`torch.nn.functional.rms_norm` as one operation."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None
    ) -> Tensor:
        y, rstd = rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, rstd, weight = ctx.saved_tensors
        dx, dw = rms_norm_backward(grad, x, ctx.shape, rstd, weight, (True, weight is not None))
        return dx, None, dw, None


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """Attention and norms on a CPU as they are on a GPU."""
    with AttentionOfGPUs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "rms_norm", lambda *args: NormOfGPUs.apply(*args))
        yield


def job(words: tuple[str, ...], *more: str) -> Job:
    preset, *rest = words
    return fp8cfg.build(small(f"precision={preset}", *rest, *more))


def bits(job: Job) -> dict[str, Tensor]:
    """Bytes of weights, scales and amax histories."""
    of = {
        name: t.to_local() if isinstance(t, DTensor) else t
        for name, t in job.model.state_dict().items()
        if isinstance(t, Tensor)
    }
    plain = {
        name: t.detach() for name, t in of.items() if type(t) in (Tensor, torch.nn.Parameter)
    }  # no float8 shard of FSDP2
    return {
        name: in_host_memory(t).contiguous().flatten().view(torch.uint8).clone()
        for name, t in plain.items()
    }


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what has other bits."""
    return [
        name
        for name in one.keys() | other.keys()
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_a_job_trains_as_on_a_cpu(words: tuple[str, ...]) -> None:
    with as_on_gpus():
        there = job(words, "trainer.accelerator=cpu")
        want, left = [step.loss for step in steps(there, 4)], bits(there)
    with computed():
        trained = job(words, *CUDA)
        got, found = [step.loss for step in steps(trained, 4)], bits(trained)
        trained.prove()
    assert trained.choice.product == (
        "emulate" if ATTENTION[0] in words else "scaled_mm" if NATIVE in words else "none"
    )
    if "opt_level=O2" in words:  # which adds up the norm of stored gradients in another order
        assert got == pytest.approx(want, rel=1e-6)
        return
    assert got == want
    assert different(found, left) == []


@pytest.mark.parametrize(
    "words",
    JOBS
    if BLACKWELL
    else [j for j in JOBS if "bf16_fp8" in j[0] and not j[-1].startswith(("recipe", "storage"))],
    ids=" ".join,
)
def test_a_resumed_job_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path) -> None:
    with computed():
        preset, *rest = words
        given = small_words(f"precision={preset}", *rest, *CUDA, "trainer.val_check_interval=2")
        there = fp8cfg.build(fp8cfg.compose([*given, "trainer.max_steps=4"]))
        fp8cfg.fit(there, tmp_path / "whole", say=lambda _: None)
        fp8cfg.fit(
            fp8cfg.build(fp8cfg.compose([*given, "trainer.max_steps=2"])),
            tmp_path / "parts",
            say=lambda _: None,
        )
        resumed = fp8cfg.build(
            fp8cfg.compose(
                [
                    *given,
                    "trainer.max_steps=4",
                    "log.resume=auto",
                    f"log.folder={tmp_path / 'parts'}",
                ]
            )
        )
        fp8cfg.fit(resumed, say=lambda _: None)
        assert different(bits(resumed), bits(there)) == []


@pytest.mark.parametrize(
    "words",
    [j for j in JOBS if j[0] != "fp16_fp8" and "opt_level=O2" not in j]
    + [("bf16", "optim.name=sgd")] * (not BLACKWELL),
    ids=" ".join,
)
def test_a_run_has_the_metrics_of_a_cpu(words: tuple[str, ...], tmp_path: Path) -> None:
    """Steps are launched ahead here, on a GPU, and not there; losses, norms, counts of clipped values, learning rates, evaluations."""

    def metrics(*device: str) -> list[dict[str, Any]]:
        fp8cfg.fit(job(words, *device), tmp_path / device[0], say=lambda _: None)
        lines = (tmp_path / device[0] / "metrics.jsonl").read_text().splitlines()
        return [
            {name: value for name, value in json.loads(line).items() if name in METRICS}
            for line in lines
        ]

    with as_on_gpus():
        want = metrics("trainer.accelerator=cpu", "trainer.devices=1")
    with computed():
        got = metrics(*CUDA)
    assert got == want and {"loss", "val_loss", "grad_norm", "lr"} <= {
        name for line in got for name in line
    }
