"""A checkpoint of transformers there and back: read, trained 50 steps in FP8, exported in BF16 and in FP8, and loaded by transformers,
whose logits are ours, and whose FP8 weights are, dequantized, ours bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.models.hf_checkpoint import Layout, to_hf
from fp8cfg.models.lora import adapted_layers
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema import hugging_face
from fp8cfg.training import trained_model
from tests.support.hf_models import WORDS, loaded, logits, plain, saved

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "tie_word_embeddings": False}
FP8 = {
    "block": ["precision=bf16_fp8_block"],
    "tensor": [
        "precision=bf16_fp8_current",
        "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
    ],
}
"""The scales of an export, and words of a run that holds its weights under such."""
pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module", params=[(kind, fp8) for kind in ("llama", "qwen3") for fp8 in FP8], ids="-".join
)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, str]:
    """The folder that transformers wrote, the run that was trained from it, and the scales of its weights."""
    kind, fp8 = request.param
    folder = tmp_path_factory.mktemp(kind)
    run_of(folder, kind, fp8)
    return folder / "theirs", folder / "run", fp8


def run_of(folder: Path, kind: str, fp8: str, *more: str) -> None:
    """Train 50 steps from a model of transformers, which is left in folder/theirs, into folder/run."""
    saved(folder / "theirs", kind, **SHAPE)
    words = [w for w in WORDS if not w.startswith("precision=")]
    recipe = fp8cfg.compose(
        [
            "recipe=from_hf",
            f"model.path={folder / 'theirs'}",
            *words,
            *FP8[fp8],
            "fp8.params=true",
            *more,
            "trainer.max_steps=50",
            "optim.lr=1e-3",
            "optim.warmup_steps=5",
            "trainer.val_check_interval=0",
            "checkpoint.every_n_steps=50",
            "trainer.compile=off",
        ]
    )
    fp8cfg.fit(fp8cfg.build(recipe), folder=folder / "run")


def exported(run: Path, out: Path, *words: str) -> Any:
    """transformers' model of an export, in float32."""
    from fp8cfg.__main__ import main

    assert main(["export", "hf", str(run), str(out), *words]) == 0
    return loaded(out, torch.float32).float()


def test_there_and_back(trained: tuple[Path, Path, str], tmp_path: Path) -> None:
    theirs, run, fp8 = trained
    before, ours = loaded(theirs, torch.float32), plain(run)
    wide, narrow = exported(run, tmp_path / "bf16"), exported(run, tmp_path / "fp8", "--fp8", fp8)
    assert (logits(wide) - logits(before)).abs().max() > 0.1  # it was trained
    config, layout = found_of(run)
    weights = to_hf(ours.state_dict(), config, layout)  # dequantized in float32
    torch.testing.assert_close(logits(narrow), logits(ours), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(wide), logits(ours.bfloat16().float()), rtol=1e-4, atol=1e-4)
    names = [name for name, _ in narrow.named_parameters() if name.endswith("_proj.weight")]
    assert len(names) == 14
    for name in names:
        assert torch.equal(narrow.get_parameter(name), weights[name]), name
        assert torch.equal(wide.get_parameter(name), weights[name].bfloat16().float()), name


@pytest.mark.parametrize("fp8", FP8)
def test_adapters_there_and_back(fp8: str, tmp_path: Path) -> None:
    """LoRA over weights that are stored in FP8, merged: what transformers loads is the sum, in BF16, and in FP8 what we read of it."""
    run_of(tmp_path, "llama", fp8, "task=lora", "lora.rank=4")
    run, before = tmp_path / "run", loaded(tmp_path / "theirs", torch.float32)
    wide, narrow = (
        exported(run, tmp_path / "bf16", "--merge"),
        exported(run, tmp_path / "fp8", "--merge", "--fp8", fp8),
    )
    assert (logits(wide) - logits(before)).abs().max() > 0.1
    for theirs, folder in ((wide, "bf16"), (narrow, "fp8")):
        words = [w for w in WORDS if not w.startswith("precision=")]
        job = fp8cfg.build(
            fp8cfg.compose(
                ["recipe=from_hf", f"model.path={tmp_path / folder}", *words, "precision=fp32"]
            )
        )
        torch.testing.assert_close(logits(theirs), logits(job.model), rtol=1e-4, atol=1e-4)
        config, layout = found_of(run)
        for name, weight in to_hf(job.model.state_dict(), config, layout).items():
            assert torch.equal(theirs.get_parameter(name), weight), name
    found = trained_model.load(run, print)
    held = {
        name: weight.float()
        for name, weight in found.model.state_dict().items()
        if ".lora." not in name
    }
    for name, layer, adapter in adapted_layers(found.model):
        held[f"{name}.weight"] = layer.dequantized_weight(torch.float32)
        adapter.merge_into(held[f"{name}.weight"])
    for name, weight in to_hf(held, *found_of(run)).items():
        assert torch.equal(wide.get_parameter(name), weight.bfloat16().float()), name
        error = (narrow.get_parameter(name) - weight).abs().max()
        assert error <= weight.abs().max() / 16, (
            f"{name}: more than half a step of E4M3 at its largest"
        )


def found_of(run: Path) -> tuple[Any, Layout]:
    recipe = trained_model.load(run, print).recipe
    family = hugging_face.family_of_model(recipe.model)
    return transformer_config(recipe), Layout(
        family.names, family.conv1d, family.model.layernorm_zero_centered_gamma
    )
