"""Local Hugging Face checkpoints: read whole and in shards, tied and in FP8; what in one is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

import fp8cfg
from fp8cfg.models.hf_checkpoint import (
    Checkpoint,
    dequantize,
)
from fp8cfg.recipes.from_hf import of_folder
from fp8cfg.schema.errors import (
    ConfigError,
    PlainWarning,
)
from tests.support.hf_models import WORDS, logits, saved


@pytest.mark.parametrize(
    ("kind", "shards", "tied"),
    [("qwen3", "10GB", True), ("llama", "40KB", False), ("gemma2", "40KB", True)],
)
def test_from_hf_has_the_shape_and_the_weights(
    tmp_path: Path, kind: str, shards: str, tied: bool
) -> None:
    theirs = saved(tmp_path, kind, shards, tie_word_embeddings=tied)
    assert ((tmp_path / "model.safetensors.index.json").exists()) == (shards == "40KB")
    recipe = fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])
    assert recipe.model.share_embeddings_and_output_weights is tied and recipe.model.weights == str(
        tmp_path
    )
    assert recipe.model == of_folder(str(tmp_path)).model.model_copy(update={"seq_length": 32})
    torch.testing.assert_close(
        logits(fp8cfg.build(recipe).model), logits(theirs), rtol=1e-5, atol=2e-5
    )


def test_a_recipe_from_a_folder_reads_back_equal(tmp_path: Path) -> None:
    saved(tmp_path / "theirs")
    recipe = fp8cfg.compose(
        ["recipe=from_hf", f"model.path={tmp_path / 'theirs'}", *WORDS, "model.rotary_base=500"]
    )
    file = tmp_path / "mine.yaml"
    file.write_text(fp8cfg.to_yaml(recipe))
    assert fp8cfg.from_yaml(file) == recipe
    file.write_text(f"recipe: from_hf\nmodel: {{path: {tmp_path / 'theirs'}, rotary_base: 500}}\n")
    assert fp8cfg.from_yaml(file).model == recipe.model.model_copy(update={"seq_length": 64})
    said = fp8cfg.explain(
        ["recipe=from_hf", f"model.path={tmp_path / 'theirs'}"], "model.hidden_size"
    )
    assert "config.json" in str(said) and "64" in str(said)


def test_weights_that_were_trained_otherwise_are_said(tmp_path: Path) -> None:
    saved(tmp_path)
    recipe = of_folder(str(tmp_path))
    recipe.model.rotary_base = 500.0
    with pytest.warns(
        PlainWarning,
        match=r"trained with other settings: model.rotary_base=500.0 \(config.json: 10000.0\)",
    ):
        fp8cfg.lower(recipe)
    recipe.model.hidden_size, recipe.model.rotary_base = 80, 10000.0
    with (
        pytest.warns(UserWarning, match=r"model.hidden_size=80"),
        pytest.raises(ConfigError, match=r"model.weights=.*has shape"),
    ):
        fp8cfg.build(recipe)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recipe=from_hf"], "recipe=from_hf: needs model.path"),
        (
            ["recipe=llama_tiny", "model.path=here"],
            "model.path=here: only recipe=from_hf takes the model's shape from a folder; set recipe=from_hf, or model.weights=here",
        ),
        (
            ["recipe=from_hf", "model.path=meta/llama"],
            "model.path=meta/llama: meta/llama/config.json not found; for a hub id write model.path=hf://meta/llama",
        ),
    ],
)
def test_words_without_a_folder(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        fp8cfg.compose(words)


def test_a_folder_without_weights_is_refused_with_what_to_do(tmp_path: Path) -> None:
    saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    words = ["recipe=from_hf", f"model.path={tmp_path}", *WORDS]
    with pytest.raises(ConfigError, match=r"; copy the weights there, or set model\.weights=null"):
        fp8cfg.build(fp8cfg.compose(words))
    fp8cfg.build(fp8cfg.compose([*words, "model.weights=null"]))


def test_pickled_weights_are_refused_with_the_line_that_converts_them(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigError,
        match=r"model.weights=.*: has pickled weights.*from_pretrained\('.*'\).save_pretrained",
    ) as e:
        fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS]))
    line = str(e.value).partition('-c "')[2].rpartition('"')[0]
    exec(compile(line, "converted", "exec"), {})  # the line that the error gives
    assert logits(
        fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])).model
    ).shape == (2, 32, 272)


@pytest.mark.parametrize("block", [(128, 128), None])
def test_fp8_weights_are_read_as_transformers_dequantizes_them(
    tmp_path: Path, block: tuple[int, int] | None
) -> None:
    from safetensors.torch import load_file, save_file

    saved(
        tmp_path,
        "llama",
        hidden_size=256,
        head_dim=64,
        intermediate_size=384,
        tie_word_embeddings=False,
    )
    state = load_file(tmp_path / "model.safetensors")
    for name in [n for n in state if "_proj" in n]:
        weight = state[name]
        rows, columns = block or weight.shape
        scale = (
            torch.rand(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) * 0.01 + 0.001
        )
        spread = scale.repeat_interleave(rows, 0)[: weight.shape[0]].repeat_interleave(columns, 1)[
            :, : weight.shape[1]
        ]
        state[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale if block else scale.squeeze()
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": block and list(block),
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = fp8cfg.build(fp8cfg.compose(["recipe=from_hf", f"model.path={tmp_path}", *WORDS])).model
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-4, atol=1e-4)


def test_scales_of_blocks_at_the_edges() -> None:
    """transformers takes rows / scales for the size of a block, DeepSeek's and vLLM's readers the size that config.json says."""
    weight, scale = torch.ones(5, 3).to(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found = dequantize(weight, scale, (4, 2))
    assert found.tolist() == [[1.0, 1.0, 2.0]] * 4 + [[3.0, 3.0, 4.0]]


def test_other_quantizations_and_scales_are_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq"}})
    )
    with pytest.raises(
        ValueError,
        match="quant_method=gptq: not supported; use a checkpoint with one of compressed-tensors, fp8",
    ):
        Checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"scales of shape \[3, 1\] do not fit a weight of 4 x 4"):
        dequantize(torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(3, 1), (128, 128))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint in shards."""
    folder = tmp_path_factory.mktemp("theirs")
    saved(folder, "llama", "40KB", tie_word_embeddings=False)
    return folder


Q = "model.layers.0.self_attn.q_proj.weight"
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ({"num_hidden_layers": "2"}, "num_hidden_layers=2: expected a whole number"),
    ({"num_hidden_layers": -1}, "model.num_layers=-1: must be at least 1"),
    ({"head_dim": 1e308}, "model.kv_channels: the number has too many digits"),
    ({"max_position_embeddings": [3]}, r"max_position_embeddings=\[3\]: expected a whole number"),
    ({"hidden_size": True}, "hidden_size=true: expected a whole"),
    ({"layer_types": 1}, "layer_types=1: expected a list"),
    ({"rope_parameters": "x"}, "rope_parameters=x: expected an object"),
    (
        {"rope_parameters": {"full_attention": 3}},
        "rope_parameters: expected an object for each layer type",
    ),
    (
        {"rope_parameters": None, "rope_scaling": {"type": "linear"}},
        "rope_type=linear: factor is missing",
    ),
    ({"model_type": ["llama"]}, "not supported"),
]


@pytest.mark.parametrize(("said", "line"), CONFIGS, ids=str)
def test_a_config_of_other_kinds_is_one_line(
    said: dict[str, Any], line: str, theirs: Path, tmp_path: Path
) -> None:
    config = json.loads((theirs / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **said}))
    with pytest.raises(ConfigError, match=f"^model.path=.*{line}[^\n]*$"):
        of_folder(str(tmp_path))


INDEXES: list[tuple[Any, str]] = [
    ([], "is not a JSON object"),
    ({"weight_map": [1]}, "has no weight_map"),
    ({"weight_map": {Q: 3, "b": "x"}}, "'3' is not a file of this folder"),
    ({"weight_map": {Q: "../x.safetensors"}}, "'../x.safetensors' is not a file"),
    ({"weight_map": {Q: ""}}, "'' is not a file"),
    ({"weight_map": {Q: "pipe"}}, r"pipe cannot be read \(not a regular file\)"),
    ({"weight_map": {Q: "a\0b"}}, "cannot be read"),
    ({"weight_map": {Q: "a" * 5000}}, "a{60} cannot be read"),
    ("[" * 100_000, "cannot be read"),
]


@pytest.mark.parametrize(("index", "line"), INDEXES, ids=range(len(INDEXES)))
def test_an_index_of_somebody_else_is_one_line(index: Any, line: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "model.safetensors.index.json").write_text(
        index if isinstance(index, str) else json.dumps(index)
    )
    with pytest.raises(ValueError, match=line):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight", "line"),
    [
        (torch.ones(4, 4, dtype=torch.int32), "int32 is not a dtype of weights"),
        (torch.ones(4, 4, dtype=torch.bool), "bool is not a dtype"),
        (torch.tensor([1.0, torch.nan]), "has values that are not finite"),
        (torch.tensor([torch.inf]).bfloat16(), "has values that are not finite"),
        (torch.ones(4).to(torch.float8_e4m3fn), r"FP8 weight with shape \[4\] is not supported"),
        (torch.ones(4, 4).to(torch.float8_e5m2), "float8_e5m2 without supported scales"),
    ],
)
def test_what_is_no_weight_is_refused(weight: torch.Tensor, line: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({Q: weight, f"{Q}_scale_inv": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=line):
        Checkpoint(tmp_path).read(Q)


@pytest.mark.parametrize(
    "said",
    [
        3,
        [1],
        {"quant_method": ["fp8"]},
        *(
            {"quant_method": "fp8", "weight_block_size": b}
            for b in (3, [128], [0, 0], ["a", 1], [1e400, 1])
        ),
    ],
    ids=str,
)
def test_a_quantization_of_other_kinds_is_one_line(said: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({Q: torch.ones(4, 4)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with pytest.raises(ValueError, match=r"not supported|expected two whole numbers"):
        Checkpoint(tmp_path)
