"""Contenders of tools/bench_gpu.py: BF16, native, Transformer Engine and torchao, under each scaling; what each needs, and its layers put
into a module."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import fp8cfg
from fp8cfg.backends import registry
from fp8cfg.backends.compiled_layers import compile_options
from fp8cfg.backends.gemm_plan import plan_linears
from fp8cfg.numerics import (
    E2M1,
    E4M3,
    FP8Linear,
    Region,
    Scaling,
    fp8_linears,
    seed_rounding,
    update_scales,
)
from fp8cfg.schema.scalings import SCALINGS as TABLE
from tools.gpu_rows.shapes import BLACKWELL, WORDS

SCALINGS = {
    "delayed": Scaling(),
    "current": Scaling("current"),
    "row": Scaling("current", granularity="row", power_2_scales=True),
    "block": Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True),
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}


@dataclass(frozen=True)
class Contender:
    backend: str
    scaling: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.backend} {self.scaling} {'compiled' if self.compiled else 'eager'}"

    def missing(self, capability: tuple[int, int] | None) -> str:
        """What it needs and is not to be had here, a library or a GPU of another compute capability; empty where all is."""
        library = (
            registry.rules(self.backend).unavailable().partition(";")[0]
            if self.backend in ("te", "torchao")
            else ""
        )
        return library or unsupported(self.scaling, capability)


def unsupported(scaling: str, capability: tuple[int, int] | None) -> str:
    """Why a GPU of this compute capability, with the CUDA of this torch, does not multiply under `scaling`; empty where it does. A CPU (None) emulates what
    Hopper has."""
    wants = "9.x" if scaling == "block" else "10.0" if scaling in BLACKWELL else "8.9"
    here = capability or (9, 0)
    if scaling == "bf16" or (
        here[0] == 9
        if scaling == "block"
        else here >= ((10, 0) if scaling in BLACKWELL else (8, 9))
    ):
        least, version = TABLE[scaling].cuda if scaling in TABLE else (0, 0), torch.version.cuda
        if not capability or not version or tuple(map(int, version.split("."))) >= least:
            return ""
        return f"{scaling} needs CUDA {least[0]}.{least[1]}, torch has {version}"
    return f"{scaling} needs compute capability {wants}" + (
        f", this GPU has {here[0]}.{here[1]}" if capability else ""
    )


# What matters most comes first: time may run out.
CONTENDERS = [
    Contender("torch", "bf16", True),
    Contender("torch", "bf16", False),
    *(Contender("native", s, True) for s in SCALINGS),
    *(Contender("te", s, False) for s in ("delayed", "current", "block", "mxfp8", "nvfp4")),
    *(Contender("torchao", s, True) for s in ("tensorwise", "rowwise")),
    *(Contender("native", s, False) for s in SCALINGS),
]


def convert(
    model: nn.Module, contender: Contender
) -> tuple[Callable[[], AbstractContextManager[object]], Callable[[], None]]:
    """Puts the contender's layers into `model`, output layer excepted, around the very same parameters. Returns the context that
    forward passes need, and what to call after a backward pass."""
    if contender.backend == "native":
        product = "scaled_mm" if next(model.parameters()).is_cuda else "emulate"
        replace(
            model,
            lambda m: FP8Linear.from_linear(
                m, SCALINGS[contender.scaling], Region(active=True), product=product
            ),
        )
        seed_rounding(model, 1)
        layers = list(fp8_linears(model))
        return nullcontext, lambda: update_scales(layers)
    if contender.backend == "te":
        te_layers(model, contender.scaling)
        return lambda: registry.backend("te").autocast(model), lambda: None
    if contender.backend == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(contender.scaling)
        if not next(model.parameters()).is_cuda:
            config = dataclasses.replace(config, emulate=True)
        convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name != "output_layer"
        )
    return nullcontext, lambda: None


def te_layers(model: nn.Module, scaling: str) -> None:
    """Puts te.TransformerLayer into the place of a Transformer layer, te.Linear into that of a linear one, as backend=te does."""
    fp8 = fp8cfg.compose(
        ["recipe=llama_tiny", *WORDS[scaling], "fp8.params=false", "backend=te"]
    ).fp8
    shapes = [
        (name, m.in_features, m.out_features)
        for name, m in model.named_modules()
        if type(m) is nn.Linear
    ]
    linears = plan_linears(shapes, fp8, lambda name: None, registry.rules("te").misfit)
    registry.backend("te").convert(model, fp8, linears, Region(), "scaled_mm")


def replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "output_layer":
            model.set_submodule(name, make(module))


def compile_layers(model: nn.Module, contender: Contender, args: argparse.Namespace) -> None:
    """Native layers with the options of a run of theirs, others with torch's own."""
    how: dict[str, Any] = {"backend": args.compiler}
    if args.compiler == "inductor" and contender.backend == "native":
        how = {"options": compile_options(args.device)}
    for module in getattr(model, "layers", [model]):
        module.compile(fullgraph=True, dynamic=False, **how)
