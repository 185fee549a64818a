"""Accelerate's file on the command line: import, export, and one line for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from tests.support.verbs import refused

GOLDEN = """# Imported from Accelerate. Settings dropped or with another meaning:
# machine_rank=1: belongs to the launch; use torchrun's arguments
# fp8_config.marginn: no such key of Accelerate; did you mean
#   'fp8_config.margin'?
# Exported by fp8cfg {version}.
recipe: llama_8b
precision: bf16_fp8
fp8:
  margin: 2
  amax_history_len: 16
  first_step: te
  params: false
  output_layer: true
backend: te
"""


def test_import_and_export_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "accelerate.yaml"
    file.write_text(
        "mixed_precision: fp8\nmachine_rank: 1\nfp8_config: {backend: TE, margin: 2, marginn: 3, amax_history_length: 16}\n"
    )
    assert main(["import", "accelerate", str(file), "recipe=llama_8b"]) == 0
    out = capsys.readouterr()
    assert (
        out.out == GOLDEN.format(version=fp8cfg.__version__)
        and out.err
        == "warning: fp8_config.marginn: no such key of Accelerate; did you mean 'fp8_config.margin'?\n"
    )
    back = tmp_path / "recipe.yaml"
    back.write_text(out.out)
    recipe = fp8cfg.from_yaml(back)
    assert (recipe.fp8.margin, recipe.backend) == (2, "te")
    assert main(["export", "accelerate", str(back)]) == 0
    again = capsys.readouterr()
    assert (
        again.err == ""
        and "  margin: 2\n" in again.out
        and again.out.startswith(
            f"# Exported by fp8cfg {fp8cfg.__version__} for Accelerate.\nmixed_precision: fp8\n"
        )
    )
    assert main(["export", "accelerate", "precision=bf16_fp8", "fp8.first_step=in_time"]) == 0
    noted = capsys.readouterr()
    assert (
        noted.err
        == "note: 3 of its keys have no counterpart in Accelerate; they are comments in the text\n"
        and "# fp8.params=True: Accelerate has no key for it\n" in noted.out
    )
    assert "# fp8.first_step=in_time: Transformer Engine starts with scale 1\n" in noted.out


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.yaml", b"\xff\xfe\x00\x01", "is not UTF-8 text"),
        ("a.yaml", b"- 1\n- 2\n", "expected keys and values, got list"),
        ("a.yaml", b"", "is empty"),
        (
            "a.yaml",
            b"a: !!python/object:os.system {}\n",
            "line 1: not valid YAML (could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system')",
        ),
        (
            "a.yaml",
            b"a: !!python/tuple [1, 2]\n",
            "line 1: not valid YAML (could not determine a constructor for the tag 'tag:yaml.org,2002:python/tuple')",
        ),
        ("a.yaml", b"x" * 300_000, "larger than 256 KB; not a configuration"),
        (
            "a.json",
            b"{",
            "line 1: not valid JSON (Expecting property name enclosed in double quotes)",
        ),
        ("a.json", b'{"fp8": 1, "a": {"b": 1, "b": 2}}', "duplicate key 'b'"),
        (
            "a.json",
            b'{"margin": ' + b"9" * 5000 + b"}",
            "a number has too many digits",
        ),
        (
            "a.yaml",
            b"mixed_precison: fp8",
            "mixed_precison: no such key of Accelerate; did you mean 'mixed_precision'?",
        ),
        (
            "a.yaml",
            b"fp8_config: TE",
            "fp8_config=TE: is a section, with keys such as fp8_config.backend",
        ),
        (
            "a.py",
            b"TERecipeKwargs(**x)",
            "TERecipeKwargs(**x): x is not read; write the keywords",
        ),
        ("a.json", b"[1]", "expected keys and values, got list"),
        ("a.json", b"[" * 100_000, "nested too deeply"),
        (
            "a.yaml",
            b"a: [\n",
            "line 2: not valid YAML (expected the node content, but found '<stream end>')",
        ),
        ("a.yaml", b"a\0b: 1\n", "is not text"),
        (
            "a.yaml",
            b"# nothing\n",
            "has no precision key of Accelerate, such as mixed_precision",
        ),
    ],
)
def test_files_that_are_none(
    name: str, content: bytes, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    assert refused(capsys, "import", "accelerate", str(file)) == [f"{file}: {line}"]


@pytest.mark.parametrize(
    ("argv", "lines"),
    [
        (
            [],
            [
                "import: needs a project; choose from accelerate, deepspeed, nemo, bridge, megatron, torchtitan, te"
            ],
        ),
        (["acelerate", "x"], ["acelerate: no such project; did you mean 'accelerate'?"]),
        (["accelerate"], ["import accelerate: needs a file, or arguments after --"]),
        (
            ["accelerate", "nowhere.yaml"],
            ["nowhere.yaml: cannot be read (No such file or directory)"],
        ),
        (["accelerate", "a", "b"], ["import accelerate: b: a second file"]),
        (
            ["accelerate", "a", "--", "b=1"],
            ["import accelerate: needs a file or arguments after --, not both"],
        ),
        (["accelerate", "--", "mixed_precision"], ["mixed_precision: expected key=value"]),
        (
            ["accelerate", "x", "precision=bf16"],
            ["precision=: is what is imported; drop one of the two"],
        ),
        (["accelerate", "--json", "--python", "x"], ["import: --json and --python; choose one"]),
        (["accelerate", "tests"], ["tests: is a folder; expected a file"]),
        (
            ["nemo", "--", "bf16_wiht_fp8_mixed"],
            [
                "precision=bf16_wiht_fp8_mixed: no such precision preset; did you mean 'bf16_with_fp8_mixed'?"
            ],
        ),
    ],
)
def test_mistakes(
    argv: list[str],
    lines: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert refused(capsys, "import", *argv) == lines


def test_export_for_a_project_refuses_what_it_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "export", "accelerate", "precision=bf16_fp8_block") == [
        "fp8.scaling=block: Accelerate has no such scaling; set one of delayed and mxfp8 (TE) or current (torchao)"
    ]
    assert refused(capsys, "export", "accelerate", "--python") == [
        "--python: not with accelerate, whose files have one form"
    ]
    assert refused(capsys, "export", "acelerate", "fp8.margn=1") == [
        "acelerate: no such project; did you mean 'accelerate'?",
        "fp8.margn: no such key; did you mean 'fp8.margin'?",
    ]
