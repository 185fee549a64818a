"""Adapters against PEFT's: the same base, A and B give its logits and gradients; what is written PEFT and transformers load."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.models import (
    hf_checkpoint,
    lora,
)
from fp8cfg.models.config import projections
from fp8cfg.models.lora import adapted_layers
from fp8cfg.schema import hugging_face
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import trained_model
from tests.support.hf_models import WORDS, logits, saved
from tests.support.peft_library import peft as library

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)  # peft 0.21 asks transformers 5 for it
LORA = [
    "task=lora",
    "lora.rank=4",
    "lora.alpha=12",
    "optim.lr=0.02",
    "trainer.max_steps=4",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=1",
    "optim.warmup_steps=1",
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora") / "base"
    saved(folder, "llama")
    return folder


@pytest.fixture(scope="module", params=["fp32", "bf16_fp8"])
def run(request: pytest.FixtureRequest, base: Path) -> Path:
    """A run folder with adapters over that base, float32 or held in FP8."""
    folder = base.parent / request.param
    recipe = fp8cfg.compose(
        [
            "recipe=from_hf",
            f"model.path={base}",
            *WORDS,
            *LORA,
            f"precision={request.param}",
            f"log.dir={base.parent}",
        ]
    )
    fp8cfg.fit(fp8cfg.build(recipe), folder)
    return folder


def with_numbers(base: Path, *words: str) -> fp8cfg.Job:
    """A job whose adapters add something."""
    job = fp8cfg.build(
        fp8cfg.compose(["recipe=from_hf", f"model.path={base}", *WORDS, *LORA, *words])
    )
    random = torch.Generator().manual_seed(3)
    for _, _, adapter in adapted_layers(job.model):
        for low in adapter.values():
            low.lora_B.data.normal_(0, 0.1, generator=random)
    return job


def written(job: fp8cfg.Job, folder: Path, base: Path) -> Path:
    folder.mkdir()
    node = job.recipe.lora
    adapters = {name: adapter for name, _, adapter in adapted_layers(job.model)}
    lora.write_peft(
        folder,
        adapters,
        projections(job.model.config),
        hugging_face.family_of_model(job.recipe.model).names,
        node.rank,
        node.alpha,
        node.dropout,
        str(base),
    )
    return folder


@pytest.mark.parametrize(
    "targets", [[], ["lora.targets=[q_proj,layers.1.*.up_proj]"]], ids=["all", "some"]
)
def test_logits_and_gradients_are_pefts(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, targets: list[str]
) -> None:
    theirs, job = library(monkeypatch), with_numbers(base, *targets)
    folder = written(job, tmp_path / "adapters", base)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    before = logits(plain)
    model = theirs.PeftModel.from_pretrained(plain, folder, is_trainable=True)
    torch.testing.assert_close(logits(job.model), logits(model.eval()), rtol=1e-5, atol=2e-5)
    assert (logits(model) - before).abs().max() > 0.05
    tokens, targets_ = torch.randint(272, (2, 2, 32), generator=torch.Generator().manual_seed(5))
    torch.nn.functional.cross_entropy(
        model(tokens).logits.flatten(0, 1), targets_.flatten()
    ).backward()
    job.model(tokens, targets_).backward()
    want = {
        name.replace(".default", ""): p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    names = hugging_face.family_of_model(job.recipe.model).names
    found = {
        f"base_model.model.{lora.hf_module(lora.Projection(at, name, 0, 0), names)}.{part}.weight": p.grad
        for at, _, adapter in adapted_layers(job.model)
        for name, low in adapter.items()
        for part, p in low.named_parameters()
    }
    assert found.keys() == want.keys() and found
    for name, gradient in want.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_first_weights_are_drawn_as_pefts(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, job = (
        library(monkeypatch),
        fp8cfg.build(
            fp8cfg.compose(["recipe=from_hf", f"model.path={base}", *WORDS, *LORA, "lora.rank=64"])
        ),
    )
    model = theirs.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(base),
        theirs.LoraConfig(r=64, lora_alpha=12, target_modules=["down_proj"]),
    )
    want = model.base_model.model.model.layers[0].mlp.down_proj.lora_A.default.weight
    low = job.model.layers[0].mlp.linear_fc2.lora["down_proj"]
    assert low.lora_A.abs().max().item() == pytest.approx(
        want.abs().max().item(), rel=0.01
    ) and low.lora_A.std().item() == pytest.approx(want.std().item(), rel=0.05)
    assert not low.lora_B.any() and low.scaling == 12 / 64


def test_what_is_exported_peft_loads_with_equal_logits(
    run: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["export", "peft", str(run), str(tmp_path / "out")]) == 0
    found = trained_model.load(run, print)
    tensors = load_file(tmp_path / "out" / "adapter_model.safetensors")
    low = found.model.layers[1].self_attention.linear_qkv.lora["k_proj"]
    assert torch.equal(
        tensors["base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"],
        low.lora_B.detach().float(),
    )
    said = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert said["target_modules"] == [
        "down_proj",
        "gate_proj",
        "k_proj",
        "o_proj",
        "q_proj",
        "up_proj",
        "v_proj",
    ] and said["base_model_name_or_path"] == str(base)
    theirs = library(monkeypatch)
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    held = {name: t.float() for name, t in found.model.state_dict().items() if ".lora." not in name}
    plain.load_state_dict(
        hf_checkpoint.to_hf(held, found.model.config)
    )  # what this run holds in FP8, dequantized
    model = theirs.PeftModel.from_pretrained(plain, tmp_path / "out")
    ours, want = logits(found.model).float(), logits(model.eval())
    assert (ours - want).norm() < (1e-5 if run.name == "fp32" else 0.02) * want.norm(), (
        "bf16 against float32 arithmetic"
    )


@pytest.mark.parametrize("form", [[], ["--fp8", "block"]], ids=["bf16", "fp8"])
def test_merged_weights_are_base_and_adapters_together(
    run: Path, tmp_path: Path, form: list[str]
) -> None:
    assert main(["export", "hf", str(run), str(tmp_path / "out"), "--merge", *form]) == 0
    found = trained_model.load(run, print)
    with torch.no_grad():
        for name, layer, adapter in adapted_layers(found.model):
            wide = (
                layer.dequantized_weight(torch.float32)
                if hasattr(layer, "dequantized_weight")
                else layer.weight
            )
            parts = hf_checkpoint.Layout(hf_checkpoint.LLAMA).split(
                f"{name}.weight", wide.clone(), found.model.config, len(adapter.projections)
            )
            for (projection, low), part in zip(adapter.items(), parts, strict=True):
                want = part + 3.0 * (low.lora_B.float() @ low.lora_A.float())
                theirs = f"{lora.hf_module(lora.Projection(name, projection, 0, 0), hugging_face.family_of_model(found.recipe.model).names)}.weight"
                have = load_file(tmp_path / "out" / "model.safetensors")[theirs]
                if not form:
                    want = want.to(have.dtype)
                    # A sum halfway between two values may be rounded to either.
                    assert (have == want).float().mean() > 0.999, theirs
                    torch.testing.assert_close(have.float(), want.float(), rtol=2**-8, atol=0)
                else:
                    assert have.dtype == torch.float8_e4m3fn
    if not form:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "out", attn_implementation="eager", dtype=torch.float32
        )
        ours, theirs_ = logits(found.model).float(), logits(model)
        assert (ours - theirs_).norm() < 0.03 * theirs_.norm(), "both in bf16"


def test_adapters_are_read_back_and_odd_ones_refused(base: Path, tmp_path: Path) -> None:
    job = with_numbers(base)
    folder = written(job, tmp_path / "adapters", base)
    words = ["recipe=from_hf", f"model.path={base}", *WORDS, *LORA, f"lora.weights={folder}"]
    again = fp8cfg.build(fp8cfg.compose(words))
    assert torch.equal(logits(again.model), logits(job.model))
    for more, line in (
        (["lora.rank=2"], "adapter_config.json has r=4; set lora.rank=4"),
        (["lora.alpha=2"], "has lora_alpha=12.0; set lora.alpha=12.0"),
        (["lora.targets=[q_proj]"], "matrices belong to layers without adapters in this run"),
        (["lora.targets=[linear_qkv,lm_head]"], "matrices are missing"),
    ):
        with pytest.raises(ConfigError, match=line):
            fp8cfg.build(fp8cfg.compose([*words, *more]))
    said = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**said, "use_dora": True}))
    with pytest.raises(
        ConfigError,
        match=r"lora.weights=.*use_dora=True is not supported; only plain LoRA can be read",
    ):
        fp8cfg.build(fp8cfg.compose(words))


def test_a_resumed_run_wants_the_same_base(
    run: Path, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if run.name == "fp32":
        pytest.skip("one run is enough")
    state = json.loads((max((run / "checkpoints").glob("step-*")) / "state.json").read_text())
    assert state["base"]["weights"] == str(base) and len(state["base"]["sha256"]) == 64
    saved(tmp_path / "other", "llama", initializer_range=0.2)
    assert (
        main(["resume", str(run), f"model.weights={tmp_path / 'other'}", "trainer.max_steps=6"])
        == 2
    )
    assert (
        f"model.weights={tmp_path / 'other'}: the adapters of this run were trained on {base} (sha256"
        in capsys.readouterr().err
    )
    assert main(["resume", str(run), "trainer.max_steps=5"]) == 0


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["export", "hf", "{run}", "{out}"],
            "it trained only adapters, its other weights are the base model's; write --merge to add them to these",
        ),
        (["export", "peft", "{run}"], "export peft: needs a run folder and a new folder"),
        (
            ["export", "recipe=llama_tiny", "--merge"],
            "--merge: has no effect on export of a recipe, it is for export hf",
        ),
    ],
)
def test_exports_that_are_refused(
    run: Path, tmp_path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if run.name == "bf16_fp8":
        pytest.skip("one run is enough")
    assert main([word.format(run=run, out=tmp_path / "out") for word in words]) == 2
    assert line in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_gpt2_has_no_projections_for_peft() -> None:
    with pytest.raises(
        ValueError,
        match=r"layers\.0\.self_attention\.q_proj: transformers' models of this family have no separate layer for it",
    ):
        lora.hf_module(projections(with_gpt().config)[0], hugging_face.FAMILIES["gpt2"].names)


def with_gpt() -> Any:
    return fp8cfg.build(
        fp8cfg.compose(["recipe=gpt3_tiny", "model.num_layers=1", "data=tiny"])
    ).model
