"""Which backend runs a recipe on given hardware, and the line that refuses where none does."""

from __future__ import annotations

from dataclasses import dataclass

from fp8cfg.config.errors import refuse_if
from fp8cfg.config.precision import Precision, resolved

FP8_CAPABILITY = (8, 9)
"""Least CUDA compute capability with FP8 matrix products: Ada. Hopper is 9.0."""
BLOCK_CUDA = (12, 9)
"""Least CUDA version whose cuBLAS multiplies with scales of blocks, on Hopper."""


@dataclass(frozen=True)
class Hardware:
    """Where a recipe is to run: `device` is "cpu" or "cuda", `capability` the compute capability of a CUDA device, `cuda` the
    version of CUDA that torch was built with."""

    device: str
    capability: tuple[int, int] | None = None
    cuda: tuple[int, int] | None = None


@dataclass(frozen=True)
class Choice:
    """The backend that runs the recipe, how it multiplies ("emulate" or "scaled_mm"), and why it was chosen."""

    backend: str
    product: str
    why: str


def choose(precision: Precision, hardware: Hardware) -> Choice:
    """The backend for `precision` on `hardware`. Raises ConfigError with every reason against it.

    A capability is never downgraded: what cannot run is refused, naming what can.
    """
    refuse_if(_unavailable(precision))
    if not precision.fp8.enabled:
        return Choice("native", "none", "no FP8 asked for")
    asked = "asked for" if precision.backend == "native" else "auto"
    if hardware.device == "cpu":
        return Choice("native", "emulate", f"{asked}; a CPU emulates FP8")
    if precision.fp8.emulate:
        return Choice("native", "emulate", f"{asked}; fp8.emulate=true")
    refuse_if(_hardware_lacks(precision, hardware))
    return Choice("native", "scaled_mm", f"{asked}; FP8 matrix products of the GPU")


def _hardware_lacks(p: Precision, hardware: Hardware) -> list[str]:
    """The line that says what the GPU cannot multiply, and what it can, if there is anything."""
    capability, scaling = hardware.capability or (0, 0), p.fp8.scaling
    preset = f"{p.compute if p.compute != 'fp32' else 'bf16'}_fp8_current"
    found = f"this GPU has compute capability {'.'.join(map(str, hardware.capability or ('unknown',)))}"
    emulate = "write fp8.emulate=true to emulate"
    if capability < FP8_CAPABILITY:
        return [f"fp8.enabled=True: {found}, FP8 needs 8.9 (Ada) or 9.0 (Hopper); {emulate}, or precision=bf16"]
    if scaling in ("mxfp8", "nvfp4"):
        return [f"fp8.scaling={scaling}: the native backend multiplies it by emulation alone, and {found}; {emulate}, or "
                f"precision={preset}"]
    if scaling == "block" and capability[0] != 9:
        return [f"fp8.scaling=block: {found}, block scaling needs 9.0 (Hopper); {emulate}, or precision={preset}"]
    if scaling == "block" and (hardware.cuda or (0, 0)) < BLOCK_CUDA:
        version = ".".join(map(str, hardware.cuda or ("unknown",)))
        return [f"fp8.scaling=block: torch has CUDA {version}, block scaling needs 12.9; {emulate}, or precision={preset}"]
    if p.fp8.dot_product_attention:
        return [f"fp8.dot_product_attention=True: the native backend has it by emulation alone; {emulate}, or drop it"]
    return []


def _unavailable(p: Precision) -> list[str]:
    """A line for each thing of the schema that this version cannot run."""
    f, lines = p.fp8, []
    if p.backend in ("te", "torchao", "msamp"):
        lines.append(f"backend={p.backend}: not in this version; write backend=native")
    if p.opt_level:
        lines.append(f"opt_level={p.opt_level}: not in this version; leave it null")
    if f.dot_product_attention and f.scaling == "mxfp8":
        lines.append("fp8.dot_product_attention=True: the native backend has none under fp8.scaling=mxfp8, where cuDNN quantizes "
                     "the softmax by rules of its own; drop it, or write fp8.scaling=current")
    if f.multi_head_attention:
        lines.append("fp8.multi_head_attention=True: needs FP8 outputs of the projections: backend=te; drop it")
    actual = resolved(Precision(compute=p.compute, fp8=f.model_copy()))
    for column, given in resolved(p).items():
        if given != actual[column]:
            lines.append(f"storage.{column}={given}: not in this version; auto is {actual[column]} under this precision")
    if p.storage.rounding != "nearest":
        lines.append(f"storage.rounding={p.storage.rounding}: not in this version; write nearest")
    if p.storage.shard != "none":
        lines.append(f"storage.shard={p.storage.shard}: not in this version; write none")
    return lines
