"""The comparison of the kernels' bytes (tools/gpu_rows/kernel_bits.py) under Triton's interpreter, whose conversions are exact here: none
differs, and under its own, which rounds halves away, some do.

What the interpreter of Triton 3.6 makes of float8 stands in tests/support/kernel_values.py; subnormal bfloat16 numbers it reads wrongly,
too. It is chosen when Triton is imported, hence the process of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from fp8cfg.numerics.formats import FORMAT_BY_DTYPE, RandomStream, cast
from tests.support.interpreted import (
    interpreted,
    not_interpreted,
    quantize_by_kernels,
    under_the_interpreter,
)
from tools.gpu_rows import kernel_bits
from tools.gpu_rows.kernel_bits import SCALINGS, matrices

pytestmark = pytest.mark.filterwarnings(
    "ignore::RuntimeWarning"
)  # numpy, of infinities and NaN: the interpreter computes with it


@pytest.mark.slow
@not_interpreted
def test_under_the_interpreter() -> None:
    under_the_interpreter(__file__)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By kernels; one large matrix."""
    quantize_by_kernels(monkeypatch)
    few = [
        (name, t) for name, t in matrices() if name.startswith("every") or "256 x 256" not in name
    ]
    monkeypatch.setattr(kernel_bits, "matrices", lambda: few)


@pytest.fixture
def exact_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float8 numbers as torch rounds them, bfloat16 as it is."""
    from triton.runtime import interpreter

    formats = {
        "fp8e4nv": FORMAT_BY_DTYPE[torch.float8_e4m3fn],
        "fp8e5": FORMAT_BY_DTYPE[torch.float8_e5m2],
    }
    convert = interpreter._convert_float

    def converted(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if (source.name, target.name) == ("bf16", "fp32"):
            return (
                np.frombuffer(given.tobytes(), np.uint16).reshape(given.shape).astype(np.uint32)
                << 16
            )
        if target.name not in formats:
            return convert(given, source, target, rounding)
        assert source.name == "fp32", "rounded once"
        t = torch.from_numpy(np.frombuffer(given.tobytes(), np.float32).reshape(given.shape).copy())
        return cast(t, formats[target.name]).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", converted)


@interpreted
@pytest.mark.parametrize("scaling", SCALINGS)
def test_no_byte_differs(scaling: str, on_cpu: None, exact_conversions: None) -> None:
    kernel_bits.kernel_bits(scaling, "cpu").verdict()


@interpreted
@pytest.mark.parametrize("variant", ["at random", "transformed"])
def test_other_random_numbers_are_found(
    variant: str, on_cpu: None, exact_conversions: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    normal = torch.randn(130, 140, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(kernel_bits, "matrices", lambda: [("normal", normal)])
    monkeypatch.setitem(kernel_bits.SCALINGS, "nvfp4", {variant: SCALINGS["nvfp4"][variant]})
    made = kernel_bits.quantize_nvfp4_fused

    def in_another_lane(
        t: torch.Tensor, square: bool, draw: RandomStream | None, *rest: Any
    ) -> Any:
        return made(t, square, draw and draw._replace(lane=1 - draw.lane), *rest)

    monkeypatch.setattr(kernel_bits, "quantize_nvfp4_fused", in_another_lane)
    with pytest.raises(
        ArithmeticError, match=r"^[1-9]\d* of \d+ bytes of data, 0 of \d+ bytes of scales"
    ):
        kernel_bits.kernel_bits("nvfp4", "cpu").verdict()


@interpreted
@pytest.mark.parametrize("scaling", ["delayed", "block"])
def test_other_halves_are_found(
    scaling: str, on_cpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_bits, "matrices", lambda: [next(matrices())])
    with pytest.raises(
        ArithmeticError,
        match=r"[1-9]\d* of \d+ bytes of data, .* 0 of \d+ bytes of scales, .* of every bfloat16 number",
    ):
        kernel_bits.kernel_bits(scaling, "cpu").verdict()
