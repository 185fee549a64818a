"""`sample`, `evaluate` and `data prepare` on one small run."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.models.transformer import Transformer
from fp8cfg.parallel.process_group import World
from fp8cfg.planning.hardware import find_hardware
from fp8cfg.schema.backends import Hardware
from fp8cfg.training import memory_measurement, trained_model
from fp8cfg.training.evaluation import evaluate, validation_batches
from fp8cfg.training.finished_run import held_out_loss, load_held_out, sample
from fp8cfg.training.trained_model import in_precision, load, open_newest_checkpoint
from tests.support.small import small
from tests.support.verbs import refused


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in FP8 with weights held in it."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    recipe = small(
        "precision=bf16_fp8",
        "trainer.compile=off",
        "fp8.use_autocast_during_eval=true",
        "trainer.limit_val_batches=9999",
        "log.fp8_stats_every_n_steps=6",
    )
    fp8cfg.fit(fp8cfg.build(recipe), folder, say=lambda _: None)
    return folder


def digest(folder: Path) -> str:
    """Of every file below the folder, and its time."""
    every = [
        f"{path} {path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    ]
    return "\n".join(every)


def out(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code, said = main(list(argv)), capsys.readouterr()
    assert code == 0, said.err
    return said.out


def test_text_is_that_of_its_seed_and_leaves_the_run_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = digest(run)
    texts = [
        out(capsys, "sample", str(run), "def ", "--tokens", "12", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith("def ")
    assert out(
        capsys,
        "sample",
        str(run),
        "a=b",
        "--tokens",
        "3",
        "--temperature",
        "0",
        "--precision",
        "bf16",
    ).startswith("a=b")
    assert out(
        capsys, "sample", str(run), "-", "--tokens", "3", "--top-k", "1", "--step", "4"
    ).startswith("-")
    assert out(capsys, "sample", str(run), "--tokens", "3", "--", "--help").startswith("--help")
    assert out(capsys, "sample", "--tokens", "3", "--", str(run), "- item").startswith("- item")
    assert out(capsys, "sample", str(run), "hi", "--tokens", "3", "--chat")
    assert digest(run) == before


def test_logits_that_are_not_finite_are_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Transformer.forward
    monkeypatch.setattr(Transformer, "forward", lambda *args: forward(*args) * torch.nan)
    for temperature in ("0", "0.8"):
        assert main(["sample", str(run), "abc", "--tokens", "5", "--temperature", temperature]) == 7
        text = capsys.readouterr()
        assert text.err.splitlines()[1:] == [
            "error: step 6: 257 of 257 logits of the next token are not finite; sample an earlier checkpoint with --step"
        ]
        assert not text.out
    assert out(capsys, "evaluate", str(run)).split()[-3:] == ["nan"] * 3


def test_the_likeliest_token_is_that_of_the_logits(run: Path) -> None:
    found = load(run, print)
    prompt = list(b"for i in ")
    drawn = list(sample(found, prompt, 3, temperature=0))
    with torch.no_grad(), found.autocast():
        logits = found.model(torch.tensor([prompt + drawn]))[0].float()
    assert drawn[0] == logits[len(prompt) - 1].argmax().item()
    assert list(sample(found, prompt, 3, temperature=9.0, top_k=1, seed=5)) == drawn
    assert max(sample(found, list(range(40)), 20, temperature=50.0, vocabulary=200)) < 200


def test_the_loss_is_that_of_the_validation_of_the_run(run: Path) -> None:
    recorded = [
        json.loads(line)["val_loss"]
        for line in (run / "metrics.jsonl").read_text().splitlines()
        if "val_loss" in line
    ]
    found = load(run, print)
    assert held_out_loss(found, load_held_out(found.recipe)).loss == pytest.approx(
        recorded[-1], rel=2e-3
    )  # which has whole batches alone
    job = fp8cfg.build(small("precision=bf16"))
    plain = in_precision(found, "bf16", print)
    job.model.load_state_dict(plain.model.state_dict())
    batches = validation_batches(plain.recipe, load_held_out(found.recipe), World())
    assert held_out_loss(plain, load_held_out(found.recipe)).loss == pytest.approx(
        evaluate(job, batches, World()), rel=2e-3
    )


def test_precisions_are_compared(
    run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "held.txt"
    file.write_text("def f(x):\n    return x + 1\n" * 40)
    before = digest(run)
    lines = out(
        capsys,
        "evaluate",
        str(run),
        "--data",
        str(file),
        "--precision",
        "fp32,bf16,bf16_fp8,bf16_mxfp8",
    ).splitlines()
    assert re.fullmatch(r"precision +loss  difference  perplexity", lines[0]) and [
        line.split()[0] for line in lines[1:]
    ] == ["fp32", "bf16", "bf16_fp8", "bf16_mxfp8"]
    losses = [float(line.split()[1]) for line in lines[1:]]
    assert max(losses) - min(losses) < 0.05 and float(lines[4].split()[2]) == pytest.approx(
        losses[3] - losses[0], abs=2e-4
    )
    assert (
        main(["evaluate", str(run), "--samples", "1", "--precision", "nanov2_bf16_fp8_block"]) == 0
    )
    assert "nanov2_bf16_fp8_block: fp8.high_precision_at_end 2 -> " in capsys.readouterr().err
    first = out(capsys, "evaluate", str(run), "--samples", "3").splitlines()
    assert first[1].startswith("bf16, FP8 delayed") and digest(run) == before


def test_a_model_goes_where_the_word_says(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[str]()
    monkeypatch.setattr(
        trained_model,
        "find_hardware",
        lambda accelerator: asked.append(accelerator) or find_hardware("cpu"),
    )
    for words, want in (((), "auto"), (("--accelerator", "cpu"), "cpu")):
        out(capsys, "evaluate", str(run), "--samples", "1", "--precision", "bf16", *words)
        out(capsys, "sample", str(run), "x", "--tokens", "1", *words)
        assert {*asked} == {want}
        asked.clear()


def test_on_a_gpu_blocks_are_computed_forward_and_what_it_lacks_is_refused_with_options(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hopper multiplies no blocks of E5M2, which only gradients are; their format is not the run's any more."""
    found = load(run, print)
    monkeypatch.setattr(
        trained_model, "find_hardware", lambda _: Hardware("cuda", (9, 0), cuda=(12, 9))
    )
    monkeypatch.setattr(
        trained_model,
        "prepare_model",
        lambda plan, *_, **__: SimpleNamespace(model=found.model, recipe=plan.recipe),
    )
    assert in_precision(found, "bf16_fp8_block", print).recipe.fp8.format == "e4m3"
    assert refused(capsys, "evaluate", str(run), "--precision", "bf16_mxfp8") == [
        "fp8.scaling=mxfp8: this GPU has compute capability 9.0, mxfp8 scaling needs 10.0 (Blackwell); write --accelerator cpu to emulate, "
        "or --precision bf16_fp8_current"
    ]


def test_no_weights_are_drawn_for_a_model_that_is_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transformer, "init_weights", None)
    found = load(run, print)
    _, state = open_newest_checkpoint(run, print)
    assert in_precision(found, "bf16", print).step == found.step == state["step"]


def test_a_model_that_is_loaded_has_no_float32_original(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.2 bytes a parameter, and one of two layers of the checkpoint beside them: 3.8. With originals it was 7.2."""
    counted = memory_measurement.storages
    monkeypatch.setattr(memory_measurement, "storages", lambda t: [] if t.is_meta else counted(t))
    with memory_measurement.LiveBytes(()) as live:
        found = load(run, print)
    assert live.peak < 4.5 * sum(p.numel() for p in found.model.parameters())


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (
            ["sample", "nowhere", "x"],
            "nowhere: run folder not found; check the path, or list your runs with fp8cfg runs",
        ),
        (["sample", "RUN"], "sample: needs a run folder and a prompt"),
        (
            ["sample", "RUN", "- item"],
            "- item: no such option; put text that is no option after --",
        ),
        (["sample", "RUN", "--", "- item", "x"], "sample: needs a run folder and a prompt"),
        (
            ["sample", "RUN", "x", "--temperature", "nan"],
            "--temperature nan: needs a number of at least 0",
        ),
        (["sample", "RUN", "x", "--tokens", "0"], "must be at least 1"),
        (["sample", "RUN", "x", "--tokens", "many"], "--tokens many: needs a whole number"),
        (["sample", "RUN", "x", "--topk", "3"], "did you mean '--top-k'"),
        (
            ["sample", "RUN", "x", "--temperature", "0", "--seed", "3"],
            "--seed: has no effect at --temperature 0",
        ),
        (["sample", "RUN", "x", "--step", "3"], "has no checkpoint of step 3; there are 4, 6"),
        (["sample", "RUN", "x", "--precision", "bf17"], "bf17"),
        (
            ["sample", "RUN", "x", "--precision", "bf16,fp32"],
            "one at a time; fp8cfg evaluate compares several",
        ),
        (
            ["sample", "RUN", "x", "--tokenizer", "gone"],
            "data.tokenizer=gone: no such file or folder",
        ),
        (["evaluate", "RUN", "--data", "gone"], "--data gone: no such file or folder"),
        (
            ["evaluate", "hf://o/n"],
            "hf://o/n: run folder not found; check the path, or list your runs with fp8cfg runs",
        ),
        (
            ["evaluate", "RUN", "--data", "hf://o/n"],
            "--data hf://o/n: is a URL, not a local path",
        ),
        (
            ["data", "prepare", "hf://o/n", "data=tiny"],
            "hf://o/n: token files are written here, not to an address",
        ),
        (["evaluate"], "evaluate: needs one run folder"),
        (["evaluate", "RUN", "--samples", "x"], "--samples x: needs a whole number"),
        (["evaluate", "EMPTY"], "has no checkpoint yet"),
        (["evaluate", "RUN", "--accelerator", "tpu"], "--accelerator tpu: write auto, cpu or cuda"),
        (["sample", "RUN", "x", "--accelerator", "gpu"], "--accelerator gpu: write auto"),
        (["data"], "data: writes token files"),
        (["data", "prepare", "OUT", "data=text"], "needs data.path"),
        (["data", "prepare", "OUT", "data=jsonl", "data.path=gone"], "gone: no such file"),
        (
            ["data", "prepare", "OUT", "data=tiny", "data.tokenizer=gone"],
            "data.tokenizer=gone: no such file",
        ),
        (
            ["data", "prepare", "OUT", "data=tiny", "data.eod_mask_loss=true"],
            "data.eod_mask_loss: has no effect on token files",
        ),
        (
            ["data", "prepare", "OUT", "data=text", "data.mixture=[{path: a, weight: 1}]"],
            "prepare each data.path",
        ),
        (["data", "prepare", "OUT", "data=chat", "data.path=x"], "no documents of text"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(
    argv: list[str],
    says: str,
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "EMPTY" in argv:
        (tmp_path / "EMPTY" / "checkpoints").mkdir(parents=True)
        for name in ("recipe.yaml", "environment.json"):
            (tmp_path / "EMPTY" / name).write_bytes((run / name).read_bytes())
    lines = refused(capsys, *(str(run) if word == "RUN" else word for word in argv))
    assert len(lines) == 1 and says in lines[0]


def test_token_files_are_said_with_the_line_that_trains_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = out(capsys, "data", "prepare", str(tmp_path / "tokens"), "data=tiny")
    assert re.match(
        rf"wrote {tmp_path}/tokens.bin and .idx: 238148 tokens of 1037 documents in \d+\.\d s\n"
        rf"train on it: fp8cfg data=tokens data.path={tmp_path}/tokens\n$",
        text,
    )
