"""Backward products that autograd does not need: they are no part of a model's FLOPs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fp8cfg


class Net(nn.Module):
    """Three layers of equal size, and an output layer in high precision with 1/36 of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(3))
        self.head = nn.Linear(96, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        y: Tensor = self.head(x)
        return y


def trained(net: nn.Module, *words: str) -> fp8cfg.Coverage:
    recipe = fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false", *words])
    fp8 = fp8cfg.convert_model(net, recipe)
    with fp8.autocast():
        net(torch.randn(32, 96)).sum().backward()
    fp8.step()
    return fp8.prove()


def test_the_first_layer_has_no_dgrad() -> None:
    seen = trained(Net(), "fp8.min_coverage=0.9")
    assert seen.products["layers.0"]["dgrad"] == "none"
    assert seen.share == pytest.approx(8 * 12 / (8 * 12 + 3))  # in units of 96 x 8 weights


def test_frozen_layers_have_no_wgrad_and_none_below_the_first_trained_layer() -> None:
    net = Net()
    net.layers[0].requires_grad_(False)
    net.layers[2].requires_grad_(False)
    net.head.requires_grad_(False)
    seen = trained(net, "fp8.min_coverage=0.9")
    gemms = {name: [kind != "none" for kind in ran.values()] for name, ran in seen.products.items()}
    assert gemms == {
        "layers.0": [True, False, False],
        "layers.1": [True, False, True],
        "layers.2": [True, True, False],
        "head": [True, True, False],
    }
    assert seen.share == pytest.approx(5 * 12 / (5 * 12 + 2))


def test_a_job_counts_alike() -> None:
    class Loss(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().mean()

    net = Loss()
    net.layers[0].requires_grad_(False)
    job = fp8cfg.build(
        fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false", "fp8.min_coverage=0.9"]), net
    )
    with job.autocast():
        job.backward(job.model(torch.randn(32, 96)))
    assert job.prove().products["layers.0"]["wgrad"] == "none"


def test_a_layer_that_never_ran_counts() -> None:
    net = Net()
    net.spare = nn.Linear(96, 96)
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8.min_coverage=0.9: 7"):
        trained(net, "fp8.min_coverage=0.9")


def test_a_product_that_ran_in_high_precision_counts() -> None:
    words = "fp8.override_linear_precision.wgrad=true", "fp8.min_coverage=0.9"
    with pytest.raises(fp8cfg.NotFP8Error, match=r"fp8.min_coverage=0.9: 60\.6%"):
        trained(Net(), *words)
