"""Training scripts of others, in small and in their shape; a `way` of "plain" is the script as it was."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from lightning_fabric import Fabric
from torch import Tensor, nn

from tests.clients.gpt import GPT, LENGTH, STEPS, WIDTH, CastingLinear, batch
from tests.clients.made import CLIP, Made, Way, made


def model(**options: Any) -> GPT:
    torch.manual_seed(7)
    return GPT(**options)


def nanogpt(way: Way) -> Made:
    """train.py: one context for all steps and for estimate_loss, GradScaler, two microbatches, clipping of unscaled gradients."""
    run = made(way, model())
    ctx, scaler = run.context, torch.amp.GradScaler("cpu", enabled=way != "built")
    for step in range(STEPS):
        if step % 10 == 0:
            run.model.eval()
            with torch.no_grad(), ctx:
                assert math.isfinite(run.model(*batch(1000 + step))[1].item())
            run.model.train()
        mean = 0.0
        for micro in range(2):
            with ctx:
                loss = run.model(*batch(step, micro, 2))[1] / 2
            (run.backward if run.job else partial(_scaled_backward, scaler))(loss)
            mean += loss.item()
        scaler.unscale_(run.optimizer) if scaler.is_enabled() else None
        run.clip()
        scaler.step(run.optimizer)
        scaler.update()
        run.step()
        run.optimizer.zero_grad(set_to_none=True)
        run.losses.append(mean)
    return run


def mingpt(way: Way) -> Made:
    """A Trainer with callbacks, whose forward enters FP8 by itself."""
    run = made(way, model(tied=False), autowrap=True)
    callbacks: list[Callable[[float], None]] = [run.losses.append]
    run.model.train()
    for step in range(STEPS):
        _, loss = run.model(*batch(step))
        run.model.zero_grad(set_to_none=True)
        run.backward(loss)
        run.clip()
        run.optimizer.step()
        for callback in callbacks:
            callback(loss.item())
    return run


def nanochat(way: Way) -> Made:
    """Linear layers that cast their weight, known by what they compute."""
    return _simple(made(way, model(linear=CastingLinear, tied=False)))


def x_transformers(way: Way) -> Made:
    """A head that is called to_logits."""
    return _simple(made(way, model(head="to_logits", tied=False)))


def sft(way: Way) -> Made:
    """TRL's: a fused head in the place of the instance's forward, after everything else was set up."""
    run = made(way, model(), autowrap=True)
    run.model.forward = partial(_fused_head, run.model)  # type: ignore[assignment]
    return _simple(run)


def peft(way: Way) -> Made:
    """Adapters around frozen linear layers, in a wrapper that calls the model's forward itself, past its hooks."""
    whole = model()
    for block in whole.h:
        block.c_attn = Lora(block.c_attn)  # type: ignore[assignment]
    whole.requires_grad_(False)
    for block in whole.h:
        block.c_attn.lora_A.requires_grad_(True), block.c_attn.lora_B.requires_grad_(True)
    run = made(way, whole, autowrap=True)
    run.model = Wrapper(run.model)
    return _simple(run)


def accelerate(way: Way) -> Made:
    """prepare, accumulate, clip_grad_norm_ and backward of Accelerate."""
    run = made(way, model(), autowrap=True)
    accelerator = Accelerator(mixed_precision="no", cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer = accelerator.prepare(run.model, run.optimizer)
    for step in range(STEPS):
        mean = 0.0
        for micro in range(2):
            with accelerator.accumulate(prepared):
                loss = prepared(*batch(step, micro, 2))[1]
                accelerator.backward(run.job.scaled(loss) if run.job else loss)
                if accelerator.sync_gradients and not run.job:
                    accelerator.clip_grad_norm_(prepared.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()
            mean += loss.item() / 2
        run.losses.append(mean)
    return run


def fabric(way: Way) -> Made:
    """setup and backward of Fabric; a job's optimizer alone is set up."""
    run, on = made(way, model()), Fabric(accelerator="cpu", devices=1)
    if run.job:
        prepared, optimizer = run.model, on.setup_optimizers(run.optimizer)
    else:
        prepared, optimizer = on.setup(run.model, run.optimizer)
    for step in range(STEPS):
        with run.context:
            loss = prepared(*batch(step))[1]
            on.backward(run.job.scaled(loss) if run.job else loss)
        run.clip()
        optimizer.step()
        run.step()
        optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


LOOPS: dict[str, Callable[[Way], Made]] = {
    "nanoGPT": nanogpt,
    "minGPT": mingpt,
    "nanochat": nanochat,
    "x-transformers": x_transformers,
    "SFTTrainer": sft,
    "PEFT": peft,
    "Accelerate": accelerate,
    "Fabric": fabric,
}


class Lora(nn.Module):
    """PEFT's adapter: a frozen layer and the product of two low ones."""

    def __init__(self, base: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        low = x.to(self.lora_A["default"].weight.dtype)  # type: ignore[arg-type, call-overload]
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](low))


class Wrapper(nn.Module):
    """PEFT's, which calls `forward` of what it wraps."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def forward(self, *args: Any) -> Any:
        return self.base_model.forward(*args)


def _simple(run: Made) -> Made:
    for step in range(STEPS):
        with run.context:
            loss = run.model(*batch(step))[1]
            run.backward(loss)
        run.clip()
        run.optimizer.step()
        run.step()
        run.optimizer.zero_grad()
        run.losses.append(loss.item())
    return run


def _scaled_backward(scaler: torch.amp.GradScaler, loss: Tensor) -> None:
    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]


def _fused_head(self: GPT, tokens: Tensor, targets: Tensor) -> tuple[None, Tensor]:
    """Loss in two parts of the tokens, without logits of all of them."""
    x = self.wte(tokens) + self.wpe(torch.arange(LENGTH))
    for block in self.h:
        x = block(x)
    parts = zip(self.ln_f(x).reshape(-1, WIDTH).chunk(2), targets.flatten().chunk(2), strict=True)
    return None, sum(F.cross_entropy(self.lm_head(y), t) for y, t in parts) / 2  # type: ignore[operator]
