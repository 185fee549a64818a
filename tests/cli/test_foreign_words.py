"""Keys, options and words of other projects are answered with ours, never with a key that only looks alike."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import yaml

import fp8cfg
import fp8cfg.recipes
from fp8cfg.__main__ import main

ANSWERS = {
    "check checkpoint.save_dir=x": "it belongs to log.dir",
    "check fp8.block_size=128": "it belongs to fp8.scaling=block",
    "check fp8.skip_layers=[a]": "it belongs to fp8.exclude",
    "check fp8.ignored_modules=[a]": "it belongs to fp8.exclude",
    "check fp8.attention=true": "it belongs to fp8.dot_product_attention",
    "check fp8.lm_head=true": "it belongs to fp8.output_layer",
    "check model.attn_implementation=sdpa": "chosen by torch's scaled_dot_product_attention",
    "check data.split=train": "data.validation_fraction",
    "check model_name_or_path=x": "recipe and model.path",
    "check sequence_len=2048": "it belongs to model.seq_length",
    "check expert_model_parallel_size=2": "no model here has experts",
    "--nodes 2": "write trainer.num_nodes=N",
    "sample run hi --temp 0.5": "write --temperature T",
    "--config x.yaml": "fp8cfg FILE.yaml",
    "--factory llama_8b": "write recipe=NAME",
    "--fp8-format hybrid": "write fp8.format=hybrid, or for flags of Megatron-LM: fp8cfg import meg",
    "check --fp8-format=hybrid": "write fp8.format=hybrid, or",
    "check --fp8-recipe tensorwise": "write fp8.scaling=current, or for flags of Megatron-LM",
    "check --tensor-model-parallel-size 8": "write trainer.strategy.tensor_model_parallel_size=VALUE",
    "check --per_device_train_batch_size 4": "no such option; write trainer.micro_batch_size=VALUE",
    "check --parallelism.tensor_parallel_degree 2": "trainer.strategy.tensor_model_parallel_size=VA",
    "check --training.steps 100": "no such option; write trainer.max_steps=VALUE",
    "check --zero_stage 2": "write storage.shard=zero2",
    "check --num_train_epochs 3": "no such option; trainer.max_steps counts steps, not epochs",
    "check --model_name_or_path x": "no such option; it belongs to recipe and model.path",
    "check --bf16": "no such option; write precision=bf16",
    "plan recipe=llama_8b --gpu v100": "it has a100-40, a100-80, h100",
    "explain mxfp8": "write: fp8cfg explain fp8.scaling",
    "explain O2": "write: fp8cfg explain opt_level",
    "explain hybrid": "write: fp8cfg explain fp8.format",
    "plot": "write: fp8cfg report RUN_FOLDER",
    "serve": "fp8cfg export hf RUN_FOLDER OUT --fp8 block",
    "nemo llm pretrain --factory llama3_8b": "is: fp8cfg recipe=NAME",
    "export vllm": "write: fp8cfg export hf RUN_FOLDER OUT --fp8 block",
    "export vllm recipe=llama_8b": "write: fp8cfg export hf RUN_FOLDER OUT --fp8 block",
    "export gguf": "convert_hf_to_gguf.py",
    "export adapters": "fp8cfg export peft RUN_FOLDER OUT",
    "--log-level debug": "write log.level=debug, info, warning or error",
    "check log.wandb=true": "log.loggers=[wandb]",
    "check log.wandb_project=x": "log.loggers=[wandb] and log.project",
    "check report_to=wandb": "it belongs to log.loggers",
    "check resume.restore_config=x": "fp8cfg resume FOLDER",
    "check base_model=x": "recipe and model.path",
    "check dataset=x": "it belongs to data.path",
    "check num_epochs=3": "trainer.max_steps counts steps, not epochs",
    "check num_train_epochs=3": "trainer.max_steps counts steps, not epochs",
    "check trainer.max_epochs=3": "trainer.max_steps counts steps, not epochs",
    "check warmup_ratio=0.03": "optim.warmup_steps counts steps, not a share of the run",
    "check data_parallel_shard_degree=4": "set storage.shard=fsdp",
    "check model.hf=./folder": "set recipe=from_hf model.path=FOLDER",
    "check trainer.max_time=2h": "checkpoint.every_minutes saves by time",
    "check adapter=lora": "it belongs to task=lora",
    "check profiling=true": "it belongs to log.profile",
    "check config_file=x": "fp8cfg FILE.yaml",
    "check float8=true": "it belongs to fp8",
    "check load_in_8bit=true": "fp8.params=true",
}


@pytest.mark.parametrize("line", ANSWERS)
def test_the_answer_names_what_does_it_here(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert ANSWERS[line] in error and "did you mean" not in error


KEYS = [
    line.split()[1].partition("=")
    for line in ANSWERS
    if line.startswith("check ") and "--" not in line
]


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, _, value in KEYS])
def test_each_door_has_the_same_answer(key: str, value: str, tmp_path: Path) -> None:
    """A word, a line of a file, an assignment."""
    with pytest.raises(fp8cfg.ConfigError) as word:
        fp8cfg.compose([f"{key}={value}"])
    *nodes, leaf = key.split(".")
    data: dict[str, object] = {leaf: yaml.safe_load(value)}
    for node in reversed(nodes):
        data = {node: data}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(fp8cfg.ConfigError) as line:
        fp8cfg.compose([], file=tmp_path / "a.yaml")
    with pytest.raises(fp8cfg.ConfigError) as assignment:
        setattr(functools.reduce(getattr, nodes, fp8cfg.Recipe()), leaf, yaml.safe_load(value))
    answer = str(word.value).partition(": ")[2]
    assert str(line.value).endswith(answer) and str(assignment.value).endswith(answer)


SECTIONS = {
    "training.steps": (100, "it belongs to trainer.max_steps"),
    "training.seed": (1, "did you mean 'trainer.seed'?"),
    "parallelism.tensor_parallel_degree": (
        2,
        "it belongs to trainer.strategy.tensor_model_parallel_size",
    ),
    "parallelism.data_parallel_shard_degree": (4, "set storage.shard=fsdp"),
    "activation_checkpoint.mode": ("full", "it belongs to model.recompute_granularity"),
    "float8.filter_fqns": (["output"], "it belongs to fp8.exclude"),
    "job.config_file": ("x.toml", "fp8cfg FILE.yaml"),
    "profiling": ({"enable_profiling": True}, "it belongs to log.profile"),
}


def test_each_key_in_a_section_of_another_project_has_its_answer(tmp_path: Path) -> None:
    data: dict[str, object] = {}
    for key, (value, _) in SECTIONS.items():
        section, _, leaf = key.partition(".")
        if leaf:
            value = {**data.get(section, {}), leaf: value}  # type: ignore[dict-item]
        data[section] = value
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(fp8cfg.ConfigError) as file:
        fp8cfg.compose([], file=tmp_path / "a.yaml")
    with pytest.raises(fp8cfg.ConfigError) as call:
        fp8cfg.Recipe(**data)  # type: ignore[arg-type]
    for error in (file.value, call.value):
        assert len(error.problems) == len(SECTIONS)
        for key, (_, answer) in SECTIONS.items():
            assert any(f"{key}: " in line and answer in line for line in error.problems), key


NOT_IMPORTED = {
    "axolotl": {
        "base_model": "x/y",
        "datasets": [{"path": "a", "type": "alpaca"}],
        "sequence_len": 2048,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": "adamw_torch",
        "bf16": "auto",
        "flash_attention": True,
        "adapter": "lora",
    },
    "trl": {
        "model_name_or_path": "x",
        "bf16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    },
    "transformers": {
        "bf16": True,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-4,
        "warmup_ratio": 0.1,
    },
}


@pytest.mark.parametrize("project", NOT_IMPORTED)
def test_a_file_of_a_project_that_is_not_imported_has_an_answer_for_each_key(
    project: str, tmp_path: Path
) -> None:
    data = NOT_IMPORTED[project]
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(fp8cfg.ConfigError) as error:
        fp8cfg.compose([], file=tmp_path / "a.yaml")
    assert len(error.value.problems) == len(data)
    assert not any(
        "import" in line or line.endswith("no such key") for line in error.value.problems
    )


NEMO_1 = {
    "name": "x",
    "trainer": {"devices": 1, "max_steps": 100, "precision": "bf16"},
    "model": {"tensor_model_parallel_size": 1, "fp8": True, "fp8_hybrid": True},
}


def test_only_keys_that_no_recipe_has_make_a_file_nemo_1s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nemo.yaml"
    file.write_text(yaml.safe_dump({**NEMO_1, "exp_manager": {"exp_dir": "x"}}))
    assert main(["check", str(file)]) == 2
    assert capsys.readouterr().err.endswith(f"run fp8cfg import nemo {file}\n")
    assert main(["import", "nemo", str(file)]) == 0
    file.write_text(yaml.safe_dump(NEMO_1))
    assert main(["check", str(file)]) == 2
    assert "fp8cfg import" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "meta-llama/llama31_8"])
def test_an_id_of_the_hub_is_a_path_of_from_hf(name: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(f"recipe: {name}\n")
    for words, file in (([f"recipe={name}"], None), ([], tmp_path / "a.yaml")):
        with pytest.raises(fp8cfg.ConfigError) as error:
            fp8cfg.compose(words, file=file)
        assert f"set recipe=from_hf model.path=hf://{name}, or recipe=llama31_8b" in str(
            error.value
        )


@pytest.mark.parametrize("name", ["conf/llama_8b", "./a/b", "a/b/c", "a/b.yaml"])
def test_a_path_is_no_id_of_the_hub(name: str) -> None:
    with pytest.raises(fp8cfg.ConfigError, match="not a path"):
        fp8cfg.compose([f"recipe={name}"])


def test_an_import_of_a_recipe_names_the_nearest() -> None:
    with pytest.raises(ImportError, match="no recipe 'llama3_8B'; did you mean 'llama3_8b'"):
        exec("from fp8cfg.recipes import llama3_8B")
    with pytest.raises(ImportError, match="cannot import name 'nothing_like_it'"):
        exec("from fp8cfg.recipes import nothing_like_it")
    assert not hasattr(fp8cfg.recipes, "nothing_like_it")
    assert not hasattr(fp8cfg.recipes, "__wrapped__")


def test_a_section_alone_names_what_is_in_its_place() -> None:
    with pytest.raises(fp8cfg.ConfigError, match=r"training: .*trainer\.max_steps"):
        fp8cfg.Recipe().training.steps = 100  # type: ignore[attr-defined]
    with pytest.raises(fp8cfg.ConfigError, match=r"^training\.steps: .*trainer\.max_steps$"):
        fp8cfg.compose(["training={steps: 100}"])
    with pytest.raises(fp8cfg.ConfigError, match=r"^trainr: .*did you mean 'trainer'"):
        fp8cfg.Recipe(trainr={"max_steps": 1, "devices": 1})  # type: ignore[call-arg]


def test_all_linear_is_what_it_is_to_peft(tmp_path: Path) -> None:
    recipe = fp8cfg.compose(["task=lora", "lora.targets=all-linear"])
    assert recipe.lora.targets == ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    (tmp_path / "a.yaml").write_text("task: lora\nlora: {targets: all-linear}\n")
    assert fp8cfg.compose([], file=tmp_path / "a.yaml") == recipe
    other = fp8cfg.compose(["task=lora", "lora.targets=[q_proj]"])
    other.lora.targets = "all-linear"  # type: ignore[assignment]
    assert other == recipe


def test_a_file_or_a_folder_is_no_data_preset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("corpus.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(fp8cfg.ConfigError) as error:
        fp8cfg.compose(["data=corpus.jsonl"])
    assert str(error.value) == (
        "data=corpus.jsonl: no such data preset; to train on it: data.path=corpus.jsonl"
    )
    with pytest.raises(fp8cfg.ConfigError, match="not a path; see fp8cfg list recipe"):
        fp8cfg.compose(["recipe=/no/where"])
