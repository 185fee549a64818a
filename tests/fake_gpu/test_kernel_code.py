"""Code of the Triton kernels for a GPU: FP8 conversions saturate and round to even, divisions are rounded to nearest, nothing spills, and
an SM has registers for 16 warps or more at once.

Runs where torch has a CUDA device, also a fake one (tools/fake_gpu): Triton and ptxas are real there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device, not even a fake one", allow_module_level=True)

import triton

import fp8cfg
from fp8cfg.numerics import E4M3, E5M2, Format
from fp8cfg.numerics.kernels import tensor
from tools.fake_gpu.kernel_code import AMAXES, COUNT, FOUR_BITS, compiled, resident_warps, resources

SPILLED_BY_3_9 = 168 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9) else 0
"""Bytes a thread of the kernel that writes a weight as NVFP4 stores it in two directions, once a step, with 16 warps; with 8 up to 240."""


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("delayed", [True, False])
def test_conversions_and_divisions(fmt: Format, dtype: torch.dtype, delayed: bool) -> None:
    t = torch.zeros(256, 512, device="cuda", dtype=dtype)
    scales, history = (
        (torch.ones(3, device="cuda"), torch.zeros(4, 3, device="cuda"))
        if delayed
        else (None, None)
    )
    data, transposed = (
        torch.empty_like(t, dtype=fmt.dtype),
        torch.empty(512, 256, device="cuda", dtype=fmt.dtype),
    )
    kernel = tensor.cast(
        t,
        scales,
        history,
        0,
        fmt.max,
        fmt.max,
        False,
        data,
        transposed,
        torch.empty((), device="cuda"),
    )
    ptx = kernel.asm["ptx"]
    assert f"cvt.rn.satfinite.{fmt.name}x2.f32" in ptx
    assert (
        "div.rn.f32" in ptx and "div.full" not in ptx and "approx" not in ptx and "fma" not in ptx
    )
    assert bool(atomics(ptx)) == delayed, "which records amaxes here"
    assert resources(ptx).spilled == 0


def atomics(ptx: str) -> list[str]:
    """The atomic operations of a kernel, of which Triton 3.9 writes as `red` those whose result nobody reads."""
    return re.findall(r"\b(?:atom|red)\.[\w.:]+", ptx)


def test_no_kernel_spills_or_is_alone_and_all_saturate() -> None:
    for name, kernel in compiled().items():
        ptx = kernel.asm["ptx"]
        assert ("cvt.rn.satfinite" in ptx) == (not name.startswith((AMAXES, COUNT, FOUR_BITS))), (
            name
        )
        found, alone = (
            resources(ptx),
            name.startswith(("cast_blocks MX 1x32", "cast_blocks MX stored")),
        )
        assert "div.full" not in ptx and "approx" not in ptx, name
        assert found.spilled <= (
            SPILLED_BY_3_9 if name.startswith("cast_blocks NVFP4 1x16 and 16x1 stored") else 0
        ), name
        assert resident_warps(found.registers, kernel.metadata.num_warps) >= (8 if alone else 16), (
            name
        )


def test_four_kernels() -> None:
    """The code of our own for a GPU: what else is done there are torch's operations and products."""
    launches = [
        re.findall(r"\b(\w+)\[\(", path.read_text(encoding="utf-8"))
        for path in (Path(fp8cfg.__file__).parent / "numerics" / "kernels").glob("*.py")
    ]
    names = {name for found in launches for name in found}
    assert names == {kernel.name for kernel in compiled().values()} and len(names) == 4, names


def test_atomics_order_nothing() -> None:
    """What they write is read by later kernels: a fence of the GPU would keep the stores of each program behind it."""
    for name, kernel in compiled().items():
        ptx = kernel.asm["ptx"]
        assert "acq_rel" not in ptx and "fence" not in ptx and "membar" not in ptx, name
        assert all(".relaxed." in found for found in atomics(ptx)), name


def test_every_launch_is_on_the_device_of_the_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device, whichever has the tensors."""
    inside, launches = list[torch.Tensor](), list[bool]()

    @contextmanager
    def device_of(t: torch.Tensor) -> Iterator[None]:
        inside.append(t)
        yield
        inside.pop()

    def note(_: object) -> None:
        launches.append(bool(inside))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    triton.knobs.runtime.launch_enter_hook.add(note)
    try:
        names = compiled()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(note)
    assert len(launches) >= len(names) and all(launches)
