"""MXFP8 and NVFP4 on Blackwell: torch's C++ takes every product of a layer and of a training step, eager and compiled; values are those
of emulation.

Runs where torch has a CUDA device of compute capability 10.0 or more, also a fake one (tools/fake_gpu, FAKE_CC=100), where
compiled code and the step have no values."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (10, 0):
    pytest.skip(
        "no CUDA device of compute capability 10.0, not even a fake one", allow_module_level=True
    )

import fp8cfg
from fp8cfg.numerics import E2M1, E4M3, Scaling
from tests.support.layer_passes import check_passes
from tools.fake_gpu.recorder import is_fake

SCALINGS = {
    "mxfp8": Scaling("mxfp8", backward=E4M3),
    "mxfp8 squares": Scaling("mxfp8", backward=E4M3, weights_2d=True),
    "nvfp4": Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
}


@pytest.mark.parametrize(
    ("name", "fp8_params", "compiled"),
    [
        *((name, fp8_params, False) for name in SCALINGS for fp8_params in (False, True)),
        ("mxfp8", False, True),
        ("nvfp4", False, True),
    ],
)
def test_every_product_of_a_layer(name: str, fp8_params: bool, compiled: bool) -> None:
    for tokens, width, out, dtype in ((300, 256, 128, torch.bfloat16), (37, 80, 48, torch.float32))[
        : 1 if compiled else 2
    ]:
        check_passes(SCALINGS[name], tokens, width, out, dtype, fp8_params, compiled)


@pytest.mark.parametrize(
    "words",
    [
        "precision=bf16_mxfp8",
        "precision=bf16_mxfp8 fp8.enable_2d_quantization=true",
        "precision=bf16_nvfp4",
    ],
)
def test_a_training_step(words: str) -> None:
    recipe = fp8cfg.compose(
        [
            "recipe=llama_tiny",
            "data=tiny",
            "backend=native",
            "trainer.accelerator=cuda",
            "trainer.devices=1",
            *words.split(),
        ]
    )
    job = fp8cfg.build(recipe)
    assert (job.choice.backend, job.choice.product) == ("native", "scaled_mm")
    tokens = torch.zeros(2, recipe.model.seq_length, dtype=torch.int64, device="cuda")
    with job.autocast():
        loss = job.model(tokens, tokens)
    job.backward(loss)
    if not is_fake():  # whose records of products stay what their memory was
        job.optimizer.step()
