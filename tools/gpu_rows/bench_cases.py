"""Cases of tools/bench_gpu.py and who runs in them: a linear layer, a Transformer block, whole models; BF16, native, Transformer
Engine and torchao.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends import backend_registry
from fp8cfg.backends.compile_options import compile_options
from fp8cfg.data import Batches, Windows
from fp8cfg.layer_plan import plan, transformer_config
from fp8cfg.models.layers import TransformerLayer
from fp8cfg.models.rotary import rotary_tables
from fp8cfg.numerics import E2M1, E4M3, FP8Linear, Region, Scaling, fp8_linears, seed_rounding, update_scales
from fp8cfg.report.coverage import planned as planned_flops
from fp8cfg.report.machine import free_memory
from fp8cfg.report.memory.nearest_fit import too_large
from fp8cfg.report.memory.peak import memory
from fp8cfg.scalings import SCALINGS as TABLE
from fp8cfg.training.distributed.world import World
from fp8cfg.training.train_step import train_step
from tools.gpu_rows import estimate
from tools.gpu_rows.shapes import BLACKWELL, WORDS
from tools.gpu_rows.worker import NotRun

SCALINGS = {"delayed": Scaling(), "current": Scaling("current"), "row": Scaling("current", granularity="row", power_2_scales=True),
            "block": Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True),
            "mxfp8": Scaling("mxfp8", backward=E4M3), "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True)}
TRAINER = ["optim.lr=1e-30", "optim.warmup_steps=0", "trainer.devices=1", "trainer.gradient_clip_val=0"]  # weights stay as they are


@dataclass(frozen=True)
class Contender:
    backend: str
    scaling: str
    compiled: bool

    def __str__(self) -> str:
        return f"{self.backend} {self.scaling} {'compiled' if self.compiled else 'eager'}"

    def missing(self, capability: tuple[int, int] | None) -> str:
        """What it needs and is not to be had here, a library or a GPU of another compute capability; empty where all is."""
        library = backend_registry.rules(self.backend).unavailable().partition(";")[0] if self.backend in ("te", "torchao") else ""
        return library or unsupported(self.scaling, capability)


def unsupported(scaling: str, capability: tuple[int, int] | None) -> str:
    """Why a GPU of this compute capability, with the CUDA of this torch, does not multiply under `scaling`; empty where it does. A CPU (None) emulates what
    Hopper has."""
    wants = "9.x" if scaling == "block" else "10.0" if scaling in BLACKWELL else "8.9"
    here = capability or (9, 0)
    if scaling == "bf16" or (here[0] == 9 if scaling == "block" else here >= ((10, 0) if scaling in BLACKWELL else (8, 9))):
        least, version = TABLE[scaling].cuda if scaling in TABLE else (0, 0), torch.version.cuda
        if not capability or not version or tuple(map(int, version.split("."))) >= least:
            return ""
        return f"{scaling} needs CUDA {least[0]}.{least[1]}, torch has {version}"
    return f"{scaling} needs compute capability {wants}" + (f", this GPU has {here[0]}.{here[1]}" if capability else "")


# What matters most comes first: time may run out.
CONTENDERS = [
    Contender("torch", "bf16", True), Contender("torch", "bf16", False), *(Contender("native", s, True) for s in SCALINGS),
    *(Contender("te", s, False) for s in ("delayed", "current", "block", "mxfp8", "nvfp4")),
    *(Contender("torchao", s, True) for s in ("tensorwise", "rowwise")), *(Contender("native", s, False) for s in SCALINGS)]  # fmt: skip
Found = dict[str, list[Tensor]]
Estimate = Callable[[estimate.Device, str], float]


@dataclass
class Runner:
    """One pass of a contender, what its last one computed, tensors by what they are, and the memory that was planned for it."""

    step: Callable[[], object]
    found: Callable[[], Found]
    planned: int = 0  # bytes, of a model


def convert(model: nn.Module, contender: Contender) -> tuple[Callable[[], AbstractContextManager[object]], Callable[[], None]]:
    """Puts the contender's layers into `model`, output layer excepted, around the very same parameters. Returns the context that
    forward passes need, and what to call after a backward pass."""
    if contender.backend == "native":
        product = "scaled_mm" if next(model.parameters()).is_cuda else "emulate"
        replace(model, lambda m: FP8Linear.from_linear(m, SCALINGS[contender.scaling], Region(active=True), product=product))
        seed_rounding(model, 1)
        layers = list(fp8_linears(model))
        return nullcontext, lambda: update_scales(layers)
    if contender.backend == "te":
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe

        scaling = {"delayed": recipe.DelayedScaling, "current": recipe.Float8CurrentScaling, "block": recipe.Float8BlockScaling,
                   "mxfp8": recipe.MXFP8BlockScaling, "nvfp4": recipe.NVFP4BlockScaling}
        made = scaling[contender.scaling]()

        def te_linear(m: nn.Linear) -> nn.Module:
            new = te.Linear(m.in_features, m.out_features, bias=False, params_dtype=m.weight.dtype, device=m.weight.device)
            new.weight = m.weight
            return new

        replace(model, te_linear)
        return lambda: te.autocast(enabled=True, recipe=made), lambda: None
    if contender.backend == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(contender.scaling)
        if not next(model.parameters()).is_cuda:
            config = dataclasses.replace(config, emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output_layer")
    return nullcontext, lambda: None


def replace(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> None:
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "output_layer":
            model.set_submodule(name, make(module))


def compile_layers(model: nn.Module, contender: Contender, args: argparse.Namespace) -> None:
    """Native layers with the options of a run of theirs, others with torch's own."""
    how: dict[str, Any] = {"backend": args.compiler}
    if args.compiler == "inductor" and contender.backend == "native":
        recipe = fp8cfg.compose(["recipe=llama_tiny", *WORDS[contender.scaling]])
        how = {"options": compile_options(recipe.precision, args.device)}
    for module in getattr(model, "layers", [model]):
        module.compile(fullgraph=True, dynamic=False, **how)


class OneLayer(nn.Module):
    """A parent, in which the layer can be replaced."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class ModuleCase:
    """Forward and backward passes of one module in BF16; `estimate` gives those of a contender their estimated seconds."""

    def __init__(
        self, args: argparse.Namespace, module: nn.Module, x: Tensor, dy: Tensor, rest: tuple[Tensor, ...], flops: float,
        estimate: Estimate,
    ) -> None:
        self.args, self.x, self.dy, self.rest, self.flops, self.estimate = args, x, dy, rest, flops, estimate
        self.module = module.to(args.device, torch.bfloat16)
        self.tokens = x.numel() // x.shape[-1]
        exact = self._runner(copy.deepcopy(self.module).float(), self.x.float(), self.dy.float(), nullcontext, lambda: None)
        exact.step()
        self.want = exact.found()

    def runner(self, contender: Contender) -> Runner:
        model = copy.deepcopy(self.module)
        context, after = convert(model, contender)
        if contender.compiled:
            compile_layers(model, contender, self.args)
        return self._runner(model, self.x.clone(), self.dy, context, after)

    def _runner(self, model: nn.Module, x: Tensor, dy: Tensor, context: Callable[[], AbstractContextManager[object]],
                after: Callable[[], None]) -> Runner:  # fmt: skip
        x.requires_grad_()
        outputs: list[Tensor] = []

        def step() -> None:
            model.zero_grad()
            x.grad = None
            with context():
                y = model(x, *self.rest)
            y.backward(dy)
            after()
            outputs[:] = [y.detach()]

        def found() -> Found:
            return {"y": outputs, "dx": [x.grad], "dw": [p.grad for p in model.parameters()]}

        return Runner(step, found)


class ModelCase:
    """Optimizer steps of a whole model."""

    def __init__(self, args: argparse.Namespace, words: list[str]) -> None:
        self.args, self.words = args, [*words, *TRAINER, f"trainer.accelerator={args.device}"]
        recipe = fp8cfg.compose(self.words)
        m, t = recipe.model, recipe.trainer
        self.tokens = t.global_batch_size * m.seq_length
        self.flops = self.tokens * flops_per_token(recipe)
        self.estimate: Estimate = lambda device, scaling: sum(
            estimate.step(device, scaling, fp8cfg.compose([*self.words, *WORDS[scaling]])).values())
        row = np.random.default_rng(0).integers(0, m.vocab_size, 4 * self.tokens)
        self.batches = Batches(Windows(row, m.seq_length, m.vocab_size), t.seed, t.global_batch_size)
        exact = self._runner(self._build("precision=fp32", "model.recompute_granularity=full"))
        exact.step()
        self.want = {"dw": [g.cpu() for g in exact.found()["dw"]]}  # two whole models stand on the GPU beside them

    def runner(self, contender: Contender) -> Runner:
        job = self._build(*WORDS[contender.scaling if contender.backend == "native" else "bf16"])
        if contender.backend != "native":
            context, _ = convert(job.model, contender)

            def forward(*tensors: Tensor) -> Tensor:
                with context():
                    return job.model(*tensors)

            job.forward = forward
        if contender.compiled:
            compile_layers(job.model, contender, self.args)
        return self._runner(job)

    def _build(self, *words: str) -> fp8cfg.Job:
        """The job of these words. Raises NotRun where it is planned to take more memory than is free beside the models that stand there."""
        recipe = fp8cfg.compose([*self.words, *words])
        if why := too_large(recipe, self.args.device, free_memory(self.args.device)):
            raise NotRun(why)
        return fp8cfg.build(recipe)

    def _runner(self, job: fp8cfg.Job) -> Runner:
        planned = sum(size for kind, size in memory(job.recipe, self.args.device).items() if kind != "to start")
        return Runner(lambda: train_step(job, self.batches, 0, World()), lambda: {"dw": [p.grad for p in job.optimizer.names]}, planned)


def flops_per_token(recipe: fp8cfg.Recipe, output_layer: bool = True) -> float:
    linears = [p for p in plan(recipe) if output_layer or p.name != "output_layer"]
    return planned_flops(recipe, linears).attention_flops + sum(6.0 * p.in_features * p.out_features for p in linears)


def linear_case(args: argparse.Namespace, shape: tuple[int, int, int]) -> ModuleCase:
    tokens, hidden, ffn = shape
    module = OneLayer(nn.Linear(hidden, ffn, bias=False))
    x, dy = (torch.randn(tokens, n, device=args.device, dtype=torch.bfloat16) for n in (hidden, ffn))
    return ModuleCase(args, module, x, dy, (), 6.0 * tokens * hidden * ffn, lambda device, scaling: estimate.linear(device, scaling, *shape))


def block_case(args: argparse.Namespace, words: list[str]) -> ModuleCase:
    recipe = fp8cfg.compose([*words, "model.num_layers=1"])
    config = transformer_config(recipe)
    x, dy = (torch.randn(1, config.seq_length, config.hidden_size, device=args.device, dtype=torch.bfloat16) for _ in range(2))
    rotary = rotary_tables(config, torch.arange(config.seq_length, device=x.device))
    flops = flops_per_token(recipe, output_layer=False) * config.seq_length

    def seconds(device: estimate.Device, scaling: str) -> float:
        planned = fp8cfg.compose([*words, "model.num_layers=1", "trainer.micro_batch_size=1", *WORDS[scaling]])
        return sum(estimate.layers(device, scaling, planned, output_layer=False).values())

    return ModuleCase(args, TransformerLayer(config), x, dy, rotary, flops, seconds)


CASES = {"linear": linear_case, "block": block_case, "1b": ModelCase, "8b": ModelCase}


PIECE = 1 << 26
"""Elements that are compared at once: two models stand on the GPU beside them, and the largest gradient takes 2 GiB in float32."""


def error(found: Found, want: Found) -> float:
    """The largest relative rms error of any of the groups of tensors."""
    def of(name: str) -> float:
        pieces = (zip(*(t.reshape(-1).split(PIECE) for t in pair), strict=True) for pair in zip(found[name], want[name], strict=True))
        pairs = ((a.float(), b.to(a.device)) for pair in pieces for a, b in pair)
        wrong, every = torch.stack([torch.stack([(a - b).square().sum(), b.square().sum()]) for a, b in pairs]).sum(0)
        return (wrong / every).sqrt().item()

    errors = [of(name) for name in want]
    return math.nan if any(map(math.isnan, errors)) else max(errors)  # max(0.0, nan) is 0.0


LIMITS = {"bf16": 0.05, "nvfp4": 0.7}
"""The largest error of a row that is right. Emulated on a CPU, a linear layer, a block and models of 1 to 16 layers have at most 0.009
in BF16, 0.10 in FP8, whose gradients in E5M2 have 0.06 in the linear layer alone, and 0.34 in NVFP4, each with 16 layers. An output that
is not computed has 1, one of another tensor 1.4, one of the other sign 2."""
LIMIT_FP8 = 0.3


def right(wrong: float, scaling: str) -> float:
    """The error `wrong` of a row under `scaling`. Raises ArithmeticError where that is more than its limit, or no number."""
    limit = LIMITS.get(scaling, LIMIT_FP8)
    if not wrong <= limit:
        raise ArithmeticError(f"error {wrong:.1e}, beside a float32 run, is above {limit:g}, the limit of {scaling}: its speed means nothing")
    return wrong
