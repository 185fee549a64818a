"""Everything in another project's file is read, or named as not read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fp8cfg
from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.interop.translation import effective_values
from tests.support.verbs import refused

FILES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "accelerate": (
        "a.yaml",
        "mixed_precision: bf16\nzz_one: 1\nfsdp_config: {zz_two: 1}\nzz_three: {deep: 2}\n",
        ("zz_one", "zz_two", "zz_three.deep"),
    ),
    "deepspeed": (
        "a.json",
        '{"bf16": {"enabled": true}, "zz_one": 1, "zero_optimization": {"stage": 1, "zz_two": 3}}',
        ("zz_one", "zz_two"),
    ),
    "nemo": (
        "a.yaml",
        "trainer: {precision: bf16, zz_one: 1}\nmodel: {zz_two: '${zz.x}', optim: {zz_three: 3}}\nzz_four: 4\n",
        ("trainer.zz_one", "model.zz_two", "model.optim.zz_three", "zz_four"),
    ),
    "bridge": (
        "a.yaml",
        "mixed_precision: bf16_mixed\nmodel: {zz_one: 1, fp8: hybrid}\ntrain: {zz_two: 2}\nfp8_margin: 3\n",
        ("model.zz_one", "model.fp8", "train.zz_two", "fp8_margin"),
    ),
    "megatron": (
        "a.sh",
        "python pretrain_gpt.py --bf16 --num-layers 2 "
        + " ".join(f"--zz-{n} 1" for n in range(20)),
        tuple(f"--zz-{n}" for n in range(20)),
    ),
    "torchtitan": (
        "a.py",
        "def a() -> Trainer.Config:\n    config = Trainer.Config(training=TrainingConfig(dtype='float32', zz_one=1),\n"
        "        optimizer=OptimizersContainer.Config(zz_two=3))\n    config.zz_three = 3\n    return config\n",
        ("training.zz_one=1", "optimizer.zz_two=3", "config.zz_three = 3"),
    ),
    "te": (
        "a.py",
        "recipe = DelayedScaling(margin=1)\nmodel = te.Linear(8, 8, zz_one=False)\noptimizer = Adam(zz_two=1)\n",
        ("model.zz_one=False", "optimizer.zz_two=1"),
    ),
}


@pytest.mark.parametrize("project", FILES)
def test_each_unknown_item_of_a_file_is_named(project: str, tmp_path: Path) -> None:
    name, text, items = FILES[project]
    (tmp_path / name).write_text(text)
    found = interop.from_file(project, tmp_path / name)
    lines = " ".join((*found.lost, *found.unknown))
    assert [item for item in items if item not in lines] == []


def test_python_around_a_handler_of_accelerates_is_named(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = Accelerator(mixed_precision='bf16', zz_one=2)\ntorch.zz_two()\n")
    assert interop.from_file("accelerate", file).lost == ("x.zz_one=2, torch.zz_two(): not read",)
    file.write_text("x = Accelerator(zz_one=2, kwargs_handlers=[TERecipeKwargs(margin=1)])\n")
    found = interop.from_file("accelerate", file)
    assert found.recipe.fp8.margin == 1 and "x.zz_one=2: not read" in found.lost


BRIDGE: dict[str, Any] = {
    "mixed_precision": "bf16_with_fp8_current_scaling_mixed",
    "model": {
        "_target_": "megatron.bridge.models.llama.llama_provider.Llama31ModelProvider",
        "num_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 8192,
        "vocab_size": 128256,
        "gated_linear_unit": True,
        "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False},
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "layernorm_epsilon": 1e-5,
        "init_method": {"_args_": [], "_partial_": True, "_target_": "x.normal_", "mean": 0.0},
        "share_embeddings_and_output_weights": True,
        "seq_length": 131072,
        "tensor_model_parallel_size": 4,
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
    },
    "dataset": {"sequence_length": 4096, "num_workers": 1},
    "optimizer": {"lr": 3e-4, "adam_beta1": 0.9, "adam_beta2": 0.95, "clip_grad": 0.5},
    "scheduler": {"lr_warmup_iters": 500, "lr_decay_style": "cosine"},
    "train": {"train_iters": 1000, "global_batch_size": 128, "micro_batch_size": 1},
    "ddp": {"use_distributed_optimizer": True},
    "rng": {"seed": 7},
}


def test_a_run_config_of_bridge_is_a_whole_recipe(tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(yaml.safe_dump(BRIDGE))
    found = interop.from_file("bridge", tmp_path / "run_config.yaml")
    values = effective_values(found.recipe)
    want = {
        "fp8.scaling": "current",
        "model.num_layers": 16,
        "model.hidden_size": 2048,
        "model.num_query_groups": 8,
        "model.activation": "swiglu",
        "model.add_bias_linear": False,
        "model.normalization": "RMSNorm",
        "model.share_embeddings_and_output_weights": True,
        "model.seq_length": 4096,  # the dataset's, which counts in Bridge
        "trainer.strategy.tensor_model_parallel_size": 4,
        "trainer.max_steps": 1000,
        "trainer.global_batch_size": 128,
        "trainer.seed": 7,
        "trainer.gradient_clip_val": 0.5,
        "optim.betas": (0.9, 0.95),
        "optim.warmup_steps": 500,
        "storage.shard": "zero1",
    }
    assert {key: values[key] for key in want} == want
    assert "dataset.num_workers, model.init_method.mean, model.seq_length: not read" in [
        ", ".join(sorted(line.partition(":")[0].split(", "))) + ": not read"
        for line in found.lost
        if line.endswith(": not read")
    ]


@pytest.mark.parametrize(
    ("project", "settings", "remark"),
    [
        (
            "megatron",
            {"bf16": True, "recompute_granularity": "full", "recompute_method": "block"},
            "recompute_method=block: model.recompute_granularity=full recomputes every layer here",
        ),
        (
            "nemo",
            {"precision": "bf16-mixed", "model.config.gated_linear_unit": False},
            "gated_linear_unit=False: not read without activation_func",
        ),
        (
            "accelerate",
            {"mixed_precision": "bf16", "compute_environment": "AMAZON_SAGEMAKER"},
            "compute_environment=AMAZON_SAGEMAKER: belongs to the launch; use torchrun's arguments",
        ),
        (
            "deepspeed",
            {"bf16.enabled": True, "msamp.opt_level": "O2"},
            "msamp.opt_level=O2: has no effect without msamp.enabled",
        ),
    ],
)
def test_a_setting_without_effect_is_a_remark(
    project: str, settings: dict[str, Any], remark: str
) -> None:
    assert interop.from_mapping(project, settings).lost == (remark,)


def test_biases_of_qkv_only_are_kept(tmp_path: Path) -> None:
    model = {**BRIDGE["model"], "add_qkv_bias": True}
    (tmp_path / "qwen.yaml").write_text(yaml.safe_dump({**BRIDGE, "model": model}))
    found = interop.from_file("bridge", tmp_path / "qwen.yaml")
    assert found.recipe.model.add_qkv_bias and not found.recipe.model.add_bias_linear
    model["add_bias_linear"] = True
    (tmp_path / "qwen.yaml").write_text(yaml.safe_dump({**BRIDGE, "model": model}))
    found = interop.from_file("bridge", tmp_path / "qwen.yaml")
    assert "add_qkv_bias: has no effect, all linear layers have biases" in found.lost


NEMO_1 = """
defaults: [_self_]
base: 3
exp_manager: {name: x}
trainer: {devices: 8, num_nodes: 1, precision: bf16, max_steps: 100, gradient_clip_val: 0.5}
model:
  micro_batch_size: 4
  global_batch_size: 64
  num_layers: 2
  hidden_size: 128
  num_attention_heads: 4
  encoder_seq_length: 512
  max_position_embeddings: ${.encoder_seq_length}
  tensor_model_parallel_size: ${base_tp}
  transformer_engine: true
  fp8: true
  fp8_e4m3: true
  fp8_hybrid: false
  fp8_margin: 1
  optim: {name: sgd, lr: 2e-4, sched: {warmup_steps: 10, min_lr: 1e-5}}
"""


def test_a_file_of_nemo_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "megatron_gpt_config.yaml"
    file.write_text(NEMO_1)
    assert refused(capsys, "import", "nemo", str(file)) == [
        f"{file}: model.tensor_model_parallel_size=${{base_tp}}: interpolations are not supported here;"
        " write the value"
    ]
    file.write_text(NEMO_1.replace("${base_tp}", "2"))
    found = interop.from_file("nemo", file)
    values = effective_values(found.recipe)
    want = {
        "fp8.margin": 1,
        "fp8.format": "e4m3",
        "model.seq_length": 512,
        "model.max_position_embeddings": 512,
        "model.num_query_groups": 4,
        "model.activation": "gelu",
        "model.ffn_hidden_size": 512,
        "trainer.devices": 8,
        "trainer.strategy.tensor_model_parallel_size": 2,
        "optim.name": "sgd",
        "optim.lr": 2e-4,
        "optim.warmup_steps": 10,
        "trainer.gradient_clip_val": 0.5,
    }
    assert {key: values[key] for key in want} == want
    assert found.lost[-1] == "defaults, base, exp_manager.name: not read"


NEMO_2 = """
from nemo.collections import llm
import nemo_run as run

TP = 2

def configure(nodes: int = 2, gpus: int = 8):
    recipe = llm.llama3_8b.pretrain_recipe(dir="/ckpt", name="mine", num_nodes=nodes, num_gpus_per_node=gpus)
    recipe.trainer.strategy.tensor_model_parallel_size = TP
    recipe.trainer.plugins = bf16_with_fp8_mixed()
    recipe.trainer.plugins.fp8_margin = 1
    recipe.optim.config.lr = 1e-4
    recipe.data = run.Config(MockDataModule, seq_length=4096, global_batch_size=64, micro_batch_size=1, num_workers=2)
    if nodes > 4:
        recipe.trainer.max_steps = 5
    recipe.log.ckpt.save_top_k = 3
    return recipe

if __name__ == "__main__":
    recipe = configure()
    run.run(recipe, direct=True)
"""


@pytest.mark.parametrize(
    "statement",
    [
        "try:\n        nothing()\n    except ValueError:\n        {}",
        "try:\n        nothing()\n    except ValueError:\n        pass\n    else:\n        {}",
        "match gpus:\n        case 8:\n            {}",
        "async def later():\n        for x in y:\n            {}",
    ],
)
def test_a_setting_in_any_block_is_a_remark(statement: str, tmp_path: Path) -> None:
    setting = "recipe.trainer.plugins.fp8_interval = 3"
    file = tmp_path / "job.py"
    file.write_text(NEMO_2.replace("if nodes > 4:", statement.format(setting) + "\n    if nodes:"))
    assert setting in interop.from_file("nemo", file).lost[-1]
    file.write_text(NEMO_2.replace("if nodes > 4:", "del recipe.x\n    if nodes > 4:"))
    assert "del recipe.x" in interop.from_file("nemo", file).lost[-1]


@pytest.mark.parametrize(
    "other",
    [
        "nodes = 4",
        "def other():\n    nodes = 4",
        "def other(nodes=4):\n    pass",
        "for nodes in range(4):\n    pass",
    ],
)
def test_a_name_with_two_values_is_not_guessed(other: str, tmp_path: Path) -> None:
    file = tmp_path / "job.py"
    file.write_text(f"{other}\n{NEMO_2}")
    found = interop.from_file("nemo", file)
    assert found.recipe.trainer.num_nodes == 1
    assert "recipe.num_nodes=nodes" in found.lost[-1]


def composed(text: str, folder: Path) -> fp8cfg.Recipe:
    (folder / "imported.yaml").write_text(text)
    return fp8cfg.compose([], file=folder / "imported.yaml")


def test_assignments_after_a_recipe_function_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "script.py"
    file.write_text(NEMO_2)
    assert main(["import", "nemo", str(file)]) == 0
    text = capsys.readouterr().out
    recipe = composed(text, tmp_path)
    assert (recipe.name, recipe.log.dir, recipe.model.hidden_size) == ("mine", "/ckpt", 4096)
    assert recipe.trainer.strategy.tensor_model_parallel_size == 2
    assert (recipe.trainer.num_nodes, recipe.trainer.devices, recipe.optim.lr) == (2, 8, 1e-4)
    assert (recipe.trainer.global_batch_size, recipe.model.seq_length) == (64, 4096)
    assert (recipe.fp8.enabled, recipe.fp8.margin) == (True, 1)
    lost = " ".join(re.sub(r"\n#", "", text).split())
    assert (
        "recipe.data.num_workers=2, recipe.trainer.max_steps = 5, recipe.log.ckpt.save_top_k = 3,"
        " run.run(recipe, direct=True): not read"
    ) in lost


def test_a_recipe_function_of_bridge(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        "from megatron.bridge.recipes.llama import llama32_1b_pretrain_config\n"
        "cfg = llama32_1b_pretrain_config()\ncfg.train.train_iters = 10\ncfg.mixed_precision = 'bf16_with_mxfp8_mixed'\n"
        "pretrain(cfg, forward_step)\n"
    )
    found = interop.from_file("bridge", file)
    assert (found.recipe.name, found.recipe.trainer.max_steps) == ("llama32_1b", 10)
    assert found.recipe.fp8.scaling == "mxfp8"
    assert found.lost == (
        "optim.warmup_steps=10: not read from the source; set to fit trainer.max_steps=10",
        "pretrain(cfg, forward_step): not read",
    )


def test_an_imported_gpt_3_is_named_after_its_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 2048 --seq-length 2048 --bf16"
    assert main(["import", "megatron", "--", words]) == 0
    text = capsys.readouterr().out
    data = yaml.safe_load(text)
    assert data["recipe"] == "gpt3_125m"
    recipe = composed(text, tmp_path)
    assert (recipe.name, recipe.model.vocab_size) == ("gpt3_125m", 50304)
    assert "model.vocab_size=50304: not read from the source" in " ".join(text.split())


def test_accelerates_parallelism_both_ways() -> None:
    recipe = fp8cfg.compose(
        [
            "storage.shard=fsdp",
            "trainer.devices=16",
            "trainer.global_batch_size=64",
            "trainer.strategy.tensor_model_parallel_size=2",
            "trainer.strategy.context_parallel_size=2",
            "trainer.strategy.data_parallel_replicate_size=2",
        ]
    )
    written = interop.to_mapping("accelerate", recipe)
    assert written.value["parallelism_config"] == {
        "parallelism_config_tp_size": 2,
        "parallelism_config_cp_size": 2,
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 2,
    }
    back = interop.from_mapping("accelerate", written.value).recipe
    assert back.trainer.strategy == recipe.trainer.strategy and back.trainer.devices == 16


def test_what_deepspeed_leaves_to_the_trainer_is_named(tmp_path: Path) -> None:
    data = {
        "bf16": {"enabled": "auto"},
        "train_batch_size": "auto",
        "tensor_parallel": {"autotp_size": 2},
        "compile": {"deepcompile": True},
        "zero_force_ds_cpu_optimizer": False,
    }
    (tmp_path / "a.json").write_text(json.dumps(data))
    found = interop.from_file("deepspeed", tmp_path / "a.json")
    assert found.recipe.trainer.strategy.tensor_model_parallel_size == 2 and found.unknown == ()
    assert found.lost[:2] == (
        "bf16.enabled, train_batch_size: not read, because auto means the Trainer's arguments",
        "precision.compute=bf16: not read from the source; set precision.compute=fp16 or fp32 for another dtype",
    )


@pytest.mark.parametrize(
    ("project", "name", "text", "line"),
    [
        (
            "accelerate",
            "a.json",
            '{"zero_optimization": {"stage": 1}}',
            "{}: is a configuration file of DeepSpeed; run fp8cfg import deepspeed {}",
        ),
        (
            "nemo",
            "a.yaml",
            "base_model: x\nsequence_len: 10\n",
            "{}: is a configuration file of axolotl, which cannot be imported; set the keys of a recipe instead (fp8cfg explain KEY)",
        ),
        (
            "megatron",
            "a.sh",
            "llamafactory-cli train a.yaml\n",
            "{}: is a command of LLaMA-Factory, which cannot be imported; set the keys of a recipe instead (fp8cfg explain KEY)",
        ),
    ],
)
def test_a_file_of_another_project_is_recognized(
    project: str,
    name: str,
    text: str,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_text(text)
    file = str(tmp_path / name)
    assert refused(capsys, "import", project, file) == [line.replace("{}", file)]


def test_ms_swift_is_recognized_and_computes_in_bf16(tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text(
        "NPROC_PER_NODE=2 \\\nmegatron sft \\\n  --model Qwen/Qwen2.5-7B \\\n  --tensor_model_parallel_size 2 --lr 1e-5\n"
    )
    found = interop.from_file("megatron", tmp_path / "a.sh")
    assert found.recipe.precision.compute == "bf16" and found.recipe.optim.lr == 1e-5
    assert any(line.startswith("megatron sft: ms-swift's command") for line in found.lost)
    assert "--model: not read" in found.lost


def test_python_with_several_models_or_an_unknown_one(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "def a():\n    return llm.llama3_8b.pretrain_recipe(num_nodes=2)\n\n"
        "def b():\n    return llm.starcoder_15b.pretrain_recipe(num_nodes=2, seq_length=64)\n"
    )
    with pytest.raises(
        fp8cfg.ConfigError, match="has 2 models, llama3_8b, starcoder_15b; add the name"
    ):
        interop.from_file("nemo", file)
    found = interop.from_file("nemo", tmp_path / "a.py:a")
    assert (found.recipe.trainer.num_nodes, found.lost) == (2, ())
    found = interop.from_file("nemo", tmp_path / "a.py:b")
    assert found.recipe.model.seq_length == 64
    assert found.lost[-1] == (
        "starcoder_15b: fp8cfg has no recipe of this model; set recipe=NAME for another shape"
    )
