"""Values on the fake GPU (tools/fake_gpu/values.py): operations give what a CPU gives, and jobs train as on a CPU, bit for bit.

So are all products, scales, quantized numbers and steps of the two paths of fp8cfg. What torch itself computes otherwise on a CPU is
given to it as on a GPU: attention, whose weights its kernel rounds to bfloat16, which changes a loss by 1e-4, and RMSNorm, whose
gradient has other last bits, which change one by 1e-5.

Runs on the fake GPU alone; jobs of MXFP8 and NVFP4 under FAKE_CC=100."""

from __future__ import annotations

from collections.abc import Iterator
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
from fp8cfg.job import Job
from tests.support.small import small, small_words, steps
from tools.fake_gpu.recorder import is_fake, record

if not is_fake():
    pytest.skip("a real GPU has values", allow_module_level=True)

from tools.fake_gpu.host_memory import in_host_memory
from tools.fake_gpu.value_attention import attention, attention_backward
from tools.fake_gpu.value_handlers import rms_norm, rms_norm_backward
from tools.fake_gpu.values import computed

BLACKWELL = torch.cuda.get_device_capability() >= (10, 0)
CUDA = ("trainer.accelerator=cuda", "trainer.devices=1")
NATIVE, E4M3, HELD, PLAIN = "backend=native", "fp8.format=e4m3", "fp8.params=true", "fp8.params=false"
ATTENTION = ("fp8.emulate=true", "fp8.dot_product_attention=true")
HOPPER_JOBS = [
    ("fp32",), ("bf16",), ("bf16_adamw_fp8",), ("bf16_precision_aware",), ("fp16_fp8", NATIVE), ("bf16_fp8", NATIVE, HELD), ("bf16_fp8", NATIVE, PLAIN),
    ("bf16_fp8", NATIVE, *ATTENTION), ("bf16_fp8", NATIVE, "opt_level=O2"), ("bf16_fp8_current", NATIVE, HELD), ("bf16_fp8_current", NATIVE, PLAIN),
    ("bf16_fp8_current", NATIVE, "fp8.granularity=row"), ("bf16_fp8_current_coat", NATIVE), ("bf16_fp8_block", NATIVE, E4M3, HELD),
    ("bf16_fp8_block", NATIVE, E4M3, PLAIN), ("bf16_fp8_block_deepseek_v3", NATIVE),
    ("bf16_fp8", NATIVE, "recipe=gemma3_tiny"), ("bf16_fp8_block", NATIVE, E4M3, "recipe=mistral_tiny"),
    ("bf16_fp8", NATIVE, "storage.shard=fsdp"), ("bf16_fp8_block", NATIVE, E4M3, HELD, "storage.shard=fsdp"),
]  # fmt: skip
BLACKWELL_JOBS = [("bf16_mxfp8", NATIVE, HELD), ("bf16_mxfp8", NATIVE, PLAIN), ("bf16_nvfp4", NATIVE, HELD), ("bf16_nvfp4", NATIVE, PLAIN)]
JOBS = BLACKWELL_JOBS if BLACKWELL else HOPPER_JOBS
_A = torch.ops.aten


class AttentionOfGPUs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Attention on a CPU in float32, rounded once."""

    def __torch_dispatch__(self, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
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
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
        y, rstd = rms_norm(x, shape, weight, eps)
        ctx.save_for_backward(x, rstd, weight)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, rstd, weight = ctx.saved_tensors
        dx, dw = rms_norm_backward(grad, x, ctx.shape, rstd, weight, (True, weight is not None))
        return dx, None, dw, None


@pytest.fixture
def values() -> Iterator[None]:
    with computed():
        yield


def operations() -> dict[str, Any]:
    def given(t: Tensor) -> Tensor:
        return torch.arange(24.0, device=t.device).view(4, 6) / 7 - 1

    return {
        "view and arithmetic": lambda t: given(t).t()[1:, ::2] * 3 + t[0, 0], "matrices": lambda t: given(t) @ given(t).t(),
        "16 bits": lambda t: (given(t).bfloat16() @ given(t).bfloat16().t()).softmax(-1), "into float32": lambda t: given(t).bfloat16().float(),
        "by mask": lambda t: given(t)[given(t) > 0], "by index": lambda t: given(t)[torch.tensor([2, 0], device=t.device)],
        "places": lambda t: (given(t) > 0).nonzero(), "sort": lambda t: given(t).sort(descending=True, dim=1)[0], "number": lambda t: torch.tensor(given(t).sum().item()),
        "in place": lambda t: given(t).add_(1).mul_(given(t)).zero_().fill_(3).copy_(t), "out": lambda t: torch.add(given(t), 1, out=torch.empty(0, device=t.device)),
        "float8": lambda t: given(t).to(torch.float8_e4m3fn).t().contiguous().float(), "sum": lambda t: given(t).cumsum(1).sum(),
        "many": lambda t: torch.stack(torch._foreach_add([given(t), t], 2)), "norms": lambda t: torch.stack(torch._foreach_norm([given(t), t])),
        "layer norm": lambda t: torch.nn.functional.layer_norm(given(t), [6]), "rms norm": lambda t: torch.nn.functional.rms_norm(given(t), [6]),
        "loss": lambda t: torch.nn.functional.cross_entropy(given(t), torch.arange(4, device=t.device)),
        "joined": lambda t: torch.cat([given(t), t]).clamp(0, 1).where(torch.cat([t, t]) > 0, 7.0), "on the host": lambda t: given(t).cpu() + 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", operations())
def test_an_operation(name: str, values: None) -> None:
    t = torch.linspace(-2, 2, 24, device="cpu").view(4, 6)
    got, want = operations()[name](t.cuda()), operations()[name](t)
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got.cpu(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_and_its_gradients(dtype: torch.dtype, masked: bool, values: None) -> None:
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 33, 16, generator=g).to(dtype) for _ in range(3))
    mask = torch.randn(2, 1, 33, 33, generator=g).to(dtype) if masked else None
    found = []
    for device in ("cuda", "cpu"):
        here = [t.to(device).requires_grad_() for t in (q, k, v)]
        y = torch.nn.functional.scaled_dot_product_attention(*here, attn_mask=None if mask is None else mask.to(device), is_causal=mask is None)
        y.backward(torch.ones_like(y))
        found.append([t.cpu() for t in (y, *(t.grad for t in here if t.grad is not None))])
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    assert all(torch.allclose(a, b, **close) for a, b in zip(*found, strict=True))


def test_more_than_the_fake_libraries_copy(values: None) -> None:
    t = torch.randn(1500, 1000)
    assert torch.equal(t.cuda().cpu(), t) and torch.equal(t.pin_memory().to("cuda", non_blocking=True).clone().cpu(), t)
    assert not torch.zeros(1500, 1000, device="cuda").any() and t.cuda().zero_().sum() == 0


def test_random_numbers_are_those_of_the_generator_state(values: None) -> None:
    kept, before = torch.cuda.get_rng_state(), torch.get_rng_state()
    first, second = (torch.randn(1000, device="cuda") for _ in range(2))
    torch.cuda.set_rng_state(kept)
    assert torch.equal(torch.randn(1000, device="cuda"), first) and not torch.equal(first, second) and abs(first.mean()) < 0.2
    generator = torch.Generator("cuda").manual_seed(5)
    drawn = torch.rand(9, device="cuda", generator=generator)
    assert torch.equal(torch.empty(9, device="cuda").uniform_(generator=generator.manual_seed(5)), drawn)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_asked_of_the_gpu_stays(values: None) -> None:
    """Launches are logged, torch refuses what it refuses on a GPU, and what is not written is NaN."""
    t = torch.ones(4, 4, device="cuda")
    with record() as found:
        t.add_(1)
        assert (t * 2).sum().item() == 64
    assert (found.launches, found.copies("D2P"), found.waits) == (3, 1, 1)
    assert torch.empty(3, device="cuda").isnan().all()
    with pytest.raises(RuntimeError, match="same device"):
        t + torch.ones(4, 4)
    assert in_host_memory(t).tolist() == [[2.0] * 4] * 4 and "2., 2." in repr(t)


def test_a_triton_kernel_of_another_is_refused(values: None) -> None:
    from fp8cfg.numerics.triton_kernels import _largest_parts

    t = torch.ones(8, device="cuda")
    with pytest.raises(NotImplementedError, match="_largest_parts: no values"):
        _largest_parts[(1,)](t, t, t, 8, 0, False, False, 4096)


def job(words: tuple[str, ...], *more: str) -> Job:
    preset, *rest = words
    return fp8cfg.build(small(f"precision={preset}", *rest, *more))


def bits(job: Job) -> dict[str, Tensor]:
    """Bytes of weights, scales and amax histories."""
    of = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in job.model.state_dict().items() if isinstance(t, Tensor)}
    plain = {name: t.detach() for name, t in of.items() if type(t) in (Tensor, torch.nn.Parameter)}  # no float8 shard of FSDP2
    return {name: in_host_memory(t).contiguous().flatten().view(torch.uint8).clone() for name, t in plain.items()}


def different(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of what has other bits."""
    return [name for name in one.keys() | other.keys() if name not in one or name not in other or not torch.equal(one[name], other[name])]


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_a_job_trains_as_on_a_cpu(words: tuple[str, ...]) -> None:
    with AttentionOfGPUs(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "rms_norm", lambda *args: NormOfGPUs.apply(*args))
        there = job(words, "trainer.accelerator=cpu")
        want, left = [step.loss for step in steps(there, 4)], bits(there)
    with computed():
        trained = job(words, *CUDA)
        got, found = [step.loss for step in steps(trained, 4)], bits(trained)
        trained.prove()
    assert trained.choice.product == ("emulate" if ATTENTION[0] in words else "scaled_mm" if NATIVE in words else "none")
    if "opt_level=O2" in words:  # which adds up the norm of stored gradients in another order
        assert got == pytest.approx(want, rel=1e-6)
        return
    assert got == want
    assert different(found, left) == []


@pytest.mark.parametrize("words", JOBS if BLACKWELL else [j for j in JOBS if "bf16_fp8" in j[0] and not j[-1].startswith(("recipe", "storage"))], ids=" ".join)
def test_a_resumed_job_goes_on_bit_for_bit(words: tuple[str, ...], tmp_path: Path, values: None) -> None:
    preset, *rest = words
    given = small_words(f"precision={preset}", *rest, *CUDA, "trainer.val_check_interval=2")
    there = fp8cfg.build(fp8cfg.compose([*given, "trainer.max_steps=4"]))
    fp8cfg.fit(there, tmp_path / "whole", say=lambda _: None)
    fp8cfg.fit(fp8cfg.build(fp8cfg.compose([*given, "trainer.max_steps=2"])), tmp_path / "parts", say=lambda _: None)
    resumed = fp8cfg.build(fp8cfg.compose([*given, "trainer.max_steps=4", "log.resume=auto", f"log.folder={tmp_path / 'parts'}"]))
    fp8cfg.fit(resumed, say=lambda _: None)
    assert different(bits(resumed), bits(there)) == []
