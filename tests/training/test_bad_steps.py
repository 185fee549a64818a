"""trainer.spike_factor and trainer.on_bad_step: which steps are bad, what is skipped, and what a resumed run does."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint import manifest
from fp8cfg.data.indexed import write_indexed
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.files import RunFiles
from fp8cfg.run_folder.metrics_file import MEASURED
from fp8cfg.run_folder.status import read_status
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import loop
from fp8cfg.training.data import run_data
from tests.support.ranks import on_ranks
from tests.support.small import small, small_words, steps

WORDS = (
    "trainer.micro_batch_size=4",
    "trainer.val_check_interval=0",
    "trainer.max_steps=8",
    "checkpoint.every_n_steps=2",
    "checkpoint.keep=9",
    "trainer.compile=off",
)
BAD = 5
"""The step with a bad batch, counted from 1."""


def plant(job: Job, *bad_steps: int) -> Job:
    """Makes activations infinite whenever the model reads a sample of these steps."""
    batches, _ = run_data(job.recipe)
    bad = [batches.batch(step - 1)[0] for step in bad_steps]
    reads_bad = False

    def look(_: Any, args: Sequence[torch.Tensor]) -> None:
        nonlocal reads_bad
        samples = [row for batch in bad for row in batch]
        reads_bad = any(torch.equal(row, sample) for row in args[0] for sample in samples)

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        return output * math.inf if reads_bad else output

    job.model.register_forward_pre_hook(look)
    job.model.get_submodule("layers.0.mlp.linear_fc2").register_forward_hook(spoil)
    return job


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without times."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in MEASURED} for line in lines]


def tensors(folder: Path) -> dict[str, bytes]:
    """The tensors of the last checkpoint."""
    last = max((folder / "checkpoints").iterdir())
    return {path.name: path.read_bytes() for path in last.rglob("*.safetensors")}


def train(folder: Path, *words: str, bad: Sequence[int] = (BAD,)) -> list[str]:
    """Trains into `folder` and returns the messages."""
    said: list[str] = []
    job = plant(fp8cfg.build(small(*WORDS, *words)), *bad)
    fp8cfg.fit(job, folder, say=said.append)
    return said


NVFP4 = ("precision=bf16_nvfp4", "lora.enabled=true", "lora.dropout=0.5")
"""Random numbers in both passes: dropout, and stochastic rounding of gradients."""


@pytest.fixture(scope="module")
def skipped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that skips a batch, and its messages."""
    folder = tmp_path_factory.mktemp("skipped") / "run"
    return folder, train(folder, "precision=bf16_fp8", "trainer.on_bad_step=skip")


def test_a_skipped_batch_changes_nothing(skipped: tuple[Path, list[str]]) -> None:
    """The steps after it are those of a loop that leaves out its step."""
    folder, said = skipped
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert [line["step"] for line in lines if not line["stepped"]] == [BAD]
    assert lines[BAD - 1]["bad_step"] == "skip" and lines[BAD - 1]["loss"] == "NaN"
    job = fp8cfg.build(small("precision=bf16_fp8", *WORDS))
    expected = [step.loss for step in steps(job, 4)] + [step.loss for step in steps(job, 3, BAD)]
    assert [line["loss"] for line in lines if line["stepped"]] == expected
    assert f"step {BAD} is skipped (trainer.on_bad_step=skip)" in said
    assert (folder / f"fault-step-{BAD}.json").exists()
    status = read_status(RunFiles.at(folder))
    assert status is not None and (status.state, status.step) == ("done", 8)


def test_rewind_goes_back_to_a_checkpoint(skipped: tuple[Path, list[str]], tmp_path: Path) -> None:
    """Nothing was wrong before the bad batch, so the run ends with the weights of one that skips."""
    folder = tmp_path / "run"
    words = ("precision=bf16_fp8", "trainer.on_bad_step=rewind", "checkpoint.every_n_steps=3")
    said = train(folder, *words)
    assert "back to the checkpoint of step 3" in said
    assert sum(text.startswith(f"step {BAD}: the loss is nan; rerunning") for text in said) == 1
    found, wanted = metrics(folder), metrics(skipped[0])
    assert found.pop(BAD - 1)["bad_step"] == "rewind" and wanted.pop(BAD - 1)
    assert found == wanted
    assert tensors(folder) == tensors(skipped[0])


@pytest.mark.parametrize("words", [("precision=bf16_fp8",), NVFP4], ids=["fp8", "nvfp4 lora"])
def test_a_resumed_run_skips_the_batch_again(
    words: tuple[str, ...], skipped: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """From a checkpoint before the batch and from one after it. The batch does no harm the second time, and is skipped anyway."""
    folder = skipped[0]
    if words == NVFP4:
        folder = tmp_path / "whole"
        train(folder, *words, "trainer.on_bad_step=skip")
    wanted, weights = metrics(folder), tensors(folder)
    for step in (6, 2):
        said: list[str] = []
        fp8cfg.resume(folder, say=said.append, step=step)
        assert metrics(folder) == wanted
        assert tensors(folder) == weights
        assert (f"step {BAD} is skipped: the loss is nan" in said) == (step < BAD)


def test_running_means_of_a_custom_model_stay_finite(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(272, 64)
            self.norm = nn.BatchNorm1d(64)
            self.output = nn.Linear(64, 272)
            self.calls = 0

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.embedding(tokens).flatten(0, 1)
            x = x * math.inf if self.calls == 4 else x  # in the second microbatch of step 2
            return nn.functional.cross_entropy(self.output(self.norm(x)), targets.flatten())

    recipe = small(*WORDS, "precision=bf16", "trainer.on_bad_step=skip")
    job = fp8cfg.build(recipe, model=Model())
    fp8cfg.fit(job, tmp_path / "run", say=lambda _: None)
    assert [line["stepped"] for line in metrics(tmp_path / "run")] == [True, False] + 6 * [True]
    assert all(buffer.isfinite().all() for buffer in job.model.buffers())


def test_a_run_does_not_skip_forever(tmp_path: Path) -> None:
    words = ("precision=bf16", "trainer.on_bad_step=skip", "trainer.max_bad_steps=2")
    with pytest.raises(
        loop.Diverged,
        match=r"step 6: the loss is nan, and 2 steps before it were skipped \(trainer.max_bad_ste",
    ) as end:
        train(tmp_path / "run", *words, bad=(2, 4, 5, 6))
    assert end.value.exit_code == 7
    assert list(json.loads((tmp_path / "run" / "skipped_steps.json").read_text())) == [
        "2",
        "4",
        "5",
    ]
    assert metrics(tmp_path / "run")[-1]["bad_step"] == "stop"


def test_rewind_past_a_damaged_checkpoint_saves_its_step_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    class Damage(fp8cfg.Callback):
        was_damaged = False

        def save(self, done: int, folder: Path) -> None:
            if done == BAD - 1 and not self.was_damaged:
                (folder / "model.safetensors").write_bytes(b"damaged")
                self.was_damaged = True

    words = ("precision=bf16_fp8", "trainer.on_bad_step=rewind")
    said: list[str] = []
    job = plant(fp8cfg.build(small(*WORDS, *words)), BAD)
    fp8cfg.fit(job, folder, say=said.append, callbacks=[Damage()])
    assert f"back to the checkpoint of step {BAD - 3}" in said
    manifest.verify(folder / "checkpoints" / f"step-{BAD - 1:08d}.2")


@pytest.mark.parametrize("policy", ["skip", "rewind"])
def test_a_run_that_skips_its_last_step_is_done(policy: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, "precision=bf16", f"trainer.on_bad_step={policy}", bad=(8,))
    assert fp8cfg.resume(folder, say=lambda _: None).steps == 8
    status = read_status(RunFiles.at(folder))
    assert status is not None and status.state == "done"


def test_rewind_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(loop.Diverged, match=r"on_bad_step=rewind: there is no checkpoint"):
        train(tmp_path / "run", "precision=bf16", "trainer.on_bad_step=rewind", bad=(1,))


def test_a_list_of_skipped_steps_that_is_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    fp8cfg.fit(fp8cfg.build(small("precision=bf16", *WORDS)), folder, say=lambda _: None)
    shutil.rmtree(folder / "checkpoints" / "step-00000008")
    entry = {"problem": "", "policy": "skip", "loss": 10**400, "lr": 0, "grad_norm": 0}
    for text in ('{"5": 1}', json.dumps({"5": entry}), "[" * 100_000):
        (folder / "skipped_steps.json").write_text(text)
        with pytest.raises(ConfigError, match=r"not a list of skipped steps"):
            fp8cfg.resume(folder, say=lambda _: None)


# ------------------------------------------------------------------------------------------------
# Spikes

SPIKE_STEPS = 16
GARBAGE = 14
"""The step with a garbage sample, counted from 1."""
SPIKE_WORDS = (
    "precision=bf16_fp8",
    "data=tokens",
    "optim.lr_decay_style=constant",
    "optim.lr=0.01",
    "trainer.spike_factor=1.3",
    *(word for word in WORDS if "max_steps" not in word and "batch" not in word),
    "trainer.global_batch_size=2",
    "trainer.micro_batch_size=1",
)


def spiky(path: Path, *words: str) -> fp8cfg.Recipe:
    """A recipe for data that are easy to predict, except for one sample of a step."""
    tokens = np.tile(np.arange(8), 2000)
    write_indexed(path, [tokens], 272)
    given = [word for word in small_words(*SPIKE_WORDS) if word != "data=tiny"]
    recipe = fp8cfg.compose(
        [*given, f"data.path={path}", f"trainer.max_steps={SPIKE_STEPS}", *words]
    )
    batches, _ = run_data(recipe)
    numbers = np.array([(GARBAGE - 1) * batches.global_batch_size + 1])
    (start,) = batches.samples.draw(numbers, batches.seed).tolist()
    garbage = np.random.default_rng(1).integers(0, 256, 32)
    tokens[(start + np.arange(32)) % len(batches.samples.tokens)] = garbage
    write_indexed(path, [tokens], 272)
    return recipe


@pytest.fixture(scope="module")
def spike(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A run that skips a spike, and its messages."""
    root = tmp_path_factory.mktemp("spike")
    said: list[str] = []
    recipe = spiky(root / "tokens", "trainer.on_bad_step=skip")
    fp8cfg.fit(fp8cfg.build(recipe), root / "run", say=said.append)
    return root / "run", said


def test_a_garbage_sample_is_a_spike(spike: tuple[Path, list[str]]) -> None:
    folder, said = spike
    lines = metrics(folder)
    assert [line["step"] for line in lines if "bad_step" in line] == [GARBAGE]
    losses = [line["loss"] for line in lines]
    middle = float(np.median(losses[: GARBAGE - 1]))
    begin = next(i for i, text in enumerate(said) if text.startswith(f"step {GARBAGE}: the loss"))
    ratio = losses[GARBAGE - 1] / middle
    assert said[begin].startswith(
        f"step {GARBAGE}: the loss {losses[GARBAGE - 1]:.4g} is {ratio:.3g} times the median"
        f" {middle:.4g} of the last {GARBAGE - 1} steps (trainer.spike_factor=1.3); rerunning"
    )
    worst = (GARBAGE - 1) * 2 + 1
    assert said[begin + 2].startswith(f"  samples: {worst} (document 0, token ")
    fault = json.loads((folder / f"fault-step-{GARBAGE}.json").read_text())
    assert fault["rerun"]["loss"] == losses[GARBAGE - 1]
    samples = sorted(fault["samples"], key=lambda each: -each["loss"])
    assert samples[0]["sample"] == worst and samples[0]["loss"] > 2 * samples[1]["loss"]


def test_the_median_goes_on_after_a_resume(spike: tuple[Path, list[str]], tmp_path: Path) -> None:
    """A run that ends two steps before the spike finds it when it is resumed."""
    recipe = spiky(tmp_path / "tokens", "trainer.on_bad_step=skip")
    recipe.trainer.max_steps = GARBAGE - 2
    fp8cfg.fit(fp8cfg.build(recipe), tmp_path / "run", say=lambda _: None)
    fp8cfg.resume(tmp_path / "run", [f"trainer.max_steps={SPIKE_STEPS}"], say=lambda _: None)
    assert metrics(tmp_path / "run") == metrics(spike[0])
    assert tensors(tmp_path / "run") == tensors(spike[0])


def test_a_spike_does_not_change_the_loss_scale() -> None:
    """Under fp16 its step is skipped as well, but no gradient has overflowed."""
    job = fp8cfg.build(small("precision=fp16", "precision.initial_loss_scale=1024"))
    from fp8cfg.training.step import train_step

    batches, _ = run_data(job.recipe)
    before = [parameter.clone() for parameter in job.model.parameters()]
    result = train_step(job, batches, 0, World(), largest_loss=1.0).wait()
    assert result.rejected and not result.stepped and job.loss_scaler.scale == 1024
    assert job.optimizer.steps == 0
    assert all(map(torch.equal, before, job.model.parameters()))
    assert train_step(job, batches, 1, World(), largest_loss=100.0).wait().stepped


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.spike_factor=0.5"], "every loss above the median would be a spike"),
        (["trainer.spike_factor=-1"], "trainer.spike_factor=-1"),
        (["trainer.max_bad_steps=3"], "has no effect while trainer.on_bad_step=stop"),
        (
            ["trainer.on_bad_step=rewind", "checkpoint.every_n_steps=0"],
            "there is no checkpoint to return to",
        ),
        (["trainer.on_bad_step=skip", "precision=fp16"], "whose loss scale skips steps itself"),
        (["trainer.on_bad_step=ignore"], "trainer.on_bad_step=ignore"),
    ],
)
def test_keys_without_sense(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fp8cfg.compose(["recipe=llama_tiny", *words])


# ------------------------------------------------------------------------------------------------
# Ranks


LAYOUTS = {
    "zero": "storage.shard=zero1",
    "fsdp": "storage.shard=fsdp",
    "tensor": "trainer.strategy.tensor_model_parallel_size=2",
    "pipeline": "trainer.strategy.pipeline_model_parallel_size=2",
}


def _plant_in_stage(job: Job) -> Job:
    """Makes activations infinite on the second stage in step BAD, of two microbatches, and in its rerun."""
    modules = dict(job.model.named_modules())
    calls = 0

    def spoil(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return output * math.inf if 2 * BAD - 1 <= calls <= 2 * BAD + 2 else output

    if "layers.1.mlp.linear_fc2" in modules:
        modules["layers.1.mlp.linear_fc2"].register_forward_hook(spoil)
    return job


def _on_rank(world: World) -> dict[str, Any]:
    """Losses of a run that skips a batch and of one that goes back, under several layouts."""
    found: dict[str, Any] = {}
    root = Path(_shared_folder())
    for name, layout in LAYOUTS.items():
        for policy in ("skip", "rewind"):
            words = (
                "precision=bf16_fp8",
                "trainer.devices=2",
                layout,
                f"trainer.on_bad_step={policy}",
            )
            job = fp8cfg.build(small(*words, *WORDS))
            job = _plant_in_stage(job) if name == "pipeline" else plant(job, BAD)
            folder = root / f"{name}-{policy}"
            result = fp8cfg.fit(job, folder, world=world, say=lambda _: None)
            lines = metrics(folder)
            bad = [line["step"] for line in lines if line.get("bad_step") == policy]
            found[f"{name} {policy}"] = [result.loss, bad, len(lines)]
    return found


def _shared_folder() -> str:
    """A folder of both ranks: that of the file through which they met."""
    import torch.distributed as dist

    texts = [None]
    if dist.get_rank() == 0:
        import tempfile

        texts = [tempfile.mkdtemp()]
    dist.broadcast_object_list(texts)
    return str(texts[0])


@pytest.mark.slow
def test_ranks_skip_and_go_back_together(tmp_path: Path) -> None:
    first, second = on_ranks(2, _on_rank, tmp_path)
    assert first == second
    for name in LAYOUTS:
        loss, bad, count = first[f"{name} skip"]
        assert math.isfinite(loss) and (bad, count) == ([BAD], 8)
        assert first[f"{name} rewind"] == first[f"{name} skip"]
