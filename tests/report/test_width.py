"""What a person reads is at most 80 columns wide, whatever the recipe; words that cannot be broken, such as paths, apart."""

from __future__ import annotations

import io
import re
from itertools import cycle
from pathlib import Path

import pytest

from fp8cfg import compose
from fp8cfg.__main__ import main
from fp8cfg.backends.choice import Choice, Hardware
from fp8cfg.cli.help import choices
from fp8cfg.planning.layout import rank_part
from fp8cfg.planning.preflight import choose_backend
from fp8cfg.report.run_header import header, planned_tables, short_header
from fp8cfg.schema.sections import Section, print_sections
from fp8cfg.schema.tables import table, wrapped
from tests.support.every_recipe import every_recipe

PRESETS = choices("precision")
FP8 = ["precision=bf16_fp8", "model.num_layers=16"]
MANY = "fp8.exclude=['*.linear_fc2','layers.0.*','layers.1.*','layers.2.mlp.*','layers.*.self_attention.linear_proj']"
ENDS = [["--gpu", "b200"], ["--gpu", "a100-80"], ["--tree"]]
VERBS = [
    ["list"],
    ["list", "recipe"],
    ["list", "precision"],
    ["list", "data"],
    ["doctor"],
    ["help"],
    ["check", f"name={'long-name_' * 6}1", *FP8],
    ["explain", "fp8.exclude", *FP8, MANY],
    ["explain", "fp8", *FP8, MANY],
    ["explain", "log.dir", f"log.dir={'word/' * 9}"],
    ["explain", "optim.betas"],
    ["diff", *FP8, MANY, "--", "precision=fp16"],
    ["diff", "recipe=llama_405b", "precision=bf16_nvfp4", "--", "recipe=llama_tiny"],
    ["diff", *FP8, MANY, "--", "precision=fp16", "--tree"],
    ["plan", *FP8, MANY],
    ["plan", *FP8, MANY, "--tree"],
    ["plan", "recipe=llama_405b", "precision=fp16", "--tree"],
    ["plan", *FP8, MANY, "--gpu", "h100"],
    ["plan", "recipe=llama_405b", "precision=bf16_fp8_block", "--gpu", "rtx4090"],
    *(
        [
            "plan",
            "precision=bf16_fp8",
            f"opt_level={level}",
            "trainer.micro_batch_size=2",
            "--gpus",
            "8",
            "--gpu",
            "h100",
        ]
        for level in ("O1", "O2", "O3")
    ),
    ["plan", "precision=bf16_fp8", "opt_level=O2", "backend=msamp", "--gpu", "h100"],
    [
        "plan",
        "precision=bf16_fp8_current",
        "fp8.params=false",
        "backend=torchao",
        "opt_level=O2",
        "--tree",
    ],
    *(
        ["plan", f"precision={p}", "model.num_layers=32", *end]
        for p, end in zip(PRESETS, cycle(ENDS), strict=False)
    ),
]


@pytest.mark.parametrize("argv", VERBS, ids=" ".join)
def test_a_verb_that_reads(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out = main(argv), capsys.readouterr()
    assert code == (2 if "error: " in out.err else 0) and len(out.out.splitlines()) >= 1
    assert [line for line in out.out.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("words", every_recipe("precision=bf16_fp8_current"), ids=" ".join)
def test_plans_of_every_recipe(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    test_a_verb_that_reads(["plan", *words, "--gpu", "h100"], capsys)


@pytest.mark.parametrize(
    "words",
    [["backend=torchao", "fp8.params=false"], ["backend=native"], ["fp8.min_coverage=0.2"]],
    ids=" ".join,
)
def test_what_a_run_says_before_it_begins(words: list[str]) -> None:
    recipe = compose(["precision=bf16_fp8_current", *words])
    cpu = Hardware("cpu")
    choice = choose_backend(recipe, cpu, rank_part(recipe, 1))
    head = header(recipe, cpu, choice)
    assert f"backend:    {choice.backend} " in head and len(head.splitlines()) <= 12
    text = f"{head}\n{short_header(recipe, choice)}\n{planned_tables(recipe, cpu, choice)}"
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert "planned coverage" in text and "memory per rank" in text


@pytest.mark.parametrize("name", PRESETS)
def test_a_header_has_at_most_15_lines(name: str) -> None:
    """With the lines of the run folder and the data, which take three."""
    words = [f"precision={name}", "model.num_layers=16"]
    recipe = compose(words)
    choice = Choice("native", "emulate", "auto; a CPU emulates FP8")
    assert len(header(recipe, Hardware("cpu"), choice).splitlines()) <= 12


def test_errors_are_one_line_each_however_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "precision=bf16_mxfp8", "--gpu", "h100"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) > 80 and all(line.startswith("error: ") for line in lines)


@pytest.mark.parametrize(
    "argv", [["explain", "data.path", "data=text"], ["diff", "data=tiny", "--", "data=text"]]
)
def test_a_path_is_not_broken(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = f"/{'long/' * 20}file"
    assert main([*argv, f"data.path={path}"]) == 0
    assert path in capsys.readouterr().out


def test_text_is_broken_at_spaces_and_after_commas() -> None:
    assert wrapped("a" * 60 + " " + "b" * 30, "- ", "  ").splitlines() == [
        f"- {'a' * 60}",
        f"  {'b' * 30}",
    ]
    assert wrapped("x=[" + "aaaa," * 20 + "]").splitlines() == [
        "x=[" + "aaaa," * 15,
        "aaaa," * 5 + "]",
    ]
    assert wrapped(str(Path("/") / ("p" * 100))) == f"/{'p' * 100}"


def test_the_last_column_of_a_table_goes_on_below() -> None:
    assert table(["name", "why"], [["n" * 40, "short"], ["m", "word " * 9]]).splitlines() == [
        "name" + " " * 38 + "why",
        "n" * 40 + "  short",
        "m" + " " * 41 + "word word word word word word word",
        " " * 42 + "word word",
    ]
    assert (
        table(["name", "why"], [["n" * 70, "a b c d e f"]]).splitlines()[1]
        == "n" * 70 + "  a b c d e f"
    ), "no room to break it in"
    assert table(["a" * 39, "b" * 40], [["c", "1"]], right=[1]).splitlines() == [
        f"{'a' * 39} {'b' * 40}",
        f"c{' ' * 78}1",
    ]
    assert table(["name", "why"], [["n" * 50, f"as {'w' * 29}"]]).splitlines()[1:] == [
        "n" * 50 + "  as",
        " " * 51 + "w" * 29,
    ]


@pytest.mark.parametrize("columns", [40, 180])
def test_a_terminal_is_filled_and_nothing_is_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    why = "word " * 30
    lines = table(["name", "why"], [["n" * 15, why]]).splitlines()
    assert len(lines) == {40: 9, 180: 2}[columns] and max(map(len, lines)) <= columns
    assert " ".join(lines[1:]).split()[1:] == why.split()
    text = wrapped(why, "note: ")
    assert max(map(len, text.splitlines())) <= columns and text.split()[1:] == why.split()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_sections_have_headings_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = [Section("memory", [table(["a", "b"], [["1", "2"]]), "total: 3"])]
    print_sections(sections)
    assert capsys.readouterr().out == "a  b\n1  2\ntotal: 3\n"
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_sections(sections)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert shown.startswith("memory ───") and "\na  b\n1  2\ntotal: 3\n" in shown
    assert "\x1b[1ma  b" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    print_sections(sections)
    assert terminal.getvalue().endswith("a  b\n1  2\ntotal: 3\n")
