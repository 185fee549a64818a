"""Words of import and export on the command line: projects, presets, flags, and sizes of a parallel model."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg import interop
from fp8cfg.__main__ import main
from fp8cfg.schema.training import Strategy
from tests.support.verbs import refused, said


def test_words_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    head = f"# Exported by fp8cfg {fp8cfg.__version__}.\n"
    assert (
        said(capsys, "import", "nemo", "recipe=llama_8b", "--", "bf16_with_mxfp8_mixed")
        == f"{head}recipe: llama_8b\nprecision: bf16_mxfp8\n"
    )
    assert (
        said(
            capsys,
            "import",
            "megatron",
            "--",
            "--bf16",
            "--fp8-format",
            "hybrid",
            "--fp8-recipe",
            "blockwise",
        )
        == f"{head}recipe: llama_tiny\nprecision: bf16_fp8_block\n"
    )
    assert said(
        capsys, "import", "te", "fp8.margin=2", "--", "DelayedScaling(amax_history_len=16)"
    ).endswith(
        "precision: bf16_fp8\nfp8:\n  margin: 2\n  amax_history_len: 16\n  first_step: te\n  params: false\nbackend: te\n"
    )
    assert "recipe = llama_tiny()\nrecipe.precision = fp8cfg.bf16_with_mxfp8_mixed()\n" in said(
        capsys,
        "import",
        "bridge",
        "--python",
        "--",
        "bf16=true",
        "fp8=e4m3",
        "fp8_recipe=mxfp8",
        "fp8_param_gather=true",
    )
    assert refused(capsys, "import", "megatron", "--", "--tensorboard-dir", "x") == [
        "has no known flag of Megatron-LM, such as --fp8-format hybrid"
    ]
    assert refused(capsys, "import", "megatron", "--", "--bf16", "--fp16") == [
        "Megatron-LM: bf16 and fp16 are both on; remove one"
    ]
    assert refused(capsys, "import", "megatron", "--", "--fp8-format 'e4m3") == [
        "not a valid shell script (no closing quotation)"
    ]


def test_words_that_stand_on_the_wrong_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "import", "nemo", "recipe=llama_8b", "fp8=hybrid", "fp8_margin=1") == [
        "import nemo: needs a file, or arguments after --, as in: fp8cfg import nemo recipe=llama_8b -- fp8=hybrid fp8_margin=1"
    ]
    assert refused(
        capsys, "import", "megatron", "recipe=llama_8b", "--bf16", "--fp8-format=hybrid"
    ) == [
        "import megatron: its arguments go after --, as in: fp8cfg import megatron recipe=llama_8b -- --bf16 --fp8-format=hybrid"
    ]
    assert refused(capsys, "import", "accelerate", "--mixed_precision", "fp8", "--output", "x") == [
        "import accelerate: its arguments go after --, as in: fp8cfg import accelerate -- mixed_precision=fp8"
    ]
    assert refused(capsys, "import", "accelerate", "--mixed_precision", "fp9") == [
        "import accelerate: its arguments go after --",
        "mixed_precision=fp9: not an option; did you mean 'fp8'?",
    ]
    assert refused(capsys, "import", "nemo", "--bf16", "--fp8", "hybrid") == [
        "import nemo: its arguments go after --, as in: fp8cfg import nemo -- bf16=true fp8=hybrid"
    ]
    assert refused(capsys, "import", "megatron", "x.sh", "--outptu", "y") == [
        "--outptu: no such option; did you mean '--output'?"
    ]


def test_a_preset_is_a_name_and_a_file_has_a_folder_or_an_ending(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(capsys, "import", "nemo", "conf/nowhere") == [
        "conf/nowhere: cannot be read (No such file or directory)"
    ]
    assert refused(capsys, "import", "nemo", "./nowhere") == [
        "nowhere: cannot be read (No such file or directory)"
    ]
    assert refused(capsys, "import", "nemo", "nowhere.yaml") == [
        "nowhere.yaml: cannot be read (No such file or directory)"
    ]
    assert refused(capsys, "import", "nemo", "nowhere") == [
        "precision=nowhere: no such precision preset; see fp8cfg list precision"
    ]


def test_a_model_that_nobody_chose_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    preset = "nemotron_h_bf16_with_fp8_current_scaling_mixed"
    assert refused(capsys, "import", "nemo", preset) == [
        "fp8.high_precision_at_start=2 and fp8.high_precision_at_end=2: leave no layer of model.num_layers=4 in FP8; nearest is fp8.high_precision_at_end=1 "
        "(of llama_tiny, as no recipe is named); add recipe=NAME"
    ]
    assert "recipe: llama_8b\n" in said(capsys, "import", "nemo", preset, "recipe=llama_8b")


@pytest.mark.parametrize(
    "argv",
    [
        ("torchtitan", "{file}"),
        ("bridge", "--", "bf16=true", "fp8=hybrid", "fp8_recipe=tensorwise"),
        ("accelerate", "--", "AORecipeKwargs()"),
    ],
)
def test_the_preset_that_is_named_scales_alike(
    argv: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.py"
    file.write_text(
        "config = Trainer.Config(model_converters=ModelConvertersContainer.Config(converters=[\n"
        "    Float8LinearConverter.Config(filter_fqns=['output'])]))\n"
    )
    text = said(capsys, "import", *(word.format(file=file) for word in argv))
    assert (
        "\nprecision: bf16_fp8_current\n" in text
        and "scaling:" not in text
        and "storage:" not in text
    )


@pytest.mark.parametrize(
    "sizes",
    [
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 3 --context-parallel-size 2 --num-layers 3",
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4",
    ],
)
def test_a_script_has_the_gpus_that_its_parallel_sizes_take(sizes: str) -> None:
    found = interop.from_words("megatron", [f"--bf16 {sizes}"])
    trainer = found.recipe.trainer
    assert trainer.num_nodes * trainer.devices == trainer.strategy.size > 1
    assert found.lost[0].startswith(
        f"trainer.num_nodes={trainer.num_nodes} and trainer.devices={trainer.devices}: not read from the source; "
    )
    found.recipe.check()
    large = fp8cfg.compose(
        ["trainer.num_nodes=6", "trainer.devices=8", "trainer.global_batch_size=768"]
    )
    assert interop.from_words("megatron", [f"--bf16 {sizes}"], large).recipe.trainer.num_nodes == 6


@pytest.mark.parametrize("name", ["nemo", "bridge"])
def test_parallel_sizes_that_a_job_file_does_not_give_are_1(name: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "trainer: {devices: 8, num_nodes: 1, precision: bf16}\n"
        "model: {tensor_model_parallel_size: 8, fp8: true, fp8_hybrid: true}\n"
    )
    base = fp8cfg.compose(["recipe=llama_8b"])
    assert base.trainer.strategy.context_parallel_size == 2
    found = interop.from_file(name, file, base)
    trainer = found.recipe.trainer
    assert (trainer.num_nodes, trainer.devices) == (1, 8)
    assert trainer.strategy == Strategy(tensor_model_parallel_size=8)
    assert found.lost == ()
    file.write_text("trainer: {precision: bf16, devices: 8}\nmodel: {hidden_size: 4096}\n")
    assert interop.from_file(name, file, base).recipe.trainer.strategy == base.trainer.strategy


@pytest.mark.parametrize(
    ("trainer", "nodes", "devices", "line"),
    [
        ("devices: 4", 4, 4, "trainer.num_nodes=4: not read from the source; "),
        ("num_nodes: 4", 4, 4, "trainer.devices=4: not read from the source; "),
        (
            "precision: bf16",
            2,
            8,
            "trainer.num_nodes=2 and trainer.devices=8: not read from the source; ",
        ),
    ],
)
def test_gpus_that_a_job_file_gives_stay(
    trainer: str,
    nodes: int,
    devices: int,
    line: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        f"trainer: {{{trainer}}}\n"
        "model: {tensor_model_parallel_size: 4, pipeline_model_parallel_size: 4, fp8: true}\n"
    )
    found = interop.from_file("nemo", file)
    assert (found.recipe.trainer.num_nodes, found.recipe.trainer.devices) == (nodes, devices)
    assert found.lost[0].startswith(line)
    words = ["trainer.num_nodes=4", "trainer.devices=8", "trainer.global_batch_size=64"]
    assert "not read from the source; tensor" not in said(
        capsys, "import", "nemo", str(file), *words
    )


def test_too_few_gpus_of_a_job_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(
        "trainer: {devices: 4, num_nodes: 1}\nmodel: {tensor_model_parallel_size: 8, fp8: true}\n"
    )
    assert main(["import", "nemo", str(file), "recipe=llama_8b"]) == 2
    assert (
        "trainer.num_nodes x trainer.devices = 4: must be a multiple of" in capsys.readouterr().err
    )


def test_an_exported_script_of_a_parallel_model_reads_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = fp8cfg.compose(["recipe=llama_8b", "precision=bf16_fp8"])
    file = tmp_path / "a.sh"
    file.write_text(interop.to_text("megatron", recipe)[0])
    assert recipe.trainer.strategy.size > 1
    assert (
        main(["import", "megatron", str(file)]) == 0
        and "trainer:\n  devices: 2\n" in capsys.readouterr().out
    )
    assert interop.from_file("megatron", file, recipe) == (recipe, (), ())
