"""Cases that the fake GPU counts: one linear layer, an 8B-shaped Transformer layer, a training step, an optimizer step, a save.

Each is a function that makes the case and returns what to do once, in parts by name; the counts are those of a third time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends.compiled_layers import compile_options
from fp8cfg.backends.te import layers
from fp8cfg.checkpoint import job_tensors
from fp8cfg.checkpoint.saver import HostCopies
from fp8cfg.models.attention import rotary_tables
from fp8cfg.models.transformer import TransformerLayer
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
from fp8cfg.numerics.amax import AmaxGroup
from fp8cfg.numerics.scaling import GRAD_OUTPUT, WEIGHT
from fp8cfg.optim.low_bit.adam import LowBitTrainingAdamW
from fp8cfg.optim.low_bit.columns import named_columns
from fp8cfg.optim.mixed_precision import param_groups
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.training import microbatches
from fp8cfg.training import step as training_step
from fp8cfg.training.data import run_data
from tools.gpu_rows.fit_steps import FitSteps

Parts = dict[str, Callable[[], object]]
TOKENS, IN_FEATURES, OUT_FEATURES = 15872, 4096, 16384
"""The linear layer of Transformer Engine's published benchmark."""
SCALINGS = {
    "bf16": None,
    "delayed": Scaling(),
    "current": Scaling("current"),
    "row": Scaling("current", granularity="row", power_2_scales=True),
    "block": Scaling("block", backward=E4M3, power_2_scales=True, weights_2d=True),
}
BLACKWELL = {
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}
"""Counted where the fake GPU claims compute capability 10.0, which does not multiply with scales of 128."""
STEP = (
    "recipe=llama_tiny",
    "trainer.accelerator=cuda",
    "trainer.devices=1",
    "data=tiny",
    "trainer.max_steps=8",
    "optim.warmup_steps=0",
    "optim.constant_steps=0",
)
COLUMNS = {
    "weight": "bf16",
    "weight_grad": "fp32",
    "exp_avg": "fp8_block",
    "exp_avg_sq": "fp8_block",
}


def converted(model: nn.Module, scaling: str, fp8_params: bool) -> nn.Module:
    """`model` with FP8 layers in the place of its linear ones."""
    if (made := (SCALINGS | BLACKWELL)[scaling]) is None:
        return model
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            layer = FP8Linear.from_linear(
                module, made, Region(active=True), product="scaled_mm", fp8_params=fp8_params
            )
            layer.set_weight_grad_dtype(torch.bfloat16)
            seed_rounding(layer, 1)
            if not name:
                return layer
            model.set_submodule(name, layer)
    return model


def compiled(model: nn.Module) -> None:
    torch._dynamo.reset()
    model.compile(fullgraph=True, dynamic=False, options=compile_options("cuda"))


def passes(model: nn.Module, x: Tensor, dy: Tensor, *rest: Tensor) -> Parts:
    """Forward, backward and the update of scales."""
    x.requires_grad_()
    outputs: list[Tensor] = []
    layers = list(fp8_linears(model))

    def forward() -> None:
        x.grad = None
        model.zero_grad()
        outputs[:] = [model(x, *rest)]

    return {
        "forward": forward,
        "backward": lambda: outputs.pop().backward(dy),
        "update": lambda: update_scales(layers),
    }


def big_linear(scaling: str, fp8_params: bool) -> nn.Module:
    return converted(
        nn.Linear(IN_FEATURES, OUT_FEATURES, bias=False, device="cuda", dtype=torch.bfloat16),
        scaling,
        fp8_params,
    )


def linear(
    scaling: str, fp8_params: bool = False, compile: bool = False, shared: bool = False
) -> Parts:
    """`shared`: its weight and gradient are split over tensor-parallel ranks, of which there is one here."""
    layer = big_linear(scaling, fp8_params)
    if shared:
        _start_group()
        layer.amax_group = AmaxGroup(((WEIGHT, 0), (GRAD_OUTPUT, 1)), dist.group.WORLD.group_name)
    if compile:
        compiled(layer)
    x, dy = (
        torch.zeros(TOKENS, n, device="cuda", dtype=torch.bfloat16)
        for n in (IN_FEATURES, OUT_FEATURES)
    )
    return passes(layer, x, dy)


def te_linear(scaling: str) -> Parts:
    """Transformer Engine's own layer under its own recipe, which moves scales in its autocast and its backward pass."""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    _forget_te()
    layer = te.Linear(
        IN_FEATURES, OUT_FEATURES, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    made = {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
        "mxfp8": recipe.MXFP8BlockScaling,
        "nvfp4": recipe.NVFP4BlockScaling,
    }[scaling]()
    x, dy = (
        torch.zeros(TOKENS, n, device="cuda", dtype=torch.bfloat16)
        for n in (IN_FEATURES, OUT_FEATURES)
    )
    outputs = list[Tensor]()
    x.requires_grad_()

    def forward() -> None:
        x.grad = layer.weight.grad = None
        with te.autocast(enabled=True, recipe=made):
            outputs[:] = [layer(x)]

    return {"forward": forward, "backward": lambda: outputs.pop().backward(dy)}


def _forget_te() -> None:
    """Scales of layers that were there before would be updated along with those of the next case, if Transformer Engine is loaded."""
    if "transformer_engine.pytorch" in sys.modules:
        layers.fp8_state_manager().reset()


def _start_group() -> None:
    """A process group of one rank, whose collectives are launched all the same."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)


def set_weight(scaling: str) -> Parts:
    """What an optimizer does with a weight of fp8.params once it has stepped."""
    layer, master = big_linear(scaling, True), torch.zeros(OUT_FEATURES, IN_FEATURES, device="cuda")
    return {"set_weight": lambda: layer.set_weight(master)}


def layer_8b(scaling: str, compile: bool = False) -> Parts:
    """One layer of Llama 3.1 8B, one sequence of 8192."""
    config = transformer_config(fp8cfg.compose(["recipe=llama_8b", "model.num_layers=1"]))
    layer = converted(TransformerLayer(config).to("cuda", torch.bfloat16), scaling, False)
    if compile:
        compiled(layer)
    x, dy = (
        torch.zeros(1, config.seq_length, config.hidden_size, device="cuda", dtype=torch.bfloat16)
        for _ in range(2)
    )
    return passes(
        layer, x, dy, *rotary_tables(config, torch.arange(config.seq_length, device="cuda"))
    )


def step(*words: str, compile: bool = False, ranks: int = 1) -> Parts:
    """A training step of llama_tiny under these words, as a run takes those that it does not print, native, whatever is installed,
    unless they name a backend; of the first of several `ranks`, whose group has one rank here."""
    if ranks > 1:
        _start_group()
    _forget_te()
    native = (
        []
        if "precision=bf16" in words or any(w.startswith("backend=") for w in words)
        else ["backend=native"]
    )
    job = fp8cfg.build(fp8cfg.compose([*STEP, *words, *native]))
    if compile:
        job.compile_model()
    batches, _ = run_data(job.recipe)
    # Counts of targets have no values here.
    for module in (microbatches, training_step):
        module.refuse_without_targets = lambda *_: None  # type: ignore[attr-defined]
    steps = FitSteps(job, batches, World(0, ranks))
    return {"step": lambda: steps.take(job.optimizer.steps)}


def host_copies() -> Parts:
    """Copies of what a save beside steps writes, of llama_tiny."""
    job = fp8cfg.build(fp8cfg.compose([*STEP, "precision=bf16_fp8"]))
    copies, groups = HostCopies(print), job_tensors.collect_boxes(job, World())
    return {"copies": lambda: copies.copy(groups)}


def optimizer(name: str, parameters: int, compile: bool = False) -> Parts:
    """A step of AdamW, fused or low-bit, over so many matrices of 4096 x 1024."""
    model = nn.Module()
    for i in range(parameters):
        setattr(
            model,
            f"w{i}",
            nn.Parameter(torch.zeros(4096, 1024, device="cuda", dtype=torch.bfloat16)),
        )
    made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if name == "low-bit":
        made = LowBitTrainingAdamW(
            [{**g, "columns": named_columns(**COLUMNS)} for g in param_groups(model, 0.1)],
            lr=1e-3,
            clip_grad=1.0,
            compiled=compile,
        )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return {"step": made.step}
