"""FP8 layers in small: the scalings, a residual block of two linear layers, and what their tests ask of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fp8cfg.numerics import (
    E2M1,
    E4M3,
    FP8Linear,
    GemmRecord,
    Region,
    Scaling,
    decode_gemm_record,
    fp8_linears,
    update_scales,
)
from fp8cfg.numerics.amax import compute_amax
from fp8cfg.numerics.scaling import compute_scale

DELAYED, CURRENT = Scaling(amax_history_len=4), Scaling("current")
TILED = {
    "row": Scaling("current", granularity="row"),
    "row-pow2": Scaling("current", backward=E4M3, granularity="row", power_2_scales=True),
    "block": Scaling("block", power_2_scales=True, weights_2d=True),
    "block-fp32": Scaling("block", backward=E4M3, weights_2d=True),
    "block-1d": Scaling("block", power_2_scales=True),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "mxfp8-2d": Scaling("mxfp8", backward=E4M3, weights_2d=True),
    "nvfp4-nearest": Scaling("nvfp4", E2M1, E2M1, hadamard=False, stochastic=False),
    "nvfp4": Scaling("nvfp4", E2M1, E2M1, weights_2d=True),
}
ALL = {"delayed": DELAYED, "current": CURRENT, **TILED}
KINDS = pytest.mark.parametrize("scaling", ALL.values(), ids=ALL)
FP8_RUN = [
    GemmRecord("e4m3", "e4m3", "emulated"),
    GemmRecord("e5m2", "e4m3", "emulated"),
    GemmRecord("e5m2", "e4m3", "emulated"),
]


def in_fp8(scaling: Scaling, how: str = "emulated") -> list[GemmRecord]:
    forward, backward = scaling.forward.name, scaling.backward.name
    return [
        GemmRecord(forward, forward, how),
        GemmRecord(backward, forward, how),
        GemmRecord(backward, forward, how),
    ]


class Net(nn.Module):
    """A residual block of two linear layers, the first with a bias, checkpointed on demand."""

    def __init__(self, recompute: str = "no", dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.recompute = (
            nn.Linear(32, 64),
            nn.Linear(64, 32, bias=False),
            recompute,
        )
        self.to(dtype)

    def block(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        if self.recompute == "no":
            return x + self.block(x)
        return x + checkpoint(self.block, x, use_reentrant=self.recompute == "reentrant")


def convert(net: Net, scaling: Scaling, **options: object) -> tuple[Net, Region]:
    region = Region()
    for name in ("up", "down"):
        setattr(net, name, FP8Linear.from_linear(getattr(net, name), scaling, region, **options))  # type: ignore[arg-type]
    return net, region


def data(step: int, rows: int = 24, requires_grad: bool = False) -> Tensor:
    x = torch.randn(2, rows, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
    return x.requires_grad_(requires_grad)


def loss_of(y: Tensor) -> Tensor:
    return y.float().pow(2).mean()


def fp8_state(net: nn.Module) -> list[Tensor]:
    return [
        t
        for layer in fp8_linears(net)
        for t in (layer.fp8_scale, layer.fp8_amax_history)
        if t is not None
    ]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def grads(net: nn.Module) -> list[Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def ran(layer: FP8Linear) -> list[GemmRecord | None]:
    return [decode_gemm_record(code) for code in layer.gemms_ran.tolist()]


def train(
    net: Net,
    region: Region,
    steps: int = 3,
    forward: Callable[[Tensor], Tensor] | None = None,
    lr: float = 0.1,
) -> list[float]:
    """Leaves the region before the backward pass, as one does with autocast."""
    losses, optimizer = [], torch.optim.SGD(net.parameters(), lr)
    for step in range(steps):
        torch.manual_seed(step)  # nvfp4 rounds gradients at random
        with region.entered():
            y = (net if forward is None else forward)(data(step, requires_grad=True))
        loss_of(y).backward()
        losses.append(loss_of(y).item())
        optimizer.step()
        optimizer.zero_grad()
        update_scales(fp8_linears(net))
    return losses


def dequantized(t: Tensor, fmt: object) -> Tensor:
    scale = compute_scale(compute_amax(t), fmt.max)  # type: ignore[arg-type]
    return (t * scale).clamp(-fmt.max, fmt.max).to(fmt.dtype).double() / scale.double()  # type: ignore[attr-defined]
