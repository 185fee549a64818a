"""`check`: one line for a recipe that can be, every problem for one that cannot."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.planning import preflight
from tests.support.verbs import loads, refused, said

BYTES = "data.tokenizer=bytes"
Out = pytest.CaptureFixture[str]
DATA = "data: stdlib, the source of Python's standard library, tokenizer bytes\n"


@pytest.fixture(autouse=True)
def no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "GPUS", tmp_path / "gpus")


def notes(capsys: Out, *argv: str) -> list[str]:
    """The notes on a recipe that can be."""
    code, out = main(["check", *argv]), capsys.readouterr()
    assert code == 0 and out.out.startswith("ok: ")
    return [line.removeprefix("note: ") for line in out.err.splitlines()]


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "ok: llama_tiny, bf16"),
        (
            ["precision=fp16_fp8_current", "fp8.exclude=['*.linear_fc2']"],
            "ok: llama_tiny, fp16, FP8 current in 6 of 17 linear layers",
        ),
    ],
)
def test_a_recipe_that_can_be(capsys: Out, argv: list[str], line: str) -> None:
    assert said(capsys, "check", *argv) == f"{line}\n{DATA}"


def test_a_file(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision/mine.yaml").write_text("compute: bf16\nfp8: {enabled: true}\n")
    file = tmp_path / "my.yaml"
    file.write_text("recipe: llama_1b\nprecision: mine\n")
    assert said(
        capsys, "check", str(file), "--config-dir", str(tmp_path), "trainer.devices=1", BYTES
    ).startswith("ok: llama_1b, bf16, FP8 delayed in ")
    assert refused(capsys, "check", str(file)) == [
        f"{file}:2: precision=mine: no such precision preset; see fp8cfg list precision"
    ]


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            ["fp8.margin=1", "optim.warmup_steps=999", "storage.exp_avg_sq=fp8"],
            [
                "optim.warmup_steps=999: longer than trainer.max_steps=100; set it to 100 or less",
                "fp8.margin=1: has no effect with fp8.enabled=false; set precision=bf16_fp8 or fp8.enabled=true",
                "storage.exp_avg_sq=fp8: second moments do not fit one FP8 scale per tensor, and training diverges; set it to fp8_block",
            ],
        ),
        (
            [
                "precision=bf16_fp8",
                "fp8.exclude=['*.linear_fc9']",
                "fp8.dot_product_attention=true",
                "fp8.multi_head_attention=true",
            ],
            [
                "fp8.exclude=*.linear_fc9: matches no linear layer; did you mean 'layers.*.mlp.linear_fc2'?",
                "fp8.multi_head_attention=true: needs FP8 outputs of the projections: backend=te; remove it",
            ],
        ),
        (
            ["precision=bf16_fp8", "storage.rounding=stochastic"],
            [
                "storage.rounding=stochastic: has no effect, FP8 layers round their own weights; remove it"
            ],
        ),
        (
            ["precision=bf16_fp8", "backend=msamp", "trainer.strategy.sequence_parallel=true"],
            [  # and nothing of values that give way
                "trainer.strategy.sequence_parallel=true: has no effect with tensor_model_parallel_size=1; set it to false"
            ],
        ),
        (
            [
                "recipe=llama_8b",
                BYTES,
                "trainer.strategy.pipeline_model_parallel_size=2",
                "opt_level=O2",
            ],
            [
                "opt_level=O2: works with data parallelism only, not with pipeline_model_parallel_size=2, context_parallel_size=2; set opt_level=null"
            ],
        ),
        (
            ["fp8.margn=1", "precision=bf16_pf8"],
            [
                "fp8.margn: no such key; did you mean 'fp8.margin'?",
                "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
            ],
        ),
        (
            ["nonsense", "fp8.margn=1"],
            [
                "nonsense: no command, recipe file or key=value; fp8cfg --help has them",
                "fp8.margn: no such key; did you mean 'fp8.margin'?",
            ],
        ),
        (["nowhere.yaml"], ["nowhere.yaml: cannot be read (No such file or directory)"]),
        (["--config-dir", "nowhere"], ["--config-dir nowhere: no such folder"]),
        (
            ["--full"],
            ["--full: no such option; choose from --config-dir, --json, --help, --version"],
        ),
        ([""], ["'': not of the form key=value, nor a path; remove it"]),
    ],
)
def test_every_problem_at_once(capsys: Out, argv: list[str], lines: list[str]) -> None:
    assert refused(capsys, "check", *argv) == lines


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "opt_level=O3",
            "opt_level=O3: needs more than O2's 6 B/param on one rank; storage.shard=zero1 or zero2 shards its state",
        ),
        (
            "fp8.params=false opt_level=O2 optim.lr=3e-5",
            "optim.min_lr=3e-06: storage.weight=fp16_scaled loses most updates below 7.6e-06 at the end of the schedule; "
            "storage.rounding=stochastic keeps their mean",
        ),
        (
            "storage.exp_avg_sq=bf16 optim.betas=[0.9,0.997]",
            "optim.betas=[0.9, 0.997]: storage.exp_avg_sq=bf16 follows shrinking gradients only in steps of two; "
            "up to 0.9961 it follows exactly",
        ),
        (
            "storage.shard=zero1",
            "storage.shard=zero1: no effect on one data-parallel rank",
        ),
    ],
)
def test_what_may_not_be_meant_is_noted_in_one_line(capsys: Out, words: str, line: str) -> None:
    assert main(["check", "precision=bf16_fp8", *words.split()]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (
        f"ok: llama_tiny, bf16, FP8 delayed in 16 of 17 linear layers\n{DATA}",
        f"note: {line}\n",
    )


def test_ranks_are_those_of_the_recipe(capsys: Out) -> None:
    assert notes(
        capsys,
        "precision=bf16_fp8",
        "opt_level=O3",
        "storage.shard=zero1",
        "trainer.devices=2",
        "trainer.global_batch_size=32",
    ) == [
        "trainer.devices=2: needs 2 GPUs, this machine has none; you can still run fp8cfg plan here"
    ]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (
            f"recipe=llama_8b {BYTES} trainer.strategy.pipeline_model_parallel_size=2",
            [
                "trainer.devices=8: needs 8 GPUs, this machine has none; you can still run fp8cfg plan here"
            ],
        ),
        ("trainer.accelerator=cuda", ["trainer.accelerator=cuda: this machine has no NVIDIA GPU"]),
        ("trainer.accelerator=cpu trainer.devices=2 trainer.micro_batch_size=8", []),
        ("precision=bf16_fp8 backend=te", ["backend=te: no kernels; set backend=native"]),
        ("data=text data.path=nowhere", ["data.path=nowhere: no such file or folder here"]),
        (
            "data=text data.path=there.idx data.validation_path=gone",
            ["data.validation_path=gone: no such file or folder here"],
        ),
        (
            "data=jsonl data.mixture=[{path:there.idx,weight:1},{path:gone,weight:1}]",
            ["data.mixture[1].path=gone: no such file or folder here"],
        ),
        (
            "data=jsonl data.path=*.nope data.validation_path=*.idx",
            ["data.path=*.nope: no such file or folder here"],
        ),
        ("data=tokens data.path=there", ["data.path=there: there.bin not found"]),
        (
            "data=tokens data.path=gone.bin",
            ["data.path=gone.bin: gone.bin and gone.idx not found"],
        ),
        (
            "data.tokenizer=gone model.weights=there.idx",
            ["data.tokenizer=gone: no such file or folder here"],
        ),
        ("model.weights=gone", ["model.weights=gone: no such file or folder here"]),
        ("model.weights=hf://a/b", []),
        (
            "model.weights=empty",
            [
                "model.weights=empty: has neither model.safetensors nor model.safetensors.index.json; copy the weights there, or set model.weights=null to start from random weights"
            ],
        ),
        ("log.dir=there.idx/runs", ["log.dir=there.idx/runs: {tmp}/there.idx is not a folder"]),
        ("log.dir=new/runs", []),
        ("model.vocab_size=257", []),
        (
            "data=tokens data.path=there model.vocab_size=32",
            ["data.path=there: there.bin not found"],
        ),
        (
            "model.vocab_size=256",
            [
                "model.vocab_size=256: too small for bytes and the end token, which data=stdlib uses without data.tokenizer; set it to 272 or more"
            ],
        ),
        ("log.folder=there.idx/run", ["log.folder=there.idx/run: {tmp}/there.idx is not a folder"]),
        (
            "-cd empty",
            ["--config-dir empty: has no presets, such as precision/mine.yaml"],
        ),
        ("-cd own", []),
    ],
)
def test_what_is_not_here_is_noted(
    capsys: Out, words: str, wanted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8cfg.backends.te.rules.unavailable", lambda: "no kernels")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.idx").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "own/trainer/strategy").mkdir(parents=True)
    (tmp_path / "own/trainer/strategy/two.yaml").touch()
    assert notes(capsys, *words.split()) == [
        line.replace("{tmp}", str(tmp_path)) for line in wanted
    ]


def test_a_folder_without_weights_and_tokenizer(capsys: Out, tmp_path: Path) -> None:
    words = ["data=text", f"data.path={tmp_path}", f"model.weights={tmp_path}"]
    assert main(["check", *words]) == 0
    out, err = capsys.readouterr()
    text = " ".join(out.split())
    assert text.endswith(f"{tmp_path} (rows not read), no tokenizer.json in {tmp_path}")
    missing = (
        f"note: model.weights={tmp_path}: has neither model.safetensors nor",
        f"note: data.tokenizer=null: {tmp_path} has no tokenizer.json;",
    )
    for line, start in zip(err.splitlines(), missing, strict=True):
        assert line.startswith(start)
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "model.safetensors").touch()
    assert main(["check", *words]) == 0
    out, err = capsys.readouterr()
    assert " ".join(out.split()).endswith(f"(rows not read), tokenizer {tmp_path}") and err == ""


def test_gpus_are_counted_without_torch(capsys: Out, tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "gpus" / f"0000:{number}").mkdir(parents=True)
    assert (
        notes(
            capsys, "trainer.accelerator=cuda", "trainer.devices=4", "trainer.global_batch_size=64"
        )
        == []
    )
    assert notes(
        capsys, "trainer.devices=8", "trainer.num_nodes=2", "trainer.global_batch_size=256"
    ) == [
        "trainer.devices=8: needs 2 x 8 GPUs, this machine has 4; you can still run fp8cfg plan here"
    ]


def test_json(capsys: Out) -> None:
    out = json.loads(said(capsys, "check", "--json", "precision=bf16_fp8", "opt_level=O2"))
    assert out == {
        "ok": True,
        "recipe": "llama_tiny, bf16, FP8 delayed in 16 of 17 linear layers",
        "data": {
            "name": "stdlib",
            "paths": [],
            "weights": [],
            "validation_path": None,
            "tokenizer": "bytes",
        },
        "notes": ["fp8.params true -> false: the preset's value is changed to fit opt_level=O2"],
    }
    code, printed = main(["check", "--json", "precision=bf16_pf8", "nonsense"]), capsys.readouterr()
    assert (code, printed.err) == (2, "")
    assert json.loads(printed.out) == {
        "ok": False,
        "notes": [],
        "problems": [
            "nonsense: no command, recipe file or key=value; fp8cfg --help has them",
            "precision=bf16_pf8: no such precision preset; did you mean 'bf16_fp8'?",
        ],
    }


JSON = '{"recipe": "llama_tiny", "precision": "bf16_fp8",\n\t"fp8": {"margin": 1}, "name": "\\ud83d\\ude00"}'
"""As other tools write it: tabs, and a character beyond 16 bits as a pair of escapes."""


def test_a_file_in_json(capsys: Out, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(JSON.replace("\\ud83d\\ude00", "a\\u0062"))
    assert json.loads(said(capsys, "explain", "fp8.margin", str(file), "--json"))["layers"][-1] == {
        "layer": "recipe file",
        "value": 1,
        "at": {"file": str(file), "line": 2},
        "by": None,
    }
    file.write_text(JSON)
    assert refused(capsys, "check", str(file)) == [
        f"{file}:2: name=\U0001f600: use only letters, digits, '_', '.' and '-', at most 64 characters"
    ]
    said(
        capsys,
        "export",
        "--json",
        "--full",
        "--output",
        str(tmp_path / "full.json"),
        "precision=bf16_fp8_current",
    )
    assert said(capsys, "check", str(tmp_path / "full.json")).startswith(
        "ok: llama_tiny, bf16, FP8 current in "
    )
    for text, line in (
        ('{"a": 1, "a": 2}', "duplicate key 'a'"),
        ('{"a": 1', "line 1: not valid JSON (Expecting ',' delimiter)"),
        ("[1]", "expected keys and values, got list"),
        ('{"_target_": "os"}', "a recipe cannot name code"),
        ("[" * 9999, "not valid JSON (RecursionError)"),
        ('{"trainer": {"seed": ' + "9" * 5000 + "}}", "not valid JSON (ValueError)"),
    ):
        file.write_text(text)
        assert line in "\n".join(refused(capsys, "check", str(file)))


@pytest.mark.parametrize(
    "text",
    [
        "recipe: llama_tiny\nprecision: bf16_fp8\n",
        '{"precision":\t"bf16_fp8"}',
        "{precision: bf16_fp8}",
    ],
)
def test_standard_input(capsys: Out, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert (
        said(capsys, "check", "-", "fp8.margin=1")
        == f"ok: llama_tiny, bf16, FP8 delayed in 16 of 17 linear layers\n{DATA}"
    )
    assert said(capsys, "diff", "-", "--", "precision=bf16_fp8", "fp8.margin=1").endswith(
        "\nfp8.margin  0  1\n"
    )


def test_standard_input_that_is_none(capsys: Out, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert refused(capsys, "check", "-") == ["-: standard input is closed"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"fp8: {margn: 1}")))
    assert refused(capsys, "check", "-") == [
        "<stdin>:1: fp8.margn: no such key; did you mean 'fp8.margin'?"
    ]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert refused(capsys, "check", "-") == [
        "-: torchrun starts several processes, but only one can read standard input; use a file"
    ]


def test_words_of_other_tools_are_accepted(capsys: Out, tmp_path: Path) -> None:
    (tmp_path / "precision").mkdir()
    (tmp_path / "precision" / "mine.yaml").write_text("compute: fp32\n")
    for option in (["-cd", str(tmp_path)], [f"-cd={tmp_path}"]):
        assert said(capsys, "check", *option, "precision=mine") == f"ok: llama_tiny, fp32\n{DATA}"
    assert '"precision"' in said(capsys, "list", "precisions", "--json", "-cd", str(tmp_path))
    assert said(capsys, "list", "recipes") == said(capsys, "list", "recipe")
    for word, compile in (("false", "off"), ("true", "on"), ("off", "off"), ("auto", "auto")):
        assert said(capsys, "check", f"trainer.compile={word}") == f"ok: llama_tiny, bf16\n{DATA}"
        assert fp8cfg.compose([f"trainer.compile={word}"]).trainer.compile == compile
    assert (
        fp8cfg.from_yaml("trainer: {compile: true}").trainer.compile
        == fp8cfg.Trainer(compile=True).compile
        == "on"
    )
    assert '"value": "off"' in said(
        capsys, "explain", "trainer.compile", "trainer.compile=false", "--json"
    )


def test_neither_torch_nor_fiddle_is_loaded() -> None:
    assert not loads("check", "precision=bf16_fp8") & {"torch", "fiddle"}


def test_nvfp4_is_not_called_fp8(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "recipe=llama_tiny", "precision=bf16_nvfp4"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "ok: llama_tiny, bf16, NVFP4 in 16 of 17 linear layers"
