"""Loops of other projects around what we build: the examples are run, and their losses are those of our own loop."""

from __future__ import annotations

import functools
import importlib
import re
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.backends.native import backend
from fp8cfg.building.job import JobAutocast
from fp8cfg.training.data import run_data
from tests.support.ranks import launch
from tests.support.small import SMALL, losses, small, steps

FOLDER = Path(__file__).parents[1] / "examples"
LIBRARY = {
    "own_loop": "torch",
    "accelerate_loop": "accelerate",
    "fabric_loop": "lightning_fabric",
    "any_model": "transformers",
    "transformers_trainer": "transformers",
}
OURS, LLAMA = ("own_loop", "accelerate_loop", "fabric_loop"), ("any_model", "transformers_trainer")
DELAYED, O2 = ("precision=bf16_fp8",), ("precision=bf16_fp8", "opt_level=O2")
CURRENT, FP16 = ("precision=bf16_fp8_current", "model.num_layers=3"), ("precision=fp16_fp8",)
OF_A_LAYER = {
    "own_loop": 4,
    "accelerate_loop": 4,
    "fabric_loop": 4,
    "any_model": 7,
    "transformers_trainer": 7,
}
"""Linear layers of a decoder layer: ours fuses q, k and v, and the two halves of the MLP; transformers' Llama does not."""

own = functools.cache(functools.partial(losses, count=6))


@pytest.fixture(autouse=True)
def plain_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where a Trainer writes, if it does


def train(name: str, *words: str, **arguments: Any) -> list[float]:
    pytest.importorskip(LIBRARY[name])
    if name == "transformers_trainer":
        arguments = {"save_strategy": "no", "disable_tqdm": True, **arguments}
    return importlib.import_module(f"examples.{name}").train(small(*words), **arguments)


class LlamaLoss(nn.Module):
    """The Llama of the examples as `train_step` calls a model."""

    def __init__(self, recipe: fp8cfg.Recipe) -> None:
        super().__init__()
        self.llama = importlib.import_module("examples.any_model").llama(recipe)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.llama(input_ids=tokens, labels=tokens).loss


@functools.cache
def llama_losses(*words: str) -> list[float]:
    recipe = small(*words)
    return [s.loss for s in steps(fp8cfg.build(recipe, model=LlamaLoss(recipe)), 6)]


@pytest.mark.parametrize(
    ("words", "layers"), [(DELAYED, 2), (CURRENT, 1), (O2, 2)], ids=["delayed", "current", "O2"]
)
@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.filterwarnings(
    "ignore:only .* ran in FP8:RuntimeWarning"
)  # current: one layer of three, the others are the preset's ends
def test_losses_are_those_of_our_own_loop_bit_for_bit_and_in_fp8(
    name: str, words: tuple[str, ...], layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    got = train(name, *words)
    assert got == (own if name in OURS else llama_losses)(*words)
    assert f"FP8: {layers * OF_A_LAYER[name]} of " in capsys.readouterr().out


@pytest.mark.parametrize("name", OURS)
def test_the_loss_scale_of_fp16(name: str) -> None:
    assert train(name, *FP16) == own(*FP16)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("words", [DELAYED, O2], ids=["delayed", "O2"])
def test_microbatches(name: str, words: tuple[str, ...]) -> None:
    """Only the mean that is printed differs, since an example takes it in Python's floats: within two float32 roundings. A
    gradient that differed in one bit would be seen, for FP8 rounding carries it to the third digit (see the next test)."""
    words = (*words, "trainer.micro_batch_size=4")
    assert train(name, *words) == pytest.approx(own(*words), abs=5e-7)


def test_microbatches_of_a_trainer() -> None:
    """A Trainer divides the sum by all tokens, where we take the mean of means: gradients differ in their last bit, and FP8 makes
    more of that."""
    words = (*DELAYED, "trainer.micro_batch_size=4")
    assert train("transformers_trainer", *words) == pytest.approx(llama_losses(*words), abs=5e-3)


@pytest.mark.parametrize("name", [*OURS, "any_model"])
def test_a_loop_that_does_not_run_in_fp8_stops(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(JobAutocast, "__call__", lambda self, enabled=True: nullcontext())
    with pytest.raises(fp8cfg.NotFP8Error):
        train(name, *DELAYED)
    assert "step 1" not in capsys.readouterr().out


def test_a_trainer_that_recomputes_activations_does_so_in_fp8() -> None:
    assert train("transformers_trainer", *DELAYED, activation_checkpointing=True) == llama_losses(
        *DELAYED
    )


def test_a_trainer_that_does_not_run_in_fp8_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "autocast", lambda model, enabled=True: nullcontext())
    with pytest.raises(fp8cfg.NotFP8Error, match="no layer ran in FP8"):
        train("transformers_trainer", *DELAYED)


@pytest.mark.parametrize("words", [DELAYED, FP16], ids=["bf16", "fp16"])
def test_a_trainer_of_the_recipes_own_model(words: tuple[str, ...]) -> None:
    transformers = pytest.importorskip("transformers")
    job, found = fp8cfg.build(small(*words)), []

    class Own(nn.Module):
        """The model as a Trainer calls one; Trainer also writes into `model.config`, and ours is frozen."""

        def __init__(self) -> None:
            super().__init__()
            self.model = job.model

        def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
            with job.autocast():
                loss = job.scaled(self.model(tokens, targets))
            found.append(loss.item())
            return {"loss": loss}

    samples = zip(*run_data(job.recipe)[0].rows(0, 48), strict=True)
    transformers.Trainer(
        model=Own(),
        optimizers=(job.optimizer, job.scheduler()),
        train_dataset=[{"tokens": a, "targets": b} for a, b in samples],
        args=transformers.TrainingArguments(
            max_steps=6,
            per_device_train_batch_size=8,
            max_grad_norm=0,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="sequential",
            disable_tqdm=True,
        ),
    ).train()
    assert found == own(*words)
    job.prove()


@pytest.mark.parametrize("words", [DELAYED, O2], ids=["delayed", "O2"])
def test_a_trainer_saves_and_resumes(words: tuple[str, ...], tmp_path: Path) -> None:
    folder = {"output_dir": str(tmp_path / "run")}
    train("transformers_trainer", *words, **folder, save_strategy="steps", save_steps=4)
    (tmp_path / "run/checkpoint-6").rename(tmp_path / "last")
    assert train(
        "transformers_trainer",
        *words,
        **folder,
        resume_from_checkpoint=str(tmp_path / "run/checkpoint-4"),
    ) == llama_losses(*words)


def test_a_model_that_is_converted_back_is_saved_as_transformers_reads_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    recipe = small(*DELAYED)
    job = fp8cfg.build(recipe, model=LlamaLoss(recipe))
    list(steps(job, 2))
    tokens, _ = run_data(recipe)[0].batch(2)
    want = job.model(tokens, tokens)
    fp8cfg.convert_back(job.model).llama.save_pretrained(tmp_path)
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(read(input_ids=tokens, labels=tokens).loss, want)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words", "within"),
    [
        ("accelerate_loop", DELAYED, 1e-4),
        ("accelerate_loop", O2, 2e-3),
        ("fabric_loop", DELAYED, 2e-3),
    ],
)
def test_on_two_ranks(name: str, words: tuple[str, ...], within: float, tmp_path: Path) -> None:
    """Without DistributedDataParallel, the gradients summed by the job. Four digits are printed. Under O2 they go over the wire in FP8;
    Fabric gives a rank every other sample, so that microbatches are others."""
    pytest.importorskip(LIBRARY[name])
    words = (*words, "trainer.micro_batch_size=4", "trainer.max_steps=3")
    done = launch(
        2, *SMALL, *words, "trainer.accelerator=cpu", script=FOLDER / f"{name}.py", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert [
        float(loss) for loss in re.findall(r"step \d: loss (\S+)", done.stdout)
    ] == pytest.approx(losses(*words, count=3), abs=within)
    assert "FP8: 8 of " in done.stdout


def some(
    job: fp8cfg.Job,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    backward: Any,
    first: int,
    count: int = 3,
) -> list[float]:
    batches, _ = run_data(job.recipe)
    found = []
    for step in range(first, first + count):
        with job.autocast():
            loss = job.scaled(model(*batches.batch(step)))
            backward(loss)
        optimizer.step(), scheduler.step(), optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("words", [DELAYED, O2, FP16], ids=["delayed", "O2", "fp16"])
def test_accelerate_saves_and_resumes(words: tuple[str, ...], tmp_path: Path) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(mixed_precision="no", cpu=True)
    found = []
    for first in (0, 3):
        job = fp8cfg.build(small(*words))
        prepared = accelerator.prepare(job.model, job.optimizer, job.scheduler())
        if first:
            accelerator.load_state(str(tmp_path))
        found += some(job, *prepared, accelerator.backward, first)
        accelerator.save_state(str(tmp_path))
        accelerator.free_memory()
    assert found == own(*words)


@pytest.mark.parametrize("words", [DELAYED, O2, FP16], ids=["delayed", "O2", "fp16"])
def test_fabric_saves_and_resumes(words: tuple[str, ...], tmp_path: Path) -> None:
    fabric = pytest.importorskip("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    found = []
    for first in (0, 3):
        job = fp8cfg.build(small(*words))
        model, optimizer = fabric.setup(job.model, job.optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": job.scheduler()}
        if first:
            fabric.load(tmp_path / "state", state)
        found += some(job, *state.values(), fabric.backward, first)
        fabric.save(tmp_path / "state", state)
    assert found == own(*words)


def test_the_scheduler_is_the_schedule_however_often_it_is_stepped(tmp_path: Path) -> None:
    job = fp8cfg.build(small(*DELAYED))
    scheduler = job.scheduler()
    assert scheduler.get_last_lr() == [job.schedule.lr_at(0)] * 2
    some(job, job.model, job.optimizer, scheduler, Tensor.backward, 0, count=2)
    scheduler.step(), scheduler.step()
    assert scheduler.get_last_lr() == [job.schedule.lr_at(2)] * 2
    job.model.final_layernorm.weight.grad = torch.full([64], torch.inf)
    assert not job.optimizer.step()
    scheduler.step()
    assert (
        scheduler.get_last_lr()
        == [job.schedule.lr_at(2)] * 2
        == [group["lr"] for group in job.optimizer.param_groups]
    )
    torch.save(scheduler.state_dict(), tmp_path / "scheduler.pt")
    other = fp8cfg.build(small(*DELAYED)).scheduler()
    other.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    assert other.get_last_lr() == scheduler.get_last_lr() and other.schedule == job.schedule


def test_a_loop_that_does_not_scale_its_loss_under_fp16_stops() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"no loss was multiplied by .*; call job\.backward\(loss\), or job\.scaled\(loss\)",
    ):
        train("transformers_trainer", *FP16)
    job = fp8cfg.build(small(*DELAYED))
    loss = job.model(*run_data(job.recipe)[0].batch(0))
    assert job.scaled(loss) is loss, "there is nothing to scale under bf16"


@pytest.mark.parametrize("name", LIBRARY)
def test_scripts_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(LIBRARY[name])
    monkeypatch.setattr(
        sys, "argv", [name, *SMALL, "trainer.max_steps=2", "trainer.accelerator=cpu"]
    )
    runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert "linear layers' FLOPs" in out or "matmul FLOPs" in out
    assert len(re.findall(r"step \d: loss \d|'loss'", out)) == 2
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60
    monkeypatch.setattr(sys, "argv", [name, "fp8.margn=1", "precision=bf16_pf8"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert (
        capsys.readouterr().err.splitlines()[0]
        == "error: fp8.margn: no such key; did you mean 'fp8.margin'?"
    )
