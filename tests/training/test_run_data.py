"""Data of a recipe: tokenizers, tables and mixtures, and that a resumed run has the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.checkpoint import resume_rules
from fp8cfg.data.corpus import prepare
from fp8cfg.data.tokenizer import BYTES
from fp8cfg.execution.executor import RunFailed
from fp8cfg.training.data import run_data
from tests.support.small import SMALL, small
from tests.support.tiny_tokenizer import write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_tokenizer(root / "tokenizer")
    for name in ("a", "b"):
        rows = [{"body": f"{n} " + name * 60} for n in range(60)]
        (root / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    prepare(root / "tokens", "jsonl", str(root / "a.jsonl"), "body", BYTES)
    return root


def recipe(folder: Path, *words: str) -> fp8cfg.Recipe:
    return small("data=jsonl", "data.text_key=body", *words)


def mixture(folder: Path, *weights: float) -> str:
    parts = ", ".join(
        f"{{path: {folder / name}.jsonl, weight: {weight}}}"
        for name, weight in zip("ab", weights, strict=True)
    )
    return f"data.mixture=[{parts}]"


def test_a_tokenizer_and_a_column_make_the_tokens(folder: Path) -> None:
    r = recipe(
        folder,
        f"data.path={folder}/a.jsonl",
        f"data.tokenizer={folder}/tokenizer",
        "model.vocab_size=400",
    )
    batches, _ = run_data(r)
    assert len(batches.tokenizer_sha256 or "") == 64 and batches.batch(0)[0].max() >= 256
    assert batches.state(0)["tokenizer_sha256"] == batches.tokenizer_sha256
    r.model.vocab_size = 272
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"data=jsonl: vocab_size=272 cannot hold the 400 tokens of .*: use 400 or more",
    ):
        run_data(r)


def test_another_tokenizer_is_not_resumed_and_a_moved_one_is(folder: Path, tmp_path: Path) -> None:
    words = (f"data.path={folder}/a.jsonl", "model.vocab_size=400")
    before = recipe(folder, *words, f"data.tokenizer={folder}/tokenizer")
    state = run_data(before)[0].state(3)
    moved, other = (
        recipe(folder, *words, f"data.tokenizer={write_tokenizer(tmp_path / str(size), size)}")
        for size in (400, 390)
    )
    resume_rules.refuse_changes(before, moved, [])
    assert run_data(moved)[0].resume(state) == 3
    with pytest.raises(ValueError, match=r"cannot resume: (corpus|tokenizer)_sha256 is"):
        run_data(other)[0].resume(state)
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"data.text_key=other: this run has data.text_key=body; start a new run",
    ):
        resume_rules.refuse_changes(
            before, fp8cfg.compose(["data.text_key=other"], base=before), []
        )


def test_a_mixture_deals_out_its_parts(folder: Path) -> None:
    batches, held_out = run_data(recipe(folder, mixture(folder, 3, 1)))
    tokens = torch.cat([batches.batch(step)[0] for step in range(10)])
    found = [{c for c in (97, 98) if c in row} for row in tokens.tolist()]
    assert found.count({97}) == 60 and found.count({98}) == 20
    assert (
        len(held_out) == 6
        and batches.state(0)["corpus_sha256"]
        != run_data(recipe(folder, mixture(folder, 1, 1)))[0].sha256
    )


def test_a_mixture_is_said_as_a_recipe_is(folder: Path) -> None:
    r = recipe(folder, mixture(folder, 0.7, 0.3))
    assert r.data.mixture == (
        {"path": f"{folder}/a.jsonl", "weight": 0.7},
        {"path": f"{folder}/b.jsonl", "weight": 0.3},
    )
    assert fp8cfg.Recipe(**json.loads(json.dumps(r.model_dump()))) == r
    r.data.mixture = [{"path": "x", "weight": 1}]
    assert r.data.mixture == ({"path": "x", "weight": 1},)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("data.mixture=[{path: a}]", "data.mixture[0].weight=null: must be a number above 0"),
        ("data.mixture=[{path: a, weight: 0}]", "weight=0: must be"),
        (
            "data.mixture=[{path: a, wieght: 1}]",
            "data.mixture[0].wieght: no such key; a part has path and weight",
        ),
        ("data.mixture=[{weight: 1}]", "needs a path"),
        (
            "data.mixture=[a]",
            "data.mixture=a: expected a mapping, as in {path: a, weight: 0.7}, got str",
        ),
        (
            "data.path=x data.mixture=[{path: a, weight: 1}]",
            "data.path=x: has no effect with data.mixture",
        ),
        (
            "data=tiny data.mixture=[{path: a, weight: 1}]",
            "data.mixture=[{path: a, weight: 1}]: has no effect with data=tiny",
        ),
        (
            "data=text data.path=x data.text_key=body",
            "data.text_key=body: has no effect with data=text",
        ),
        ("data=parquet", "data=parquet: needs data.path, a .parquet file"),
        (
            "data=chat data.path=x data.eod_mask_loss=true",
            "data.eod_mask_loss=true: has no effect with data=chat",
        ),
        (
            "data=tokens data.path=x data.eod_mask_loss=true",
            "token files do not store the end-of-document token; set data.tokenizer",
        ),
    ],
)
def test_what_contradicts_is_refused(words: str, says: str) -> None:
    said = re.split(r" (?=data)", words)
    with pytest.raises(fp8cfg.ConfigError) as caught:
        fp8cfg.compose(
            [
                *(w for w in SMALL if not w.startswith("data=")),
                *(["data=jsonl"] if "data=" not in words else []),
                *said,
            ]
        )
    assert says in str(caught.value)


def test_token_files_train_on_the_batches_of_their_source(folder: Path) -> None:
    source, files = (
        run_data(recipe(folder, f"data.path={folder}/a.jsonl")),
        run_data(small("data=tokens", f"data.path={folder}/tokens")),
    )
    assert all(
        torch.equal(a, b)
        for step in (0, 9)
        for a, b in zip(source[0].batch(step), files[0].batch(step), strict=True)
    )
    assert source[1].sha256 == files[1].sha256


@pytest.mark.parametrize(
    ("kind", "name"), [("tokens", "tokens"), ("chat", "talk.jsonl"), ("text", "talk.txt")]
)
def test_training_files_are_not_validated_on(kind: str, name: str, tmp_path: Path) -> None:
    row = {"prompt": "1?" * 40, "completion": "one"}
    (tmp_path / "talk.jsonl").write_text("\n".join([json.dumps(row)] * 4))
    (tmp_path / "talk.txt").write_text("1? one " * 200)
    prepare(tmp_path / "tokens", "text", str(tmp_path / "talk.txt"), "text", BYTES)
    words = (
        f"data={kind}",
        f"data.path={tmp_path}/{name}",
        f"data.validation_path={tmp_path}/{name}",
    )
    with pytest.raises(
        fp8cfg.ConfigError, match=r"validation_path: .* is also a file of data.path"
    ):
        run_data(small(*words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "data=jsonl data.path={}/a.jsonl data.validation_path={}/c.jsonl",
            "data=jsonl: {}/c.jsonl: no such file or folder; did you mean {}/",
        ),
        (
            "data=jsonl data.mixture=[{{path: {}/*.jsonl, weight: 1}}, {{path: {}/c, weight: 1}}]",
            "data=jsonl: {}/c: no such file or folder",
        ),
        ("data=jsonl data.path={}/*.nope", "data=jsonl: {}/*.nope: no .jsonl file has such a name"),
        ("data=chat data.path={}/*.nope", "data=chat: {}/*.nope: no .jsonl file has"),
        ("data=text data.path={}", "data=text: {}: no text file below this folder"),
        (
            "data=tokens data.path={}/token",
            "data=tokens: {}/token.idx: no such file or folder; did you mean {}/tokens.idx?",
        ),
        (
            "data=tiny data.tokenizer={}/tokenizr",
            "data.tokenizer={}/tokenizr: no such file or folder; did you mean {}/tokenizer?",
        ),
        (
            "data=tokens data.path={}",
            "data=tokens: {}: a folder; add the common name of a .bin/.idx pair in it (there is: tokens)",
        ),
    ],
)
def test_what_is_not_there_is_said_before_a_model_is_made(
    words: str,
    says: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("fp8cfg.building.builder.build", None)
    said = [
        word.replace("{}", str(folder)).replace("{{", "{").replace("}}", "}")
        for word in re.split(r" (?=data)", words)
    ]
    assert (
        main([*(w for w in SMALL if not w.startswith("data=")), *said, f"log.dir={tmp_path}/runs"])
        == 2
    )
    assert says.replace("{}", str(folder)) in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_data_that_cannot_be_used_leave_no_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line, from Python, and through an executor."""
    (tmp_path / "short.txt").write_text("a")
    words = [
        *(w for w in SMALL if not w.startswith("data=")),
        "data=text",
        f"data.path={tmp_path}/short.txt",
        f"log.dir={tmp_path}/runs",
    ]
    assert main(words) == 2 and "too few to train and validate" in capsys.readouterr().err
    recipe = fp8cfg.compose(words)
    with pytest.raises(fp8cfg.ConfigError, match="too few to train and validate"):
        fp8cfg.fit(fp8cfg.build(recipe))
    with pytest.raises(RunFailed) as caught:
        fp8cfg.run(recipe, SimpleNamespace(execute=lambda command: main(command.words())))
    assert caught.value.exit_code == 2 and [*tmp_path.iterdir()] == [tmp_path / "short.txt"]


@pytest.mark.parametrize("kind", ["jsonl", "chat"])
def test_a_corpus_too_small_to_validate_is_trained_on_where_nothing_validates(
    kind: str, tmp_path: Path
) -> None:
    rows = {
        "jsonl": [{"text": "some words " * 20}] * 4,
        "chat": [
            {
                "messages": [
                    {"role": "user", "content": "1?"},
                    {"role": "assistant", "content": "one"},
                ]
            }
        ],
    }
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows[kind])))
    words = [f"data={kind}", f"data.path={file}", "model.seq_length=64"]
    with pytest.raises(fp8cfg.ConfigError):
        run_data(fp8cfg.compose(["recipe=llama_tiny", *words]))
    train, held_out = run_data(
        fp8cfg.compose(["recipe=llama_tiny", *words, "trainer.val_check_interval=0"])
    )
    assert len(train.samples) >= 1 and held_out is None
