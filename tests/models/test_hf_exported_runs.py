"""Runs exported as Hugging Face checkpoints, plain and in FP8, which transformers loads again."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import fp8cfg
from fp8cfg.models.hf_checkpoint import Checkpoint
from tests.support.hf_models import WORDS, loaded, logits, plain, trained


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds its weights in FP8 by blocks."""
    return trained(tmp_path_factory.mktemp("block"), "precision=bf16_fp8_block", "fp8.params=true")


@pytest.mark.parametrize(
    "words",
    [
        ["precision=bf16"],
        ["recipe=gpt3_tiny", "precision=bf16", "model.kv_channels=null"],
        ["recipe=gemma2_tiny", "precision=bf16"],
    ],
    ids=["qwen3", "gpt2", "gemma2"],
)
def test_an_exported_run_has_equal_logits_in_transformers(tmp_path: Path, words: list[str]) -> None:
    from fp8cfg.__main__ import main

    run = trained(tmp_path / "runs", *words)
    assert main(["export", "hf", str(run), str(tmp_path / "out")]) == 0
    rounding = (
        1e-2 if "recipe=gpt3_tiny" in words else 1e-4
    )  # weights around 0 are rounded again around 1
    torch.testing.assert_close(
        logits(loaded(tmp_path / "out", torch.float32)),
        logits(plain(run)),
        rtol=rounding,
        atol=rounding,
    )
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path / 'out'}", *WORDS])
    torch.testing.assert_close(
        logits(fp8cfg.build(recipe).model), logits(plain(run)), rtol=rounding, atol=rounding
    )


@pytest.mark.parametrize("fp8", ["block", "tensor"])
def test_fp8_weights_are_exported_bit_for_bit(tmp_path: Path, in_fp8: Path, fp8: str) -> None:
    """As transformers dequantizes them they are ours: blocks under powers of two; whole weights under the scale that they had."""
    from fp8cfg.__main__ import main

    run = (
        in_fp8
        if fp8 == "block"
        else trained(
            tmp_path / "runs",
            "precision=bf16_fp8_current",
            "fp8.params=true",
            "fp8={high_precision_at_start: 0, high_precision_at_end: 0}",
        )
    )
    assert main(["export", "hf", str(run), str(tmp_path / "out"), "--fp8", fp8]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == ([128, 128] if fp8 == "block" else None) and config[
        "modules_to_not_convert"
    ] == ["lm_head"]
    stored = Checkpoint(tmp_path / "out")
    assert (
        stored.files["model.layers.0.mlp.gate_proj.weight"]
        .get_tensor("model.layers.0.mlp.gate_proj.weight")
        .dtype
        == torch.float8_e4m3fn
    )
    from fp8cfg.training import trained_model

    ours = dict(trained_model.load(run, print).model.named_modules())
    for number in (0, 1):
        wide = ours[f"layers.{number}.mlp.linear_fc1"].dequantized_weight(torch.float32)
        found = [
            stored.read(f"model.layers.{number}.mlp.{part}_proj.weight") for part in ("gate", "up")
        ]
        assert torch.equal(torch.cat(found), wide)
    theirs = loaded(tmp_path / "out", torch.float32)
    torch.testing.assert_close(
        theirs.model.layers[0].mlp.gate_proj.weight.float(), found_gate(stored), rtol=0, atol=0
    )
    read = fp8cfg.build(
        fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path / 'out'}", *WORDS])
    ).model
    torch.testing.assert_close(logits(theirs.float()), logits(read), rtol=1e-4, atol=1e-4)


def found_gate(stored: Checkpoint) -> torch.Tensor:
    return stored.read("model.layers.0.mlp.gate_proj.weight")


def test_export_hf_says_what_is_wrong(
    tmp_path: Path, in_fp8: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp8cfg.__main__ import main

    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for words, message in (
        (["hf"], "needs a run folder and a new folder"),
        (["hf", str(in_fp8), str(tmp_path / "full")], "exists already"),
        (["hf", str(in_fp8), str(tmp_path / "new"), "--fp8", "row"], "--fp8 row: not an option"),
        (["hf", str(tmp_path / "none"), str(tmp_path / "new")], "run folder not found"),
    ):
        assert main(["export", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_export_is_whole_or_is_not_there(
    tmp_path: Path,
    in_fp8: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fp8cfg.__main__ import main
    from fp8cfg.models.hf_export import SafetensorsFile

    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "elsewhere")
    assert main(["export", "hf", str(in_fp8), str(tmp_path / "dangling")]) == 2
    assert main(["export", "hf", str(in_fp8), str(tmp_path / "file" / "new")]) in (2, 5)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsFile, "write", full)
        assert main(["export", "hf", str(in_fp8), str(tmp_path / "new")]) == 5
    err = capsys.readouterr().err.splitlines()
    assert (
        len(err) == 3
        and err[2] == f"error: {tmp_path}/new: cannot be written (No space left on device)"
    )
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]
    (tmp_path / "empty").mkdir()
    assert main(["export", "hf", str(in_fp8), str(tmp_path / "empty")]) == 0
    assert (
        sorted(os.listdir(tmp_path / "empty")) == ["config.json", "model.safetensors"]
        and len(os.listdir(tmp_path)) == 3
    )


def test_shards_are_named_by_the_index(tmp_path: Path) -> None:
    from fp8cfg.models import TransformerConfig, hf_checkpoint, hf_export
    from fp8cfg.models.transformer import Transformer

    config = TransformerConfig(2, 64, 96, 4, 2, 16, 272, 32)
    model = Transformer(config)
    model.init_weights(0)
    state = model.state_dict()
    hf_export.write_model(
        tmp_path,
        config,
        {},
        hf_checkpoint.Layout(hf_checkpoint.LLAMA),
        lambda name: (state[name], None),
        max_file_bytes=40_000,
    )
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    stored = Checkpoint(tmp_path)
    back = hf_checkpoint.from_hf({name: stored.read(name) for name in stored.shapes}, config)
    assert all(
        torch.equal(back[name], tensor.bfloat16()) for name, tensor in model.state_dict().items()
    )


@pytest.fixture(scope="module")
def in_fp32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in float32."""
    return trained(tmp_path_factory.mktemp("wide"), "precision=fp32")


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ([], torch.float32),
        (["--dtype", "bf16"], torch.bfloat16),
        (["--dtype", "fp16"], torch.float16),
    ],
)
def test_the_dtype_is_that_of_the_run_or_chosen(
    options: list[str],
    dtype: torch.dtype,
    in_fp32: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from fp8cfg.__main__ import main

    out = tmp_path / "out"
    assert main(["export", "hf", str(in_fp32), str(out), *options]) == 0
    name = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}[dtype]
    assert f", {name}, the weights of step" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    stored = Checkpoint(out)
    ours = dict(plain(in_fp32).named_parameters())["layers.0.mlp.linear_fc2.weight"]
    theirs = stored.files["model.layers.0.mlp.down_proj.weight"].get_tensor(
        "model.layers.0.mlp.down_proj.weight"
    )
    assert torch.equal(theirs, ours.to(dtype))


def test_a_weight_too_large_for_fp16_is_refused() -> None:
    from fp8cfg.models import hf_export
    from fp8cfg.models.config import TransformerConfig

    class Layout:
        def split(self, name: str, weight: torch.Tensor, *_: Any) -> list[torch.Tensor]:
            return [weight]

    config = TransformerConfig.__new__(TransformerConfig)
    wide = torch.tensor([1.0, 70_000.0])
    with pytest.raises(hf_export.WeightOverflow, match="values beyond 65504"):
        list(
            hf_export._stored_tensors(
                "norm.weight",
                ["norm.weight"],
                config,
                Layout(),
                lambda _: (wide, None),
                None,
                torch.float16,
            )
        )


def test_other_dtypes_are_answered(in_fp32: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8cfg.__main__ import main

    assert main(["export", "hf", str(in_fp32), "out", "--dtype", "half"]) == 2
    assert "--dtype half: not a dtype; choose from bf16, fp16, fp32" in capsys.readouterr().err
    assert main(["export", "recipe=llama_tiny", "--dtype", "bf16"]) == 2
    assert (
        "--dtype: has no effect on export of a recipe, it is for export hf"
        in capsys.readouterr().err
    )
