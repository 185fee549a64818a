"""The kind of data follows from data.path, and a file of another kind is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.data import sources
from fp8cfg.schema import data_kinds
from fp8cfg.schema.data_kinds import kind_at
from tests.support.verbs import refused


def test_both_packages_have_the_same_endings() -> None:
    tables = {kind: data_kinds.ENDINGS[kind] for kind in data_kinds.TABLES}
    assert tables == sources.SUFFIXES
    assert data_kinds.ENDINGS["text"] == sources.TEXT_SUFFIXES


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("my.jsonl", "jsonl"),
        ("shards/*.JSONL.gz", "jsonl"),
        ("my.jsonl.zst", "jsonl"),
        ("my.csv", "csv"),
        ("a/my.parquet", "parquet"),
        ("corpus.bin", "tokens"),
        ("corpus.idx", "tokens"),
        ("my.txt", "text"),
        ("my.txt.gz", "text"),
        ("my.gz", None),
        ("my.json", None),
        ("nowhere", None),
        ("nul\0", None),
    ],
)
def test_the_kind_follows_from_the_ending(path: str, kind: str | None) -> None:
    assert kind_at(path) == kind


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["a.jsonl", "README.md"], "jsonl"),
        (["deep/a.parquet", "deep/b.parquet", "other.log"], "parquet"),
        (["a.txt", "b.py"], "text"),
        (["a.jsonl", "a.parquet"], None),
        (["dataset_info.json", "data-00000-of-00001.arrow"], "dataset"),
        (["a.bin", "a.idx"], "tokens"),
        (["a.log"], None),
        ([], None),
    ],
)
def test_the_kind_of_a_folder_follows_from_its_files(
    names: list[str], kind: str | None, tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert kind_at(str(tmp_path)) == kind


def test_a_prefix_of_token_files(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    assert kind_at(str(tmp_path / "corpus")) == "tokens"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["data.path=my.jsonl"], "jsonl"),
        (["data.path=my.csv", "data.text_key=body"], "csv"),
        (["data.path=my.parquet", "data.streaming=true", "data.validation_path=v"], "parquet"),
        (["data.mixture=[{path: a.bin, weight: 1}, {path: b.bin, weight: 2}]"], "tokens"),
        (["task=sft", "data.path=my.csv"], "chat"),
        (["data=jsonl", "data.path=my.txt"], "jsonl"),
    ],
)
def test_the_default_corpus_gives_way_to_a_path(words: list[str], kind: str) -> None:
    assert fp8cfg.compose(words).data.name == kind


def test_yaml_infers_the_kind() -> None:
    assert fp8cfg.from_yaml("data: {path: my.jsonl}").data.name == "jsonl"


PATH = "data.path=my.jsonl"
KINDS = "set data to its kind: jsonl, csv, parquet, tokens, text, dataset or chat"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            f"data=text {PATH}",
            f"{PATH}: needs data=jsonl, but data=text would train on the raw file; set data=jsonl",
        ),
        (
            "data=text data.path=my.parquet",
            "data.path=my.parquet: needs data=parquet, but data=text would train on the raw file; set"
            " data=parquet",
        ),
        (f"data=csv {PATH}", f"{PATH}: needs data=jsonl, not data=csv; set data=jsonl"),
        (
            "data=jsonl data.path=a data.validation_path=v.csv",
            "data.validation_path=v.csv: needs data=csv, not data=jsonl; set data=csv",
        ),
        (f"data=tiny {PATH}", f"{PATH}: has no effect with data=tiny; set data=jsonl"),
        ("data.path=my.json", f"data.path=my.json: has no effect with data=stdlib; {KINDS}"),
        (
            "data.mixture=[{path:a.csv,weight:1},{path:b.txt,weight:2}]",
            "data.mixture=[{path: a.csv, weight: 1}, {path: b.txt, weight: 2}]: has no effect with"
            f" data=stdlib; {KINDS}",
        ),
    ],
)
def test_a_path_of_another_kind(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "check", *words.split()) == [line]


def test_python_names_the_kind_too() -> None:
    recipe = fp8cfg.Recipe()
    recipe.data.path = "my.jsonl"
    with pytest.raises(fp8cfg.ConfigError, match="set data=jsonl"):
        recipe.check()
