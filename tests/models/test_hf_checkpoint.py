"""Local Hugging Face checkpoints: read whole and in shards, tied and in FP8; trained, exported, and loaded by transformers again."""

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

import fp8cfg  # noqa: E402
from fp8cfg.config.errors import ConfigError, PlainWarning  # noqa: E402
from fp8cfg.models.hf_checkpoint import Checkpoint, dequantized  # noqa: E402
from fp8cfg.recipes.from_hf import of_folder  # noqa: E402

SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 144, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 272, "max_position_embeddings": 64, "head_dim": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
WORDS = ["data=tiny", "precision=fp32", "model.seq_length=32", "trainer.global_batch_size=4", "trainer.micro_batch_size=4",
         "trainer.accelerator=cpu"]


def saved(folder: Path, kind: str = "qwen3", shards: str = "10GB", **said: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, "initializer_range": 0.1, **said})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.save_pretrained(folder, max_shard_size=shards)
    return model


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(272, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
    return getattr(found, "logits", found)


@pytest.mark.parametrize(("kind", "shards", "tied"), [("qwen3", "10GB", True), ("llama", "40KB", False), ("gemma2", "40KB", True)])
def test_from_hf_has_the_shape_and_the_weights(tmp_path: Path, kind: str, shards: str, tied: bool) -> None:
    theirs = saved(tmp_path, kind, shards, tie_word_embeddings=tied)
    assert ((tmp_path / "model.safetensors.index.json").exists()) == (shards == "40KB")
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])
    assert recipe.model.share_embeddings_and_output_weights is tied and recipe.model.weights == str(tmp_path)
    assert recipe.model == of_folder(str(tmp_path)).model.model_copy(update={"seq_length": 32})
    torch.testing.assert_close(logits(fp8cfg.build(recipe).model), logits(theirs), rtol=1e-5, atol=2e-5)


def test_a_recipe_from_a_folder_reads_back_equal(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path / 'theirs'}", *WORDS, "model.rotary_base=500"])
    file = tmp_path / "mine.yaml"
    file.write_text(fp8cfg.to_yaml(recipe))
    assert fp8cfg.from_yaml(file) == recipe
    file.write_text(f"recipe: from_hf\nmodel: {{path: {tmp_path / 'theirs'}, rotary_base: 500}}\n")
    assert fp8cfg.from_yaml(file).model == recipe.model.model_copy(update={"seq_length": 64})
    said = fp8cfg.explain(["recipe=from_hf", f"model.path={tmp_path / 'theirs'}"], "model.hidden_size")
    assert "config.json" in str(said) and "64" in str(said)


def test_weights_that_were_trained_otherwise_are_said(tmp_path: Path) -> None:
    saved(tmp_path)
    recipe = of_folder(str(tmp_path))
    recipe.model.rotary_base = 500.0
    with pytest.warns(PlainWarning, match=r"were trained otherwise: model.rotary_base=500.0 \(config.json: 10000.0\)"):
        fp8cfg.lower(recipe)
    recipe.model.hidden_size, recipe.model.rotary_base = 80, 10000.0
    with pytest.warns(UserWarning, match=r"model.hidden_size=80"), pytest.raises(ConfigError, match=r"model.weights=.*has shape"):
        fp8cfg.build(recipe)


@pytest.mark.parametrize(("words", "message"), [
    (["recipe=from_hf"], "recipe=from_hf: needs model.path"),
    (["recipe=llama_tiny", "model.path=here"], "model.path=here: gives a shape to recipe=from_hf alone; of other recipes write model.weights=here"),
    (["recipe=from_hf", "model.path=meta/llama"], "model.path=meta/llama: there is no meta/llama/config.json; of the hub write model.path=hf://meta/llama"),
])
def test_words_without_a_folder(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        fp8cfg.compose(words)


def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"model.weights=.*: has pickled weights.*from_pretrained\('.*'\).save_pretrained") as e:
        fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS]))
    line = str(e.value).partition('-c "')[2].rpartition('"')[0]
    exec(compile(line, "converted", "exec"), {})  # the line that the error gives
    assert logits(fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])).model).shape == (2, 32, 272)


@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_weights_are_read_as_transformers_dequantizes_them(tmp_path: Path, block: tuple[int, int] | None) -> None:
    from safetensors.torch import load_file, save_file

    saved(tmp_path, "llama", hidden_size=256, head_dim=64, intermediate_size=384, tie_word_embeddings=False)
    state = load_file(tmp_path / "model.safetensors")
    for name in [n for n in state if "_proj" in n]:
        weight = state[name]
        rows, columns = block or weight.shape
        scale = torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) * 0.01 + 0.001
        spread = scale.repeat_interleave(rows, 0)[:weight.shape[0]].repeat_interleave(columns, 1)[:, :weight.shape[1]]
        state[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale if block else scale.squeeze()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block and list(block)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ours = fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])).model
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_scales_of_blocks_at_the_edges() -> None:
    """transformers takes rows / scales for the size of a block, DeepSeek's and vLLM's readers the size that config.json says."""
    weight, scale = torch.ones(5, 3).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = dequantized(weight, scale, (4, 2))
    assert found.tolist() == [[1.0, 1.0, 2.0]] * 4 + [[3.0, 3.0, 4.0]]


def test_other_quantizations_and_scales_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quant_method=gptq: not read here; compressed-tensors and fp8 are"):
        Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"scales \[3, 1\] fit no weight of 4 x 4"):
        dequantized(torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(3, 1), (128, 128))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in shards."""
    folder = tmp_path_factory.mktemp("theirs")
    saved(folder, "llama", "40KB", tie_word_embeddings=False)
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": None}, "has no num_hidden_layers"), ({"num_hidden_layers": "2"}, "num_hidden_layers=2: expected a whole number"),
    ({"num_hidden_layers": -1}, "model.num_layers=-1: must be at least 1"), ({"head_dim": 1e308}, "model.kv_channels: a number of more digits"),
    ({"max_position_embeddings": [3]}, r"max_position_embeddings=\[3\]: expected a whole number"), ({"hidden_size": True}, "hidden_size=True: expected a whole"),
    ({"layer_types": 1}, "layer_types=1: expected a list"), ({"rope_parameters": "x"}, "rope_parameters=x: expected an object"),
    ({"rope_parameters": {"full_attention": 3}}, "rope_parameters: expected an object for each kind of layers"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, "rope_type=linear: has no factor"), ({"model_type": ["llama"]}, "no such family here"),
]


@pytest.mark.parametrize(("said", "line"), CONFIGS, ids=str)
def test_a_config_of_other_kinds_is_one_line(said: dict[str, Any], line: str, theirs: Path, tmp_path: Path) -> None:
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    with pytest.raises(ConfigError, match=f"^model.path=.*{line}[^\n]*$"):
        of_folder(str(tmp_path))


INDEXES: list[tuple[Any, str]] = [
    ([], "is no JSON object"), ({"weight_map": [1]}, "has no weight_map"), ({"weight_map": {Q: 3, "b": "x"}}, "'3' is no file of this folder"),
    ({"weight_map": {Q: "../x.safetensors"}}, "'../x.safetensors' is no file"), ({"weight_map": {Q: ""}}, "'' is no file"),
    ({"weight_map": {Q: "pipe"}}, r"pipe cannot be read \(is no file\)"), ({"weight_map": {Q: "a\0b"}}, "cannot be read"),
    ({"weight_map": {Q: "a" * 5000}}, "a{60} cannot be read"), ("[" * 100_000, "cannot be read"),
]


@pytest.mark.parametrize(("index", "line"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_of_somebody_else_is_one_line(index: Any, line: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(index if isinstance(index, str) else json.dumps(index))
    with pytest.raises(ValueError, match=line):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(("weight", "line"), [
    (torch.ones(4, 4, dtype=torch.int32), "int32 is no dtype of weights"), (torch.ones(4, 4, dtype=torch.bool), "bool is no dtype"),
    (torch.tensor([1.0, torch.nan]), "has values that are not finite"), (torch.tensor([torch.inf]).bfloat16(), "has values that are not finite"),
    (torch.ones(4).to(torch.float8_e4m3fn), "a weight of 1 dimension in FP8"), (torch.ones(4, 4).to(torch.float8_e5m2), "float8_e5m2 without scales"),
])
def test_what_is_no_weight_is_refused(weight: torch.Tensor, line: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({Q: weight, f"{Q}_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=line):
        Checkpoint(tmp_path).read(Q)


@pytest.mark.parametrize("said", [3, [1], {"quant_method": ["fp8"]}, *({"quant_method": "fp8", "weight_block_size": b} for b in (3, [128], [0, 0], ["a", 1], [1e400, 1]))],
                         ids=str)
def test_a_quantization_of_other_kinds_is_one_line(said: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({Q: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(ValueError, match=r"not read here|expected two whole numbers"):
        Checkpoint(tmp_path)


WIDE = ["recipe=qwen3_tiny", "data=tiny", "model.num_layers=2", "model.hidden_size=128", "model.ffn_hidden_size=256", "model.kv_channels=64",
        "model.seq_length=32", "trainer.global_batch_size=4", "trainer.micro_batch_size=4", "trainer.max_steps=2", "optim.warmup_steps=1",
        "trainer.val_check_interval=0", "checkpoint.every_n_steps=2", "trainer.compile=off", "trainer.accelerator=cpu"]


def trained(folder: Path, *words: str) -> Path:
    """A run folder."""
    from fp8cfg.__main__ import main

    base = [w for w in WIDE if not w.startswith(tuple(f"{word.partition('=')[0]}=" for word in words))]
    assert main([*base, *words, f"log.dir={folder}"]) == 0
    (run,) = folder.iterdir()
    return run


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that holds its weights in FP8 by blocks."""
    return trained(tmp_path_factory.mktemp("block"), "precision=bf16_fp8_block", "fp8.params=true")


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


def plain(run: Path) -> Any:
    """The run's model with plain weights, dequantized in float32."""
    from fp8cfg.training import run_model

    found = run_model.load(run, print)
    return fp8cfg.convert_back(found.model.float())


@pytest.mark.parametrize("words", [
    ["precision=bf16"], ["recipe=gpt3_tiny", "precision=bf16", "model.kv_channels=null"], ["recipe=gemma2_tiny", "precision=bf16"]], ids=["qwen3", "gpt2", "gemma2"])
def test_an_exported_run_has_equal_logits_in_transformers(tmp_path: Path, words: list[str]) -> None:
    from fp8cfg.__main__ import main

    run = trained(tmp_path / "runs", *words)
    assert main(["export", "hf", str(run), str(tmp_path / "out")]) == 0
    rounding = 1e-2 if "recipe=gpt3_tiny" in words else 1e-4  # weights around 0 are rounded again around 1
    torch.testing.assert_close(logits(loaded(tmp_path / "out", torch.float32)), logits(plain(run)), rtol=rounding, atol=rounding)
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path / 'out'}", *WORDS])
    torch.testing.assert_close(logits(fp8cfg.build(recipe).model), logits(plain(run)), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("fp8", ["block", "tensor"])
def test_fp8_weights_are_exported_bit_for_bit(tmp_path: Path, in_fp8: Path, fp8: str) -> None:
    """As transformers dequantizes them they are ours: blocks under powers of two; whole weights under the scale that they had."""
    from fp8cfg.__main__ import main

    run = in_fp8 if fp8 == "block" else trained(tmp_path / "runs", "precision=bf16_fp8_current", "fp8.params=true",
                                                "fp8={high_precision_at_start: 0, high_precision_at_end: 0}")
    assert main(["export", "hf", str(run), str(tmp_path / "out"), "--fp8", fp8]) == 0
    config = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert config["weight_block_size"] == ([128, 128] if fp8 == "block" else None) and config["modules_to_not_convert"] == ["lm_head"]
    stored = Checkpoint(tmp_path / "out")
    assert stored.where["model.layers.0.mlp.gate_proj.weight"].get_tensor("model.layers.0.mlp.gate_proj.weight").dtype == torch.float8_e4m3fn
    from fp8cfg.training import run_model

    ours = dict(run_model.load(run, print).model.named_modules())
    for number in (0, 1):
        wide = ours[f"layers.{number}.mlp.linear_fc1"].dequantized_weight(torch.float32)
        found = [stored.read(f"model.layers.{number}.mlp.{part}_proj.weight") for part in ("gate", "up")]
        assert torch.equal(torch.cat(found), wide)
    theirs = loaded(tmp_path / "out", torch.float32)
    torch.testing.assert_close(theirs.model.layers[0].mlp.gate_proj.weight.float(), found_gate(stored), rtol=0, atol=0)
    read = fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path / 'out'}", *WORDS])).model
    torch.testing.assert_close(logits(theirs.float()), logits(read), rtol=1e-4, atol=1e-4)


def found_gate(stored: Checkpoint) -> torch.Tensor:
    return stored.read("model.layers.0.mlp.gate_proj.weight")


def test_export_hf_says_what_is_wrong(tmp_path: Path, in_fp8: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8cfg.__main__ import main

    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for words, message in ((["hf"], "needs a run folder and a new folder"), (["hf", str(in_fp8), str(tmp_path / "full")], "exists already"),
                           (["hf", str(in_fp8), str(tmp_path / "new"), "--fp8", "row"], "--fp8 row: not an option"),
                           (["hf", str(tmp_path / "none"), str(tmp_path / "new")], "is not a run folder")):
        assert main(["export", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_an_export_is_whole_or_is_not_there(tmp_path: Path, in_fp8: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fp8cfg.__main__ import main
    from fp8cfg.models.safetensors_file import SafetensorsFile

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
    assert len(err) == 3 and err[2] == f"error: {tmp_path}/new: cannot be written (No space left on device)"
    assert sorted(os.listdir(tmp_path)) == ["dangling", "file"]
    (tmp_path / "empty").mkdir()
    assert main(["export", "hf", str(in_fp8), str(tmp_path / "empty")]) == 0
    assert sorted(os.listdir(tmp_path / "empty")) == ["config.json", "model.safetensors"] and len(os.listdir(tmp_path)) == 3


def test_shards_are_named_by_the_index(tmp_path: Path) -> None:
    from fp8cfg.models import TransformerConfig, hf, hf_export
    from fp8cfg.models.transformer import Transformer

    config = TransformerConfig(2, 64, 96, 4, 2, 16, 272, 32)
    model = Transformer(config)
    model.init_weights(0)
    state = model.state_dict()
    hf_export.write(tmp_path, config, {}, hf.Layout(hf.LLAMA), lambda name: (state[name], None), shard=40_000)
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    stored = Checkpoint(tmp_path)
    back = hf.from_hf({name: stored.read(name) for name in stored.shapes}, config)
    assert all(torch.equal(back[name], tensor.bfloat16()) for name, tensor in model.state_dict().items())
