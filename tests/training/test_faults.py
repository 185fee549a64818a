"""The rerun of a bad step names the module and the tensor where the trouble is, and leaves the job as it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.checkpoint.job_state import capture_rng
from fp8cfg.data.indexed import write_indexed
from fp8cfg.numerics.scaling import INPUT
from fp8cfg.parallel.process_group import World
from fp8cfg.training import faults, loop, runs
from fp8cfg.training.data import run_data
from fp8cfg.training.fault_report import Fault
from fp8cfg.training.faults import find_fault
from fp8cfg.training.module_checks import PHASES
from tests.support.ranks import on_ranks
from tests.support.small import PACKED, small, steps

WORDS = ("trainer.micro_batch_size=4", "trainer.val_check_interval=0", "trainer.compile=off")
FC1 = "layers.1.mlp.linear_fc1"
FC2 = "layers.1.mlp.linear_fc2"


def find(job: Job, step: int = 0, world: World | None = None) -> Fault:
    """The fault of a step of `job`."""
    batches, _ = run_data(job.recipe)
    return find_fault(
        job, batches, step, world or World(), capture_rng(), "a test", "before the step"
    )


def place(fault: Fault) -> tuple[str, str, str]:
    """Module, tensor and phase of the first bad tensor."""
    assert fault.first_bad is not None
    return fault.first_bad.module, fault.first_bad.tensor, PHASES[fault.first_bad.phase]


def plant_weight(job: Job, name: str, value: float = math.nan) -> None:
    """Puts a bad value into the weight of a layer, as a broken update would."""
    parameter = dict(job.model.named_parameters())[f"{name}.weight"]
    job.optimizer.masters[parameter].data[3, 5] = value
    job.optimizer.write_parameters()


class Break(torch.autograd.Function):
    """Returns its input. The gradient is infinite."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * math.inf


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=bf16_fp8",),
        ("precision=bf16_fp8_current", "fp8.params=false", "model.recompute_granularity=full"),
        ("precision=bf16_mxfp8", "model.recompute_granularity=selective"),
    ],
    ids=" ".join,
)
def test_a_bad_weight_is_named(words: tuple[str, ...]) -> None:
    job = fp8cfg.build(small(*words, *WORDS))
    assert find(job).first_bad is None
    plant_weight(job, FC1)
    fault = find(job)
    assert place(fault) == (FC1, "weight", "forward")
    # MXFP8 stores a NaN in the scale of its tile.
    count = 32 if job.recipe.fp8.scaling == "mxfp8" else 1
    assert fault.first_bad is not None and (fault.first_bad.nan, fault.first_bad.infinite) == (
        count,
        0,
    )
    has_fp8 = job.recipe.fp8.enabled
    assert bool(fault.first_bad.format) == has_fp8 and ("e4m3" in fault.lines()[0]) == has_fp8


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_bad_activations_and_gradients_are_named(recompute: str) -> None:
    """By hooks and patches of one module: its output, the gradient of its input, that of its weight."""
    recipe = small("precision=bf16_fp8", f"model.recompute_granularity={recompute}", *WORDS)
    job = fp8cfg.build(recipe)
    layer = job.model.get_submodule(FC2)

    hook = layer.register_forward_hook(lambda *given: given[-1] * math.inf)
    assert place(find(job)) == (FC2, "output", "forward")
    hook.remove()

    plain = layer.forward
    layer.forward = lambda x: plain(Break.apply(x))  # type: ignore[method-assign]
    assert place(find(job)) == (FC2, "grad_input", "backward")
    layer.forward = plain  # type: ignore[method-assign]

    norm = job.model.get_submodule("layers.0.pre_mlp_layernorm")
    weight = dict(norm.named_parameters())["weight"]
    handle = weight.register_hook(lambda gradient: gradient * math.inf)
    assert place(find(job)) == ("layers.0.pre_mlp_layernorm", "weight_grad", "gradients")
    handle.remove()
    assert find(job).first_bad is None


def test_a_tensor_that_does_not_fit_its_scale_is_named() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8", *WORDS))
    list(steps(job, 3))
    layer: Any = job.model.get_submodule(FC1)
    layer.fp8_scale[INPUT] *= 2.0**10
    seen: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    fault = find(job)
    hook.remove()
    assert not fault.not_finite and place(fault) == (FC1, "input", "forward")
    first = fault.first_bad
    assert first is not None and first.scale_max == layer.fp8_scale[INPUT].item()
    largest = seen[0].abs().max().item() * first.scale_max
    # E4M3 rounds values below 464 down to 448, its largest one.
    assert first.range_used == pytest.approx(largest / 464, rel=1e-6)
    assert first.range_used > 100
    assert "times what FP8 can represent" in fault.lines()[0]


def test_masks_of_attention_are_not_bad() -> None:
    """They have -inf for tokens of other documents and outside of the window."""
    fault = find(fp8cfg.build(small("precision=bf16", "model.sliding_window=8", *PACKED, *WORDS)))
    assert fault.first_bad is None and fault.num_bad == 0
    assert "the rerun found no bad tensor" in fault.lines()[0]


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16_fp8",),
        ("precision=bf16_nvfp4",),
        ("precision=bf16_fp8", "opt_level=O3", "storage.rounding=stochastic"),
        ("precision=bf16_fp8", "storage.accumulate=stored", "opt_level=O2"),
        ("precision=bf16", "lora.enabled=true", "lora.dropout=0.5"),
    ],
    ids=" ".join,
)
def test_the_job_stays_as_it_was(words: tuple[str, ...]) -> None:
    recipe = small(*words, *WORDS)
    found = []
    for reruns in (False, True):
        torch.manual_seed(1)
        job = fp8cfg.build(recipe)
        losses = [step.loss for step in steps(job, 2)]
        if reruns:
            fault = find(job, step=1)
            assert fault.first_bad is None or fault.first_bad.is_finite
        losses += [step.loss for step in steps(job, 2, first=2)]
        found.append(losses)
    assert found[0] == found[1]


# ------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A run that a bad weight has ended: its folder, its messages and its error."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    job = fp8cfg.build(small("precision=bf16_fp8", "checkpoint.every_n_steps=0", *WORDS))

    class Breaks(fp8cfg.Callback):
        def step(self, done: int, values: Any) -> None:
            if done == 2:
                plant_weight(job, FC1)

    said: list[str] = []
    with pytest.raises(loop.Diverged) as end:
        fp8cfg.fit(job, folder, say=said.append, callbacks=[Breaks()])
    return folder, said, str(end.value)


def test_a_run_that_stops_prints_three_lines(stopped: tuple[Path, list[str], str]) -> None:
    folder, said, error = stopped
    begin = next(i for i, text in enumerate(said) if text.startswith("step 3: the gradient norm"))
    _, tensor, samples = said[begin : begin + 3]
    assert tensor.startswith(
        f"  first not finite: {FC1} weight (forward, microbatch 1, rank 0), 1 NaN and 0 infinite"
        " of 16,384 values, scale "
    )
    assert samples.startswith("  samples: 16 (document ")
    assert samples.endswith(f"details: {folder / 'fault-step-3.json'}")
    assert error.startswith(
        "step 3: the gradient norm is nan (loss nan), and the step was skipped;"
    )


def test_the_file_has_the_details(stopped: tuple[Path, list[str], str]) -> None:
    def refuse(text: str) -> None:
        raise ValueError(text)

    text = (stopped[0] / "fault-step-3.json").read_text()
    data = json.loads(text, parse_constant=refuse)  # it is JSON, which has no NaN
    assert data["step"] == 3 and data["policy"] == "stop"
    assert data["rerun"]["loss"] == "NaN" and data["rerun"]["weights"] == "before the step"
    assert data["first"]["module"] == FC1 and data["first"] == data["not_finite"][0]
    # The NaN spreads to the output of its layer and from there on.
    assert [each["module"] for each in data["not_finite"][1:3]] == [FC1, FC2]
    assert [each["sample"] for each in data["samples"]] == list(range(16, 24))
    assert [each["read_by"] for each in data["samples"]] == [[[0, 1]]] * 4 + [[[0, 2]]] * 4


def test_a_loss_that_is_infinite_ends_a_run() -> None:
    """All gradients are finite, so the optimizer has made the step."""
    job = fp8cfg.build(small("precision=bf16", *WORDS))
    said: list[str] = []

    def spoil(_: Any, __: Any, loss: Tensor) -> Tensor:
        return loss + math.inf if job.optimizer.steps == 1 else loss

    job.model.register_forward_hook(spoil)
    with pytest.raises(loop.Diverged, match=r"^step 2: the loss is inf; lower optim.lr"):
        runs.train_job(job, say=said.append)
    assert any("the weights after the step" in text for text in said)
    assert job.optimizer.steps == 2


def test_a_rerun_that_fails_does_not_hide_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("of this test")

    monkeypatch.setattr(faults, "find_fault", fail)
    job = fp8cfg.build(small("precision=bf16", *WORDS))
    plant_weight(job, FC1)
    said: list[str] = []
    with pytest.raises(loop.Diverged, match="step 1: the gradient norm is nan"):
        runs.train_job(job, say=said.append)
    assert "  the batch could not run again: of this test" in said


@pytest.mark.slow
def test_a_compiled_run_is_traced_eagerly() -> None:
    """Its compiled code stays valid, and gives the same losses as without a rerun."""
    found = []
    for reruns in (False, True):
        job = fp8cfg.build(small("precision=bf16_fp8", *WORDS[:2], "trainer.compile=on"))
        job.compile_model()
        losses = [step.loss for step in steps(job, 2)]
        if reruns:
            find(job, step=1)
        losses += [step.loss for step in steps(job, 2, first=2)]
        found.append(losses)
    assert found[0] == found[1]
    plant_weight(job, FC1)
    fault = find(job)
    assert fault.compiled and place(fault) == (FC1, "weight", "forward")


# ------------------------------------------------------------------------------------------------
# Samples


def rows(path: Path, count: int) -> list[str]:
    """Writes a table of texts, one of them empty, and returns them."""
    texts = [f"text {number} " * (number + 1) for number in range(count)]
    texts[3] = ""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


@pytest.mark.parametrize("streams", [False, True])
def test_a_sample_is_found_in_its_file(streams: bool, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    texts = rows(path, 80)
    words = ["data=jsonl", f"data.path={path}", f"data.streaming={str(streams).lower()}"]
    recipe = fp8cfg.compose([*_small_without_data(), "precision=bf16", *WORDS, *words])
    job = fp8cfg.build(recipe)
    batches, _ = run_data(recipe)
    tokens = batches.batch(1)[0]
    for sample, row in zip(find(job, step=1).samples, tokens, strict=True):
        file, _, number = sample["place"].rpartition(", row " if streams else ":")
        assert file == str(path)
        text = texts[int(number) - (not streams)].encode()
        # A token is a byte, and the end of a document is one more token.
        begin = text[sample["offset"] : sample["offset"] + 32]
        assert bytes(row[: len(begin)].tolist()) == begin and len(text) >= sample["offset"]


def test_a_conversation_is_found_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    lines = [{"prompt": f"{number}? ", "completion": f"{number}"} for number in range(20)]
    lines[2]["completion"] = ""  # left out if its end token does not fit
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["data=chat", f"data.path={path}", "data.validation_fraction=0.2"]
    recipe = fp8cfg.compose([*_small_without_data(), "precision=bf16", *WORDS, *words])
    tokens = run_data(recipe)[0].batch(0)[0]
    for sample, row in zip(find(fp8cfg.build(recipe)).samples, tokens, strict=True):
        line = json.loads(path.read_text().splitlines()[int(sample["place"].split(":")[-1]) - 1])
        prompt = line["prompt"].encode()
        assert bytes(row[: len(prompt)].tolist()) == prompt


def test_a_sample_of_token_files_and_of_a_mixture(tmp_path: Path) -> None:
    for part, first in (("a", 0), ("b", 100)):
        documents = [np.full(90, first + number) for number in range(12)]
        write_indexed(tmp_path / part, documents, 272)
    parts = ",".join(f"{{path: {tmp_path / part}, weight: 1}}" for part in ("a", "b"))
    words = ["data=tokens", f"data.mixture=[{parts}]", "data.validation_fraction=0.2"]
    recipe = fp8cfg.compose([*_small_without_data(), "precision=bf16", *WORDS, *words])
    tokens = run_data(recipe)[0].batch(0)[0]
    for sample, row in zip(find(fp8cfg.build(recipe)).samples, tokens, strict=True):
        assert row[0].item() == 100 * sample["part"] + sample["document"]
        assert 0 <= sample["offset"] < 90


def _small_without_data() -> list[str]:
    """The words of the small recipe without its data."""
    from tests.support.small import small_words

    return [word for word in small_words(WORDS[1]) if word not in ("data=tiny", WORDS[1])]


# ------------------------------------------------------------------------------------------------
# Ranks


LAYOUTS: dict[str, tuple[str, ...]] = {
    "data": (),
    "zero2": ("storage.shard=zero2",),
    "fsdp": ("storage.shard=fsdp",),
    "tensor": ("trainer.strategy.tensor_model_parallel_size=2",),
    "context": ("trainer.strategy.context_parallel_size=2",),
    "pipeline": ("trainer.strategy.pipeline_model_parallel_size=2",),
}


def _with_output_hook(job: Job, broken: Callable[[], bool]) -> None:
    """Makes the output of FC2 infinite on a rank that has it."""
    modules = dict(job.model.named_modules())
    if FC2 in modules:
        modules[FC2].register_forward_hook(
            lambda _, __, output: output * math.inf if broken() else output
        )


def _on_rank(world: World) -> dict[str, Any]:
    """The first bad tensor under each layout, and whether the job is as before."""
    found: dict[str, Any] = {}
    for name, layout in LAYOUTS.items():
        words = ("precision=bf16_fp8", "trainer.devices=2", *layout, *WORDS)
        job = fp8cfg.build(small(*words))
        # Data-parallel ranks read different samples, and only the second one has trouble.
        is_broken = name in ("tensor", "context", "pipeline") or world.rank == 1
        state = {"broken": False}
        _with_output_hook(job, lambda state=state, bad=is_broken: bad and state["broken"])
        clean = find(job, world=world)
        state["broken"] = True
        fault = find(job, world=world)
        state["broken"] = False
        assert clean.first_bad is None
        assert fault.first_bad is not None
        found[name] = [*place(fault), fault.first_bad.rank, fault.first_bad.microbatch, clean.loss]
    return found


@pytest.mark.slow
def test_ranks_agree_on_the_first_tensor(tmp_path: Path) -> None:
    first, second = on_ranks(2, _on_rank, tmp_path)
    assert first == second
    for name, (module, tensor, phase, rank, microbatch, loss) in first.items():
        assert (module, tensor, phase, microbatch) == (FC2, "output", "forward", 1), name
        assert rank == (0 if name in ("tensor", "context") else 1), name
        assert loss == pytest.approx(first["data"][-1], rel=2e-3), name
