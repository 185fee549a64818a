"""Values on the fake GPU (tools/fake_gpu/values.py): operations give what a CPU gives, and what is asked of the GPU stays.

Runs on the fake GPU alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

from tools.fake_gpu.recorder import is_fake, record

if not is_fake():
    pytest.skip("a real GPU has values", allow_module_level=True)

from tools.fake_gpu.host_memory import in_host_memory
from tools.fake_gpu.values import computed


@pytest.fixture
def values() -> Iterator[None]:
    with computed():
        yield


def operations() -> dict[str, Any]:
    def given(t: Tensor) -> Tensor:
        return torch.arange(24.0, device=t.device).view(4, 6) / 7 - 1

    return {
        "view and arithmetic": lambda t: given(t).t()[1:, ::2] * 3 + t[0, 0],
        "matrices": lambda t: given(t) @ given(t).t(),
        "16 bits": lambda t: (given(t).bfloat16() @ given(t).bfloat16().t()).softmax(-1),
        "into float32": lambda t: given(t).bfloat16().float(),
        "by mask": lambda t: given(t)[given(t) > 0],
        "by index": lambda t: given(t)[torch.tensor([2, 0], device=t.device)],
        "places": lambda t: (given(t) > 0).nonzero(),
        "sort": lambda t: given(t).sort(descending=True, dim=1)[0],
        "number": lambda t: torch.tensor(given(t).sum().item()),
        "in place": lambda t: given(t).add_(1).mul_(given(t)).zero_().fill_(3).copy_(t),
        "out": lambda t: torch.add(given(t), 1, out=torch.empty(0, device=t.device)),
        "float8": lambda t: given(t).to(torch.float8_e4m3fn).t().contiguous().float(),
        "sum": lambda t: given(t).cumsum(1).sum(),
        "many": lambda t: torch.stack(torch._foreach_add([given(t), t], 2)),
        "norms": lambda t: torch.stack(torch._foreach_norm([given(t), t])),
        "layer norm": lambda t: torch.nn.functional.layer_norm(given(t), [6]),
        "rms norm": lambda t: torch.nn.functional.rms_norm(given(t), [6]),
        "loss": lambda t: torch.nn.functional.cross_entropy(
            given(t), torch.arange(4, device=t.device)
        ),
        "joined": lambda t: torch.cat([given(t), t]).clamp(0, 1).where(torch.cat([t, t]) > 0, 7.0),
        "on the host": lambda t: given(t).cpu() + 1,
    }


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
        y = torch.nn.functional.scaled_dot_product_attention(
            *here, attn_mask=None if mask is None else mask.to(device), is_causal=mask is None
        )
        y.backward(torch.ones_like(y))
        found.append([t.cpu() for t in (y, *(t.grad for t in here if t.grad is not None))])
    close = (
        {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    )
    assert all(torch.allclose(a, b, **close) for a, b in zip(*found, strict=True))


def test_more_than_the_fake_libraries_copy(values: None) -> None:
    t = torch.randn(1500, 1000)
    assert torch.equal(t.cuda().cpu(), t) and torch.equal(
        t.pin_memory().to("cuda", non_blocking=True).clone().cpu(), t
    )
    assert not torch.zeros(1500, 1000, device="cuda").any() and t.cuda().zero_().sum() == 0


def test_random_numbers_are_those_of_the_generator_state(values: None) -> None:
    kept, before = torch.cuda.get_rng_state(), torch.get_rng_state()
    first, second = (torch.randn(1000, device="cuda") for _ in range(2))
    torch.cuda.set_rng_state(kept)
    assert (
        torch.equal(torch.randn(1000, device="cuda"), first)
        and not torch.equal(first, second)
        and abs(first.mean()) < 0.2
    )
    generator = torch.Generator("cuda").manual_seed(5)
    drawn = torch.rand(9, device="cuda", generator=generator)
    assert torch.equal(
        torch.empty(9, device="cuda").uniform_(generator=generator.manual_seed(5)), drawn
    )
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
    from fp8cfg.numerics.kernels.tensor import _read_in_parts

    t = torch.ones(8, device="cuda")
    with pytest.raises(NotImplementedError, match="_read_in_parts: no values"):
        _read_in_parts[(1,)](t, t, t, t, 8, 0.0, 0, False, False, False, 4096)
