"""Two ranks under torchrun are one run: the same scales, and losses beside those of one rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fp8cfg
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.metrics_file import read_metrics
from tests.support import whole_checkpoints
from tests.support.ranks import launch, on_ranks, torchrun
from tests.support.small import SMALL, small, small_words

ROOT = Path(__file__).parents[2]


def run(ranks: int, root: Path, *words: str, micro: int = 4) -> Path:
    done = launch(
        ranks, *small_words(*words, f"log.dir={root}", f"trainer.micro_batch_size={micro}")
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("run folder:") == 1, "one rank prints"
    (folder,) = root.iterdir()
    return folder


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def scales(folder: Path) -> dict[str, torch.Tensor]:
    found, _ = whole_checkpoints.load(sorted((folder / "checkpoints").iterdir())[-1])
    return {k: v for k, v in found["fp8"].items() if k.endswith("fp8_scale")}


@pytest.mark.slow
def test_what_may_not_be_meant_is_noted_by_one_rank_and_once(tmp_path: Path) -> None:
    words = small_words(
        "precision=bf16_fp8",
        "opt_level=O3",
        "trainer.max_steps=1",
        "optim.warmup_steps=0",
        "trainer.val_check_interval=0",
        "checkpoint.every_n_steps=0",
        "trainer.micro_batch_size=4",
        f"log.dir={tmp_path}",
    )
    for ranks, shard, note in (
        (1, "none", "opt_level=O3: needs more"),
        (2, "none", "opt_level=O3: needs more"),
        (1, "zero1", "storage.shard=zero1: no effect on one"),
        (2, "zero1", ""),
    ):
        done = launch(ranks, *words, f"storage.shard={shard}")
        notes = [
            line
            for line in done.stderr.splitlines()
            if line.startswith("note: ") and "is changed to fit" not in line
        ]
        assert (
            done.returncode == 0
            and len(notes) == bool(note)
            and all(line.startswith(f"note: {note}") for line in notes)
        ), done.stderr


@pytest.mark.slow
def test_two_ranks_with_half_the_batch_each_are_one_run(tmp_path: Path) -> None:
    words = (
        "precision=bf16_fp8",
        "trainer.max_steps=50",
        "checkpoint.every_n_steps=25",
        "trainer.val_check_interval=25",
        "trainer.gradient_clip_val=0",
    )  # the norm of shards is added up in another order
    two = run(2, tmp_path / "two", *words, "optim.lr=3e-4")
    halves, whole = (run(1, tmp_path / str(m), *words, "optim.lr=3e-4", micro=m) for m in (4, 8))
    assert len(losses(two)) == 50
    assert losses(two) == pytest.approx(losses(halves), abs=1e-6), (
        "one rank that accumulates the two halves"
    )
    for name, scale in scales(halves).items():
        torch.testing.assert_close(scales(two)[name], scale, rtol=1e-6, atol=0)
    # The gradients of two halves are quantized and rounded apart, and the difference grows: .0010 at step 46.
    assert losses(two) == pytest.approx(losses(whole), abs=2e-3), (
        "one rank with the batch in one pass"
    )


@pytest.mark.slow
def test_the_first_scales_are_those_of_one_rank_with_the_batch_in_one_pass(tmp_path: Path) -> None:
    words = (
        "precision=bf16_fp8",
        "fp8.first_step=te",
        "fp8.amax_history_len=4",
        "trainer.max_steps=1",
        "optim.warmup_steps=0",
        "trainer.val_check_interval=0",
    )
    one, two = (
        scales(run(ranks, tmp_path / str(ranks), *words, micro=8 // ranks)) for ranks in (1, 2)
    )
    for name, scale in one.items():
        torch.testing.assert_close(two[name], scale, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_ranks_without_reduction_keep_their_own_amaxes(tmp_path: Path) -> None:
    words = (
        "precision=bf16_fp8",
        "trainer.max_steps=1",
        "optim.warmup_steps=0",
        "trainer.val_check_interval=0",
        "fp8.first_step=te",
    )  # scales of 1, so that the products of the one step are the same
    histories = []
    for reduce in ("true", "false"):
        folder = run(2, tmp_path / reduce, *words, f"fp8.reduce_amax={reduce}")
        found, _ = whole_checkpoints.load(sorted((folder / "checkpoints").iterdir())[-1])
        histories.append({k: v for k, v in found["fp8"].items() if k.endswith("history")})
    reduced, each = histories
    assert not [k for k in reduced if ":" in k]
    mine, others = (
        {k.removeprefix("rank1:"): v for k, v in each.items() if (":" in k) == other}
        for other in (False, True)
    )
    assert mine.keys() == others.keys() == reduced.keys() and any(
        not torch.equal(mine[k], others[k]) for k in mine
    )
    assert all(torch.equal(reduced[k], torch.maximum(mine[k], others[k])) for k in reduced)


@pytest.mark.parametrize("reduce", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_two_ranks_resume_to_the_same_losses(reduce: str, tmp_path: Path) -> None:
    words = (
        "precision=bf16_fp8",
        f"fp8.reduce_amax={reduce}",
        "trainer.max_steps=6",
        "checkpoint.every_n_steps=3",
        "checkpoint.keep=3",
    )
    folder = run(2, tmp_path, *words)
    want = losses(folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    (newest / "MANIFEST.json").unlink()
    done = launch(2, "resume", str(folder))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "from step-00000003" in done.stdout and losses(folder) == want


def test_a_sharded_run_says_what_it_sends_and_goes_on_with_one_rank(tmp_path: Path) -> None:
    words = (
        "precision=bf16_fp8",
        "opt_level=O3",
        "storage.shard=zero2",
        "trainer.max_steps=4",
        "checkpoint.keep=2",
        f"log.dir={tmp_path}",
    )
    done = launch(2, *SMALL, *words, "trainer.micro_batch_size=4")
    assert done.returncode == 0, done.stderr[-2000:]
    (said,) = re.findall(
        r"^sent in a step by the first rank: (.*\n  .*)$", done.stdout, re.MULTILINE
    )
    assert re.fullmatch(
        r"gradients [\d.]+ KiB in \d messages, scales .*, weights [\d.]+ KiB in \d messages?",
        " ".join(said.split()),
    )
    (folder,) = tmp_path.iterdir()
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert len({line["sent_bytes"] for line in lines}) == 1 and lines[0]["sent_bytes"] > 1e5
    (folder / "checkpoints/step-00000004/MANIFEST.json").unlink()
    one = launch(1, "resume", str(folder), "storage.shard=none")
    assert (
        one.returncode == 0
        and "from step-00000002" in one.stdout
        and "sent in a step" not in one.stdout
    ), one.stderr
    assert losses(folder) == pytest.approx([line["loss"] for line in lines], abs=2e-3)
    assert "sent_bytes" not in read_metrics(folder / "metrics.jsonl")[-1]


@pytest.mark.slow
def test_a_batch_that_does_not_divide_is_one_line() -> None:
    done = torchrun(2, *SMALL, "trainer.micro_batch_size=8")
    line = "error: trainer.global_batch_size=8 is not a multiple of trainer.micro_batch_size x data-parallel size = 16; nearest is 16"
    said = [
        re.split("; runs here: |; as a smoke run: ", text)[0]
        for text in done.stderr.splitlines()
        if "error: trainer" in text
    ]
    # By the first rank; on a busy machine another one, which waits for two seconds, may come before it, and torchrun then ends the first.
    assert said and len(said) == len(set(said)) and set(said) <= {line, f"rank 1: {line}"}, (
        done.stderr
    )
    assert "fp8cfg/cli" not in done.stderr, "the traceback is torchrun's own"


@pytest.mark.parametrize(
    "words",
    ["precision=bf16", "precision=bf16 storage.shard=zero1", "precision=bf16 storage.shard=fsdp"],
)
def test_ranks_that_have_not_met_are_refused(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would train the whole batch, of a model that it has whole."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"WORLD_SIZE=2: torchrun started 2 ranks, but there is no process group; call torch.distributed.init",
    ):
        fp8cfg.fit(fp8cfg.build(small(*words.split())))


@pytest.mark.slow
def test_what_one_rank_alone_finds_is_said_by_it(tmp_path: Path) -> None:
    import numpy as np

    from fp8cfg.data import Batches, Windows
    from fp8cfg.data.indexed import write_indexed
    from fp8cfg.training.data import run_data

    tokens = np.random.default_rng(0).integers(0, 200, 6000)
    words = [
        "data=tokens",
        f"data.path={tmp_path / 'tokens'}",
        "model.vocab_size=208",
        "trainer.micro_batch_size=4",
    ]
    write_indexed(tmp_path / "tokens", [tokens], vocab_size=304)
    plain, _ = run_data(small(*words))
    places = Batches(Windows(np.arange(len(plain.samples.tokens)), 32, len(tokens)), plain.seed, 8)
    tokens[places.batch(0, rank=1, world=2)[0][0, 5].item()] = (
        300  # in the second rank's share of the first step
    )
    for file in tmp_path.iterdir():
        file.unlink()
    write_indexed(tmp_path / "tokens", [tokens], vocab_size=304)
    done = torchrun(
        2, *[w for w in SMALL if not w.startswith("data=")], *words, f"log.dir={tmp_path / 'runs'}"
    )
    assert done.returncode != 0
    assert "rank 1: error: data=tokens: token 300 at index" in done.stderr
    assert "error: another rank has ended" in done.stderr and "fp8cfg/training" not in done.stderr


def _exchange_texts(world: World) -> list[str]:
    sent = ["", " é ", "many letters"] if world.first else ["other", "", "b"]
    return [*map(world.text, sent), *world.texts("x" * world.rank)]


def test_texts_arrive_as_they_were(tmp_path: Path) -> None:
    wanted = ["", " é ", "many letters", "", "x"]
    assert on_ranks(2, _exchange_texts, tmp_path) == [wanted, wanted]
