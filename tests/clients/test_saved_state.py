"""Checkpoints as Accelerate and Fabric write them, of converted and built models: a new process's model goes on bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from lightning_fabric import Fabric
from safetensors.torch import load_file

from tests.clients.gpt import GPT, batch
from tests.clients.loops import model
from tests.clients.made import Made, Way, made

SAVED, MORE = 3, 3


class Session:
    """One process of a script: a model and an optimizer, its library's object, and how that saves and loads."""

    run: Made

    def steps(self, first: int, count: int) -> list[float]:
        losses = []
        for step in range(first, first + count):
            with self.run.context:
                loss = self.run.model(*batch(step))[1]
                self.backward(self.run.job.scaled(loss) if self.run.job else loss)
            self.run.clip()
            self.optimizer.step()
            self.run.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    backward: Callable[[Any], Any]
    optimizer: Any


class OfAccelerate(Session):
    """save_state and load_state; a conversion's FP8 state is registered beside what was prepared, a job's is its optimizer's."""

    def __init__(self, way: Way) -> None:
        self.run = made(way, model(tied=False))
        self.accelerator = Accelerator(mixed_precision="no", cpu=True)
        self.run.model, self.optimizer = self.accelerator.prepare(
            self.run.model, self.run.optimizer
        )
        if self.run.conversion:
            self.accelerator.register_for_checkpointing(self.run.conversion)
        self.backward = self.accelerator.backward

    def save(self, folder: Path) -> None:
        self.accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        self.accelerator.load_state(str(folder))

    @staticmethod
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        return load_file(folder / "model.safetensors")


class OfFabric(Session):
    """save and load, of objects that have a state_dict."""

    def __init__(self, way: Way) -> None:
        self.run, self.fabric = made(way, model(tied=False)), Fabric(accelerator="cpu", devices=1)
        if self.run.job:
            self.optimizer = self.fabric.setup_optimizers(self.run.optimizer)
        else:
            self.run.model, self.optimizer = self.fabric.setup(self.run.model, self.run.optimizer)
        self.state = {"model": self.run.model, "optimizer": self.optimizer, "step": SAVED}
        if self.run.conversion:
            self.state["fp8"] = self.run.conversion
        self.backward = self.fabric.backward

    def save(self, folder: Path) -> None:
        self.fabric.save(folder / "saved.ckpt", self.state)

    def load(self, folder: Path) -> None:
        self.fabric.load(folder / "saved.ckpt", self.state)
        assert self.state["step"] == SAVED

    @staticmethod
    def weights(folder: Path) -> dict[str, torch.Tensor]:
        weights: dict[str, torch.Tensor] = torch.load(folder / "saved.ckpt", weights_only=True)[
            "model"
        ]
        return weights


@pytest.mark.parametrize("way", ["converted", "built"])
@pytest.mark.parametrize("library", [OfAccelerate, OfFabric])
def test_a_saved_state_goes_on_bit_for_bit(library: Any, way: Way, tmp_path: Path) -> None:
    first = library(way)
    first.steps(0, SAVED)
    first.save(tmp_path)
    want = first.steps(SAVED, MORE)
    again = library(way)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # that scales start anew
        again.load(tmp_path)
        assert again.steps(SAVED, MORE) == want
    plain: GPT = model(tied=False)
    plain.load_state_dict(library.weights(tmp_path), strict=True)
    assert plain(*batch(SAVED))[1].item() == pytest.approx(want[0], abs=0.02)
