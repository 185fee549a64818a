"""Proof left out: what a run proves of itself needs kernels that compute, which the fake GPU has not.

Records of products stay what their memory held, mostly 0: every FP8 run would be said to have run in high precision. Exceptions of torch, Triton and
ptxas are real there and stay.
"""

from __future__ import annotations

import importlib
import math
import os
from typing import Any

import torch

from fp8cfg.backends.any_model import checks
from fp8cfg.backends.te.rules import unavailable
from fp8cfg.building import job
from fp8cfg.models.transformer import Transformer
from fp8cfg.models.weight_init import block_seed, init_parameter, init_std
from fp8cfg.planning.coverage import observed_coverage
from fp8cfg.training import compile, microbatches, step


def without_proof() -> None:
    """From here on no run of this process is refused for what it did not multiply in FP8, and compiled gradients may be any."""
    checks.check = lambda model: False  # type: ignore[assignment]
    checks._check_forward = lambda layer, args, y: None  # type: ignore[assignment]
    compile._largest_difference = lambda compiled, eager: ("", 0.0)  # type: ignore[assignment]
    compile.LOSS_TOLERANCE = math.inf
    job.Job._observed = lambda made: {}  # type: ignore[method-assign]
    job.prove_engagement = observed_coverage  # which takes the same, and raises nothing
    # Counts of targets have no values there.
    for module in (microbatches, step):
        module.refuse_without_targets = lambda data, step: None  # type: ignore[attr-defined]
    steady_signs()


def steady_signs() -> None:
    """From here on Transformer Engine takes the signs of NVFP4's Hadamard transform for all positive. It adds them up on the GPU into
    a number that its quantizer takes for 32 bits (2.20, pytorch/tensor/nvfp4_tensor.py), and that of the fake GPU may have more."""
    if not unavailable():
        signs: Any = importlib.import_module("transformer_engine.pytorch.tensor.nvfp4_tensor")
        signs.get_random_sign_mask_for_rht = lambda with_random_sign_mask, device: int(
            with_random_sign_mask
        )


def draw_weights_on(device: str) -> None:
    """From here on the weights of a Transformer are drawn on `device`.

    A CPU takes ten seconds for a billion numbers, for each row. A GPU draws other numbers than a CPU. The numbers depend on the
    seed and the parameter's name, so all rows have the same initial weights.
    """

    @torch.no_grad()
    def draw(model: Transformer, seed: int) -> None:
        generator = torch.Generator(device)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                init_parameter(parameter, name, model.config, seed)
                continue
            generator.manual_seed(block_seed(seed, name, 0))
            shape, std = parameter.shape, init_std(model.config, name)
            parameter.copy_(
                torch.empty(shape, device=device).normal_(0.0, std, generator=generator)
            )

    Transformer.init_weights = draw  # type: ignore[method-assign, assignment]


def without_weights() -> None:
    """From here on the weights of a Transformer keep what their memory held.

    Each block would be copied into memory that the fake GPU takes from the machine: ten gigabytes for a model.
    """
    Transformer.init_weights = lambda model, seed: None  # type: ignore[method-assign]


def start(device: str, no_proof: bool) -> None:
    """Begin a process of rows on `device`: one thread on a CPU; without proof nothing is drawn either. With FAKE_VALUES=1 in the
    environment the fake GPU has values, and rows need not leave proof out."""
    if device == "cuda" and os.environ.get("FAKE_VALUES") == "1":
        importlib.import_module("tools.fake_gpu.values").compute_values()
    if device == "cpu":
        torch.set_num_threads(1)
    if no_proof:
        without_proof()
        without_weights()
    else:
        draw_weights_on(device)
