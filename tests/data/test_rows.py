from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest

from fp8cfg.data import DataError, load_corpus
from fp8cfg.data.sources import kind_of, table_documents, table_rows

ROWS = [{"text": "first", "n": 1}, {"text": "zwölf", "n": 2}, {"text": "", "n": 3}]


def test_each_line_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, ROWS)) + "\n", "utf-8")
    corpus = load_corpus("jsonl", tmp_path / "a.jsonl")
    assert bytes(corpus.tokens[:5].astype("u1")) == b"first" and corpus.documents.tolist() == [0, 6]
    assert f"'text' of {tmp_path / 'a.jsonl'}, 2 documents" in corpus.description
    (tmp_path / "b.jsonl").write_text('{"body": "more", "text": 1}')
    assert list(table_documents("jsonl", str(tmp_path / "b.jsonl"), "body").texts) == [b"more"]
    assert sum(1 for _ in table_rows("jsonl", str(tmp_path))[0]) == 4


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", r"a.jsonl:2: not JSON \(.*, column 2\)$"),
        ('{"text": ', r"a.jsonl:2: not JSON \(Expecting value, column 9\)$"),
        ("[1]", "a.jsonl:2: a JSON list; each line has an object"),
        ('{"texts": "x"}', "has no 'text'; did you mean 'texts'"),
        ('{"q": 1, "answer": 2}', "has no 'text'; it has 'q', 'answer'"),
        ('{"text": null}', "'text' is NoneType, not text"),
        (b'"\xff"', "not UTF-8"),
        ("[" * 100_000, "nested too deep"),
        ("{}", "it has nothing"),
    ],
)
def test_a_line_that_is_no_document_is_named(tmp_path: Path, line: str | bytes, says: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "fine"}\n' + (line if isinstance(line, bytes) else line.encode())
    )
    with pytest.raises(DataError, match=says) as caught:
        load_corpus("jsonl", tmp_path)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tables_is_refused(tmp_path: Path) -> None:
    for kind, says in (
        ("jsonl", "no .jsonl file below this folder"),
        ("parquet", "no .parquet file below"),
    ):
        with pytest.raises(DataError, match=says):
            load_corpus(kind, tmp_path)


def test_without_the_library_tables_other_than_jsonl_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("datasets", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    (tmp_path / "a.jsonl.zst").write_bytes(b"")
    for kind, package in (("parquet", "pyarrow"), ("dataset", "datasets"), ("jsonl", "pyarrow")):
        with pytest.raises(
            DataError,
            match=rf"needs the package {package}; pip install 'fp8cfg\[data\]', or write it as JSONL",
        ):
            load_corpus(kind, tmp_path)


def test_compressed_lines_are_those_of_the_file(tmp_path: Path) -> None:
    plain = "\n".join(map(json.dumps, ROWS)).encode()
    (tmp_path / "a.jsonl").write_bytes(plain)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain))
    digest = load_corpus("jsonl", tmp_path / "a.jsonl").sha256
    assert load_corpus("jsonl", tmp_path / "*.gz").sha256 == digest
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain)[:-12])
    with pytest.raises(
        DataError, match=r"a.jsonl.gz: cannot be read \(Compressed file ended before"
    ):
        load_corpus("jsonl", tmp_path / "a.jsonl.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(plain)
    with pytest.raises(DataError, match=r"a.jsonl.gz: cannot be read \(Not a gzipped file"):
        load_corpus("jsonl", tmp_path / "a.jsonl.gz")
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(str(tmp_path / "a.jsonl.zst"), compression="zstd") as file:
        file.write(plain)
    assert load_corpus("jsonl", tmp_path / "a.jsonl.zst").sha256 == digest
    (tmp_path / "a.jsonl.zst").write_bytes((tmp_path / "a.jsonl.zst").read_bytes()[:-3])
    with pytest.raises(DataError, match=r"a.jsonl.zst: (cannot be read|not JSON)"):
        load_corpus("jsonl", tmp_path / "a.jsonl.zst")


def test_a_pattern_names_files_and_links(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": name}))
    (tmp_path / "link-d.jsonl").symlink_to(tmp_path / "a.jsonl")
    assert sorted(table_documents("jsonl", f"{tmp_path}/[ab].jsonl", "text").texts) == [b"a", b"b"]
    assert sorted(table_documents("jsonl", f"{tmp_path}/*-d.jsonl", "text").texts) == [b"a"]
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "d.jsonl").symlink_to(tmp_path / "a.jsonl")
    with pytest.raises(
        DataError, match=r"1 links are not followed, a pattern such as .*/links/\*.jsonl finds them"
    ):
        load_corpus("jsonl", tmp_path / "links")
    with pytest.raises(DataError, match=r"x\*.jsonl: no .jsonl file has such a name"):
        load_corpus("jsonl", tmp_path / "x*.jsonl")


def test_parquet_and_saved_datasets_have_the_documents_of_jsonl(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_list(ROWS)
    made.to_parquet(str(tmp_path / "p" / "a.parquet"))
    made.save_to_disk(str(tmp_path / "d"))
    datasets.DatasetDict({"test": made, "train": made}).save_to_disk(str(tmp_path / "both"))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    digest = load_corpus("jsonl", tmp_path / "a.jsonl").sha256
    assert (
        load_corpus("parquet", tmp_path / "p").sha256
        == load_corpus("dataset", tmp_path / "d").sha256
        == digest
    )
    assert load_corpus("dataset", tmp_path / "both" / "train").sha256 == digest
    assert [kind_of(str(tmp_path / name)) for name in ("p", "d", "a.jsonl")] == [
        "parquet",
        "dataset",
        "jsonl",
    ]
    with pytest.raises(
        DataError, match=r"holds the splits test, train; give the folder of one, as in .*both/test"
    ):
        load_corpus("dataset", tmp_path / "both")
    (tmp_path / "p" / "a.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        load_corpus("parquet", tmp_path / "p")
    with pytest.raises(DataError, match=r"no folder that Dataset.save_to_disk wrote"):
        load_corpus("dataset", tmp_path / "p")


CSV = 'n,text\r\n1,"first, with ""quotes"""\r\n2,"two\nlines"\r\n3,\r\n'


@pytest.mark.parametrize("end", ["csv", "csv.gz"])
def test_rows_of_csv_are_documents(tmp_path: Path, end: str) -> None:
    raw = ("\ufeff" + CSV).encode()  # as Excel writes it
    path = tmp_path / f"a.{end}"
    path.write_bytes(gzip.compress(raw) if end.endswith("gz") else raw)
    for at in (path, tmp_path):
        texts = list(table_documents("csv", str(at), "text").texts)
        assert texts == [b'first, with "quotes"', b"two\nlines"]
    assert kind_of(str(path)) == kind_of(str(tmp_path)) == "csv"


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("text\nfine\na,b", r"a.csv:3: doesn't have the 1 cells of the header"),
        ("n,text\n1,fine\n2", r"a.csv:3: doesn't have the 2 cells of the header"),
        ("body\nfine", r"a.csv:2: has no 'text'; it has 'body'"),
        ('text\n"not closed', r"a.csv:\d: not CSV in UTF-8"),
        ("text\n\udcff", r"a.csv:\d: not CSV in UTF-8"),
        ("text\n", "a.csv: empty, there is no text in it"),
    ],
)
def test_csv_that_is_no_table_is_an_error(tmp_path: Path, rows: str, says: str) -> None:
    (tmp_path / "a.csv").write_bytes(rows.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=says) as caught:
        load_corpus("csv", tmp_path / "a.csv")
    assert "\n" not in str(caught.value)


def test_a_long_cell_of_csv_is_read(tmp_path: Path) -> None:
    text = "word " * 100_000
    (tmp_path / "a.csv").write_text(f"text\n{text}\n")
    assert len(load_corpus("csv", tmp_path / "a.csv").tokens) == len(text) + 1


def test_conversations_are_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"messages": []}')
    with pytest.raises(DataError, match="it has 'messages'; for conversations set data=chat"):
        load_corpus("jsonl", tmp_path / "a.jsonl")


def test_packed_text_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"packed"))
    assert bytes(load_corpus("text", tmp_path).tokens[:6].astype("u1")) == b"packed"
    (tmp_path / "a.txt.gz").write_bytes(b"not packed")
    with pytest.raises(DataError, match=r"a\.txt\.gz: cannot be read"):
        load_corpus("text", tmp_path)
