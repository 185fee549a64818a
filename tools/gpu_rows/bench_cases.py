"""Cases of tools/bench_gpu.py: a linear layer, a Transformer block, whole models, each with a runner for any contender."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.data import Batches, Windows
from fp8cfg.models.attention import rotary_tables
from fp8cfg.models.transformer import TransformerLayer
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.coverage import planned_coverage as planned_flops
from fp8cfg.planning.fit_search import memory_problem
from fp8cfg.planning.hardware import free_memory
from fp8cfg.planning.layer_plan import plan_layers, transformer_config
from fp8cfg.planning.peak_memory import plan_memory
from tools.gpu_rows import estimate
from tools.gpu_rows.contenders import Contender, compile_layers, convert
from tools.gpu_rows.fit_steps import FitSteps
from tools.gpu_rows.row_error import Found
from tools.gpu_rows.shapes import WORDS
from tools.gpu_rows.stopwatch import OptimizerTime
from tools.gpu_rows.worker import NotRun

TRAINER = [
    "optim.lr=1e-30",
    "optim.warmup_steps=0",
    "trainer.devices=1",
    "trainer.gradient_clip_val=0",
]  # weights stay as they are


Estimate = Callable[[estimate.Device, str], float]


@dataclass
class Runner:
    """One pass of a contender, what its last one computed, tensors by what they are, and the memory that was planned for it."""

    step: Callable[[], object]
    found: Callable[[], Found]
    planned: int = 0  # bytes, of a model
    optimizer: Callable[[], float] | None = (
        None  # seconds of its optimizer in the last pass, once the device has made it
    )


class OneLayer(nn.Module):
    """A parent, in which the layer can be replaced."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *tensors: Tensor) -> Tensor:
        y: Tensor = self.layer(*tensors)
        return y


class ModuleCase:
    """Forward and backward passes of one module in BF16; `estimate` gives those of a contender their estimated seconds."""

    def __init__(
        self,
        args: argparse.Namespace,
        module: nn.Module,
        x: Tensor,
        dy: Tensor,
        rest: tuple[Tensor, ...],
        flops: float,
        estimate: Estimate,
    ) -> None:
        self.args, self.x, self.dy, self.rest, self.flops, self.estimate = (
            args,
            x,
            dy,
            rest,
            flops,
            estimate,
        )
        self.module = module.to(args.device, torch.bfloat16)
        self.tokens = x.numel() // x.shape[-1]
        exact = self._runner(
            copy.deepcopy(self.module).float(),
            self.x.float(),
            self.dy.float(),
            nullcontext,
            lambda: None,
        )
        exact.step()
        self.want = exact.found()

    def runner(self, contender: Contender) -> Runner:
        model = copy.deepcopy(self.module)
        context, after = convert(model, contender)
        if contender.compiled:
            compile_layers(model, contender, self.args)
        return self._runner(model, self.x.clone(), self.dy, context, after)

    def _runner(
        self,
        model: nn.Module,
        x: Tensor,
        dy: Tensor,
        context: Callable[[], AbstractContextManager[object]],
        after: Callable[[], None],
    ) -> Runner:
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
    """Optimizer steps of a whole model, taken as `fit` takes them: on a GPU each is launched before the one before is read."""

    def __init__(self, args: argparse.Namespace, words: list[str]) -> None:
        self.args, self.words = args, [*words, *TRAINER, f"trainer.accelerator={args.device}"]
        recipe = fp8cfg.compose(self.words)
        m, t = recipe.model, recipe.trainer
        self.tokens = t.global_batch_size * m.seq_length
        self.flops = self.tokens * flops_per_token(recipe)
        self.estimate: Estimate = lambda device, scaling: sum(
            estimate.step(device, scaling, fp8cfg.compose([*self.words, *WORDS[scaling]])).values()
        )
        row = np.random.default_rng(0).integers(0, m.vocab_size, 4 * self.tokens)
        self.batches = Batches(
            Windows(row, m.seq_length, m.vocab_size), t.seed, t.global_batch_size
        )
        exact = self._runner(self._build("precision=fp32", "model.recompute_granularity=full"))
        exact.step()
        self.want = {
            "dw": [g.cpu() for g in exact.found()["dw"]]
        }  # two whole models stand on the GPU beside them

    def runner(self, contender: Contender) -> Runner:
        ours = contender.backend in ("native", "te")  # named, for auto takes native last
        job = (
            self._build(*WORDS[contender.scaling], f"backend={contender.backend}")
            if ours
            else self._build(*WORDS["bf16"])
        )
        if not ours:
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
        if why := memory_problem(recipe, self.args.device, free_memory(self.args.device)):
            raise NotRun(why)
        return fp8cfg.build(recipe)

    def _runner(self, job: fp8cfg.Job) -> Runner:
        planned = sum(
            size
            for kind, size in plan_memory(job.recipe, self.args.device).items()
            if kind != "to start"
        )
        taken = OptimizerTime(job.optimizer, self.args.device)
        steps = FitSteps(job, self.batches, World())

        def found() -> Found:
            return {"dw": [p.grad for p in job.optimizer.names]}

        return Runner(lambda: steps.take(0), found, planned, taken.seconds)


def flops_per_token(recipe: fp8cfg.Recipe, output_layer: bool = True) -> float:
    linears = [p for p in plan_layers(recipe) if output_layer or p.name != "output_layer"]
    return planned_flops(recipe, linears).attention_flops + sum(
        6.0 * p.in_features * p.out_features for p in linears
    )


def linear_case(args: argparse.Namespace, shape: tuple[int, int, int]) -> ModuleCase:
    tokens, hidden, ffn = shape
    module = OneLayer(nn.Linear(hidden, ffn, bias=False))
    x, dy = (
        torch.randn(tokens, n, device=args.device, dtype=torch.bfloat16) for n in (hidden, ffn)
    )
    return ModuleCase(
        args,
        module,
        x,
        dy,
        (),
        6.0 * tokens * hidden * ffn,
        lambda device, scaling: estimate.linear(device, scaling, *shape),
    )


def block_case(args: argparse.Namespace, words: list[str]) -> ModuleCase:
    recipe = fp8cfg.compose([*words, "model.num_layers=1"])
    config = transformer_config(recipe)
    x, dy = (
        torch.randn(
            1, config.seq_length, config.hidden_size, device=args.device, dtype=torch.bfloat16
        )
        for _ in range(2)
    )
    rotary = rotary_tables(config, torch.arange(config.seq_length, device=x.device))
    flops = flops_per_token(recipe, output_layer=False) * config.seq_length

    def seconds(device: estimate.Device, scaling: str) -> float:
        planned = fp8cfg.compose(
            [*words, "model.num_layers=1", "trainer.micro_batch_size=1", *WORDS[scaling]]
        )
        return sum(estimate.layers(device, scaling, planned, output_layer=False).values())

    return ModuleCase(args, OneLayer(TransformerLayer(config)), x, dy, rotary, flops, seconds)


CASES = {"linear": linear_case, "block": block_case, "1b": ModelCase, "8b": ModelCase}
