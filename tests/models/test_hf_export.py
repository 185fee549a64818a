"""Exports of a run, weight by weight: the bytes of those of a model that is built, loaded, and written by safetensors' own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.building.first_weights import hf_layout
from fp8cfg.models import hf_checkpoint, hf_export
from fp8cfg.models.lora import adapted_layers
from fp8cfg.models.transformer import Transformer
from fp8cfg.planning.layer_plan import transformer_config
from fp8cfg.schema import hugging_face
from fp8cfg.training import trained_model
from fp8cfg.training.trained_model import RunWeights
from tests.support.hf_models import WIDE, trained
from tests.support.ranks import launch

ALL = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
LORA = ("task=lora", "lora.rank=4", "lora.targets=[q_proj,up_proj,o_proj]")
RUNS = {
    "bf16": ["precision=bf16"],
    "norms around 0": ["recipe=gemma2_tiny", "precision=bf16"],
    "GPT-2": ["recipe=gpt3_tiny", "precision=bf16", "model.kv_channels=null"],
    "fp16": ["precision=fp16_mixed", "precision.initial_loss_scale=64"],
    "delayed": ["precision=bf16_fp8", "fp8.params=true"],
    "block": ["precision=bf16_fp8_block", "fp8.params=true", ALL],
    "MX": ["precision=bf16_mxfp8", "fp8.params=true"],
    "NVFP4": ["precision=bf16_nvfp4", "fp8.params=true"],
    "O2": ["precision=bf16_fp8_current", "opt_level=O2", "backend=native"],
    "O3": ["precision=bf16_fp8_current", "opt_level=O3", "backend=native"],
    "fp8_pow2": ["precision=bf16", "storage.weight=fp8_pow2"],
    "untied": ["precision=fp32", "model.share_embeddings_and_output_weights=false"],
    "adapters": ["precision=bf16", *LORA],
    "adapters over FP8": ["precision=bf16_fp8", "fp8.params=true", "fp8.margin=1", *LORA],
    "adapters over O2": ["precision=bf16", "storage.weight=fp16_scaled", *LORA],
    "fsdp": ["precision=bf16_fp8", "fp8.params=true", "storage.shard=fsdp"],
    "fsdp of fp16": [
        "precision=fp16_mixed",
        "precision.initial_loss_scale=64",
        "storage.shard=fsdp",
    ],
}
LAYOUTS = {
    "fsdp": (2, ["precision=bf16_fp8_block", "fp8.params=true", "storage.shard=fsdp"]),
    "zero1": (2, ["precision=bf16_fp8_current", "fp8.params=true", "storage.shard=zero1"]),
    "TP2 x PP2": (
        4,
        [
            "precision=bf16_fp8",
            "fp8.params=true",
            "trainer.devices=4",
            "trainer.strategy.tensor_model_parallel_size=2",
            "trainer.strategy.pipeline_model_parallel_size=2",
        ],
    ),
}


def whole(run: Path) -> dict[str, Tensor]:
    """The weights of the run's model, by their names, in bfloat16."""
    found = trained_model.load(run, print)
    held = {name: t for name, t in found.model.state_dict().items() if ".lora." not in name}
    for name, layer, adapter in adapted_layers(found.model):
        weight: Any = (
            layer.dequantized_weight(torch.float32)
            if hasattr(layer, "dequantized_weight")
            else layer.weight.detach().float().clone()
        )
        adapter.merge_into(weight)
        held[f"{name}.weight"] = weight
    theirs = hf_checkpoint.to_hf(
        held,
        transformer_config(found.recipe),
        hf_layout(hugging_face.family_of_model(found.recipe.model)),
    )
    return {name: t.bfloat16().contiguous() for name, t in theirs.items()}


def exported(run: Path, folder: Path, *words: str) -> Path:
    """The file of weights of an export."""
    assert (
        main(
            [
                "export",
                "hf",
                str(run),
                str(folder),
                *words,
                *(["--merge"] if "adapters" in run.parent.name else []),
            ]
        )
        == 0
    )
    return folder / "model.safetensors"


def same_bytes(file: Path, want: dict[str, Tensor], scratch: Path) -> bool:
    """Whether `file` is what safetensors writes of `want`."""
    save_file(want, scratch, {"format": "pt"})
    return file.read_bytes() == scratch.read_bytes()


@pytest.mark.parametrize("name", RUNS)
def test_an_export_has_the_bytes_of_a_model_that_is_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(tmp_path / name, *RUNS[name])
    want = whole(run)
    with monkeypatch.context() as patch:
        patch.setattr(Transformer, "__init__", None)  # none is built
        file = exported(run, tmp_path / "out", "--dtype", "bf16")
    assert same_bytes(file, want, tmp_path / "want")


@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_on_ranks_are_exported_as_those_on_one(name: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[name]
    base = [
        w
        for w in WIDE
        if not w.startswith(("trainer.micro_batch_size", "trainer.global_batch_size"))
    ]
    done = launch(
        ranks,
        *base,
        *words,
        "trainer.micro_batch_size=2",
        "trainer.global_batch_size=8",
        f"log.folder={tmp_path / 'ranks' / 'run'}",
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert list((tmp_path / "ranks/run/checkpoints").glob("*/model/rank-00001*")), "by boxes"
    assert same_bytes(
        exported(tmp_path / "ranks/run", tmp_path / "out"),
        whole(tmp_path / "ranks/run"),
        tmp_path / "want",
    )


@pytest.mark.parametrize(
    "words",
    [["precision=bf16"], ["backend=torchao", "precision=bf16_fp8_current", ALL]],
    ids=["native", "torchao"],
)
def test_weights_in_a_codec_get_a_scale_of_their_own(words: list[str], tmp_path: Path) -> None:
    """That of fp16_scaled brings a weight to the largest number of fp16, 65504, and E4M3 ends at 448."""
    run = trained(tmp_path / "runs", *words, "storage.weight=fp16_scaled")
    wide = load_file(exported(run, tmp_path / "bf16"))
    narrow = load_file(exported(run, tmp_path / "fp8", "--fp8", "tensor"))
    name = "model.layers.0.mlp.down_proj.weight"
    assert narrow[name].dtype == torch.float8_e4m3fn
    torch.testing.assert_close(
        narrow[name].float() * narrow[f"{name}_scale_inv"],
        wide[name].float(),
        rtol=1 / 16,
        atol=1e-4,
    )


@pytest.mark.parametrize("fp8", [None, "block", "tensor"])
def test_files_are_safetensors_own(fp8: str | None, tmp_path: Path) -> None:
    """Dtypes and names in its order, in each of several files."""
    from fp8cfg.models import TransformerConfig

    config, linears = (
        TransformerConfig(2, 64, 96, 4, 2, 16, 272, 32),
        {f"layers.{n}.mlp.linear_{fc}" for n in (0, 1) for fc in ("fc1", "fc2")},
    )
    model = Transformer(config)
    model.init_weights(0)
    state = model.state_dict()
    hf_export.write_model(
        tmp_path,
        config,
        {},
        hf_checkpoint.Layout(hf_checkpoint.LLAMA),
        lambda name: (state[name], None),
        fp8,
        linears,
        max_file_bytes=40_000,
    )
    files = list(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    for file in files:
        assert same_bytes(file, load_file(file), tmp_path / "again")


def test_tiny_weights_do_not_become_nan() -> None:
    """Below about 1e-42 the scale of a block would be 0."""
    weight = torch.zeros(128, 256)
    weight[0, 0] = 1e-43
    for data, scale in (
        hf_export._quantize_blocks(weight),
        hf_export._quantize_tensor(weight, None),
    ):
        assert not data.float().any() and (scale > 0).all()


def test_a_layer_that_the_runs_backend_had_not_in_fp8_is_written_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under backend=auto, which says nothing of who multiplied: native would have had the layer in FP8."""
    out, newest = "layers.0.mlp.linear_fc2", trained_model.open_newest_checkpoint

    def of_another(*given: Any) -> Any:
        tensors, state = newest(*given)
        state["recipe"]["trainer"]["plugins"]["fp8"]["exclude"] = []
        return tensors, state

    run = trained(tmp_path / "runs", "precision=bf16_fp8", f"fp8.exclude=[{out}]")
    held = RunWeights(run, print).read(f"{out}.weight")[0]
    monkeypatch.setattr(trained_model, "open_newest_checkpoint", of_another)
    weights = RunWeights(run, print)
    assert {p.name: p.fp8 for p in weights.plan}[out] and torch.equal(
        weights.read(f"{out}.weight")[0], held
    )


def test_a_run_of_a_model_of_ones_own_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = torch.nn.Sequential(torch.nn.Embedding(272, 64), torch.nn.Linear(64, 272))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = own

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(
                self.net(tokens).flatten(0, 1), targets.flatten()
            )

    fp8cfg.fit(
        fp8cfg.build(fp8cfg.compose([*WIDE, "precision=fp32"]), Model()), folder=tmp_path / "run"
    )
    capsys.readouterr()
    assert main(["export", "hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 2
    assert (
        "do not belong to its recipe's Transformer" in (said := capsys.readouterr().err)
        and said.count("\n") == 1
    )
    assert not (tmp_path / "out").exists()


def test_weights_are_read_as_the_step_says(tmp_path: Path) -> None:
    run = trained(tmp_path / "runs", "precision=bf16", "checkpoint.every_n_steps=1")
    found = RunWeights(run, print)
    assert found.step == 2 and torch.equal(
        found.read("embedding.weight")[0], trained_model.load(run, print).model.embedding.weight
    )
