"""Runs on streams: killed, stopped, on one rank and on two, they go on with the row that comes next."""

from __future__ import annotations

import gzip
import json
import re
import signal
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.checkpoint import resume_rules
from fp8cfg.data import corpus
from fp8cfg.planning import smoke
from fp8cfg.run_folder import metrics_file
from fp8cfg.training.data import run_data
from fp8cfg.training.finished_run import load_held_out, load_samples
from fp8cfg.training.loop import Interrupted
from tests.support.ranks import launch
from tests.support.small import PACKED, SMALL, small

EXACT = ("precision=fp32", "trainer.gradient_clip_val=0", "trainer.micro_batch_size=4")
TEXT = [
    [f"{shard} {row} " + "of some words " * (row * 5 % 17) for row in range(9)]
    for shard in range(3)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards, which six steps of the small recipe read through; and a file to validate on."""
    root = tmp_path_factory.mktemp("stream")
    (root / "shards").mkdir()
    for number, rows in enumerate(TEXT):
        lines = "\n".join(json.dumps({"body": text}) for text in rows).encode()
        (root / "shards" / f"{number}.jsonl{'.gz' if number == 1 else ''}").write_bytes(
            gzip.compress(lines) if number == 1 else lines
        )
    (root / "val.jsonl").write_text(
        "\n".join(json.dumps({"body": f"another {n} " * 30}) for n in range(40))
    )
    return root


def words(folder: Path, *more: str) -> list[str]:
    return [
        "data=jsonl",
        f"data.path={folder}/shards",
        "data.streaming=true",
        "data.text_key=body",
        f"data.validation_path={folder}/val.jsonl",
        "model.seq_length=64",
        *PACKED,
        *more,
    ]


def stream(folder: Path, *more: str) -> fp8cfg.Recipe:
    return small(*words(folder, *more))


def losses(run: Path) -> dict[int, float]:
    return {
        line["step"]: line["loss"]
        for line in metrics_file.read_metrics(run / "metrics.jsonl")
        if "loss" in line
    }


def saved(run: Path, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        (run / "checkpoints" / f"step-{step:08d}" / "state.json").read_text()
    )["data"]
    return found


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """A run of six steps without an interruption."""
    recipe = stream(folder, *EXACT, f"log.folder={folder}/whole", "log.resume=auto")
    assert fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None).val_loss
    assert saved(folder / "whole", 6)["stream"]["epoch"] == 1, (
        "the end of the data is inside of the run"
    )
    return folder / "whole"


def test_a_stopped_run_goes_on_by_the_same_line(folder: Path, whole: Path, tmp_path: Path) -> None:
    class Stop(fp8cfg.Callback):
        def step(self, step: int, values: object) -> None:
            if step == 3:
                signal.raise_signal(signal.SIGTERM)

    recipe = stream(folder, *EXACT, f"log.folder={tmp_path}/run", "log.resume=auto")
    with pytest.raises(Interrupted):
        fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None, callbacks=[Stop()])
    assert saved(tmp_path / "run", 3)["samples_seen"] == 24
    fp8cfg.fit(fp8cfg.build(recipe), say=lambda _: None)
    assert losses(tmp_path / "run") == losses(whole) and len(losses(whole)) == 6
    assert saved(tmp_path / "run", 6) == saved(whole, 6)


@pytest.mark.slow
def test_a_killed_run_is_resumed_on_another_number_of_ranks_and_run_again(
    folder: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, *words(folder, *EXACT, "log.resume=auto", f"log.folder={tmp_path}/run")]
    killed = launch(1, *line, FP8CFG_FAILPOINT="renamed:2")
    assert killed.returncode == -signal.SIGKILL and max(losses(tmp_path / "run")) == 4
    two = launch(2, *line)
    assert two.returncode == 0, two.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(whole), rel=1e-6)
    assert saved(tmp_path / "run", 6) == saved(whole, 6)
    capsys.readouterr()
    assert main(["rerun", str(whole), f"log.dir={tmp_path}/again"]) == 0
    out = capsys.readouterr().out
    assert (
        "training loss: equal bit for bit" in out
        and "validation loss: equal" in out
        and "changed: data" not in out
    )


def test_a_wrong_row_is_skipped_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_BYTES_AT_ONCE", 1000)
    good = [json.dumps({"text": f"{row} " + "word " * 40}) for row in range(40)]
    files = {
        "bad": [*good[:30], "{", *good[30:35], '{"text": null}', *good[35:]],
        "good": good,
        "first": ["{", *good],
    }
    for name, rows in files.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    line = [word for word in SMALL if not word.startswith(("trainer.val", "trainer.limit"))]
    line += ["data=jsonl", "data.streaming=true", "precision=bf16", "trainer.max_steps=30"]
    line += ["log.resume=auto", "checkpoint.every_n_steps=5"]

    def train(name: str, *more: str) -> int:
        path = f"data.path={tmp_path}/{name}.jsonl"
        return main([*line, path, f"log.folder={tmp_path}/{name}", *more])

    assert train("bad") == 0
    out = capsys.readouterr().out.splitlines()
    reports = [text.replace(str(tmp_path), "") for text in out if "stream skipped" in text]
    assert reports[0] == (
        "data: 1 row of the stream skipped so far, the last: /bad.jsonl:31: not JSON (Expecting"
        " property name enclosed in double quotes, column 2)"
    )
    assert reports[1].startswith("data: 2 rows of the stream skipped so far, the last: ")
    assert reports[1].endswith("bad.jsonl:37: 'text' is NoneType, not text")
    assert train("good") == 0
    assert losses(tmp_path / "bad") == losses(tmp_path / "good")
    assert train("first") == 2
    assert re.search(r"error: data=jsonl: .*first.jsonl:1: not JSON", capsys.readouterr().err)
    assert (
        train("bad", "data.streaming=false") == 2
        and "data.streaming=false: the checkpoint of step 30 has data.streaming=true; start a new run"
        in capsys.readouterr().err
    )


def test_a_stream_has_the_documents_of_its_files(folder: Path) -> None:
    batches, validation = run_data(stream(folder))
    tokens, targets, documents = batches.batch(0)
    assert (
        bytes(tokens[0, :4].tolist()) == b"0 0 "
        and ((targets == -100) == (tokens == 256)).all()
        and (documents > 0).any()
    )
    assert (
        validation is not None
        and validation.masked
        and len(validation.read(validation.spread(1))) == 3
    )
    assert batches.remark.startswith(f"data: jsonl, stream of 3 files of {folder}/shards, ")
    parts = [run_data(stream(folder))[0].batch(0, rank, 2)[0] for rank in range(2)]
    assert torch.equal(torch.cat(parts), tokens)


def test_what_validates_is_not_held_out_of_what_trains(folder: Path) -> None:
    plain = [word for word in words(folder) if word != "data.streaming=true"]
    batches, validation = run_data(small(*plain))
    everything = run_data(small(*[word for word in plain if "validation_path" not in word]))[0]
    assert (
        len(batches.samples.tokens)
        == sum(len(text) + 1 for shard in TEXT for text in shard)
        > len(everything.samples.tokens)
    )
    assert validation.sha256 == load_samples(small(*plain), f"{folder}/val.jsonl").sha256
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"data=jsonl: validation_path: .*0.jsonl is also a file of data.path; exclude it with a pattern",
    ):
        run_data(small(*plain, f"data.validation_path={folder}/shards/0.jsonl"))
    with pytest.raises(
        fp8cfg.ConfigError, match=r"data=jsonl: validation_path: .*none.jsonl: no such file"
    ):
        run_data(small(*plain, f"data.validation_path={folder}/none.jsonl"))
    resume_rules.refuse_changes(
        stream(folder), stream(folder, "data.validation_path=elsewhere.jsonl"), []
    )


def test_without_a_file_to_validate_on_nothing_is_validated(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = [word for word in words(folder) if "validation" not in word]
    own = [word for word in SMALL if not word.startswith(("trainer.val", "trainer.limit"))]
    recipe = fp8cfg.compose([*own, *quiet])
    assert recipe.trainer.val_check_interval == 0
    assert (
        "trainer.val_check_interval 50 -> 0: the recipe's value is changed to fit data.streaming=true"
        in caplog.text
    )
    with pytest.raises(
        fp8cfg.ConfigError, match=r"this run has no held-out data; pass a text with --data FILE"
    ):
        load_held_out(recipe)
    assert len(load_samples(recipe, f"{folder}/val.jsonl"))
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"trainer.val_check_interval=3: a stream has no held-out part; set data.validation_path, or set it to 0",
    ):
        fp8cfg.compose([*own, *quiet, "trainer.val_check_interval=3"])


@pytest.mark.parametrize(
    ("said", "line"),
    [
        (
            "data=stdlib data.streaming=true",
            "data.streaming=true: has no effect with data=stdlib; only jsonl, csv and parquet can be streamed",
        ),
        (
            "data=chat data.path=x data.streaming=true",
            "data.streaming=true: has no effect with data=chat",
        ),
        (
            "data=jsonl data.streaming=true data.mixture=[{path: a, weight: 1}]",
            "data.streaming=true: does not work with data.mixture",
        ),
        (
            "data=tiny data.validation_path=x",
            "data.validation_path=x: has no effect with data=tiny, which validates on the end of its own text",
        ),
        (
            "data=text data.path=x data.validation_path=y data.validation_fraction=0.1",
            "data.validation_fraction=0.1: has no effect with data.validation_path",
        ),
        (
            "data=jsonl data.path=x data.streaming=true data.validation_fraction=0.1 trainer.val_check_interval=0",
            "data.validation_fraction=0.1: has no effect with data.streaming=true",
        ),
    ],
)
def test_what_contradicts_is_refused(said: str, line: str) -> None:
    own = [word for word in SMALL if not word.startswith(("trainer.val", "trainer.limit", "data="))]
    with pytest.raises(fp8cfg.ConfigError) as caught:
        fp8cfg.compose([*own, *re.split(r" (?=data|trainer)", said)])
    assert line in str(caught.value)


def test_a_smoke_run_reads_no_shards(folder: Path) -> None:
    recipe = fp8cfg.compose(["recipe=llama_1b", *words(folder), "trainer.smoke=true"])
    small_run = smoke.cut_recipe(recipe, 1)
    small_run.check()
    assert small_run.data.name == "tiny" and small_run.data.reset_attention_mask
