"""Steps launched ahead, as on a GPU, here on a CPU: losses, metrics, checkpoints and messages are those of a run that reads each step
before it begins the next."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fp8cfg
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.optim.deferred_step import DeferredSteps
from fp8cfg.parallel.process_group import World
from fp8cfg.run_folder.metrics_file import MEASURED
from fp8cfg.schema.errors import ConfigError
from fp8cfg.training import loop, microbatches, runs
from fp8cfg.training.loop import Callback
from fp8cfg.training.microbatches import can_run_ahead
from tests.support.ranks import on_ranks
from tests.support.small import small, steps

NEVER = ("trainer.val_check_interval=0", "checkpoint.every_n_steps=0")


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets runs launch ahead where a GPU's would; undone by the test that wants the other."""
    _run_ahead(monkeypatch, True)
    return monkeypatch


def _run_ahead(patch: pytest.MonkeyPatch, ahead: bool) -> None:
    """Lets runs launch a step before the one before is read, or not. Under a loss scale none does."""
    for module in (loop, microbatches):
        patch.setattr(module, "can_run_ahead", lambda job: ahead and job.loss_scaler is None)


def trained(
    root: Path, *words: str, can_defer: bool = True
) -> tuple[list[str], list[dict[str, Any]], dict[str, bytes], loop.Result]:
    """What a run says, its metrics but for times, and the files of its checkpoints. Unless it `can_defer` the host decides about each
    step before it goes on."""
    said: list[str] = []
    job = fp8cfg.build(small(*words))
    job.optimizer.can_defer = can_defer
    result = fp8cfg.fit(job, root, say=said.append)
    metrics = [
        {k: v for k, v in json.loads(line).items() if k not in MEASURED}
        for line in (root / "metrics.jsonl").read_text().splitlines()
    ]
    files = {
        str(p.relative_to(root)): p.read_bytes()
        for p in sorted((root / "checkpoints").rglob("*.safetensors"))
    }
    # Lines of steps have a speed.
    lasting = [text.replace(str(root), "FOLDER") for text in said if "tokens/s" not in text]
    return lasting, metrics, files, result


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=bf16_fp8", *NEVER),
        ("precision=bf16_fp8", "fp8.params=false", "fp8.interval=2"),
        ("precision=bf16_fp8", "opt_level=O2", *NEVER),
        ("precision=bf16_fp8", "opt_level=O3", "storage.rounding=stochastic", *NEVER),
        ("precision=bf16_fp8_current", "trainer.micro_batch_size=4"),
        ("precision=bf16_fp8_current", "backend=torchao", *NEVER),
        (
            "precision=fp16",
            "precision.initial_loss_scale=128",
            "precision.loss_scale_window=2",
            "trainer.micro_batch_size=4",
        ),
        ("precision=fp32", "optim.name=sgd", "optim.momentum=0.9", *NEVER),
        ("precision=bf16_fp8", "storage.shard=fsdp", "optim.name=sgd", *NEVER),
    ],
    ids=" ".join,
)
def test_a_run_is_the_same(
    words: tuple[str, ...], tmp_path: Path, ahead: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    settle = DeferredSteps.settle
    ahead.setattr(
        DeferredSteps,
        "settle",
        lambda self, norm: (taken.append(len(self._launched)), settle(self, norm))[1],
    )
    got = trained(tmp_path / "ahead", *words)
    # Under a loss scale each step is read before the next is launched.
    assert len(taken) == 6 and max(taken) == (1 if "precision=fp16" in words else 2)
    ahead.undo()
    want = trained(tmp_path / "one", *words, can_defer=False)
    assert got == want and len(got[2]) > 0 and len(taken) == 6


def _break_gradients(job: fp8cfg.Job, *at: int) -> None:
    """Gradients of one layer are infinite in the steps after so many ones."""
    seen = [0]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen[0] += 1
        return gradient * torch.inf if seen[0] - 1 in at else gradient

    if job.recipe.storage.shard == "fsdp":  # which calls no hooks of parameters
        job.model.final_layernorm.register_forward_hook(
            lambda _, args, y: y.register_hook(hook) and None if y.requires_grad else None
        )
    else:
        job.model.final_layernorm.weight.register_hook(hook)


@pytest.mark.parametrize(
    "words",
    [
        ("precision=bf16",),
        ("precision=bf16_fp8",),
        ("precision=bf16_fp8", "fp8.params=false"),
        ("precision=bf16_fp8", "opt_level=O3", "storage.exp_avg=fp8_block"),
    ],
    ids=" ".join,
)
def test_a_step_that_is_not_finite_changes_nothing_nor_the_one_behind_it(
    words: tuple[str, ...], ahead: pytest.MonkeyPatch
) -> None:
    ends, states = [], []
    for can_defer in (True, False):
        job = fp8cfg.build(small(*words, *NEVER))
        job.optimizer.can_defer = can_defer
        _break_gradients(job, 3)
        with pytest.raises(loop.Diverged, match="step 4: the gradient norm is inf") as end:
            runs.train_job(job, say=lambda _: None)
        ends.append(
            (
                str(end.value),
                job.optimizer.steps,
                job.optimizer.state_json(),
                job.optimizer.grad_norm,
            )
        )
        states.append(
            {
                **stored_state_dict(job.model),
                **job.optimizer.state_tensors(),
                **{f"fp8 {k}": v for k, v in job.state_dict().items()},
            }
        )
        ahead.undo()
    assert ends[0] == ends[1] and ends[0][1] == 3
    assert states[0].keys() == states[1].keys()
    assert [
        name
        for name in states[0]
        if not torch.equal(states[0][name].float(), states[1][name].float())
    ] == []


def test_a_first_step_that_is_skipped_leaves_weights_as_they_began(
    ahead: pytest.MonkeyPatch,
) -> None:
    """They were quantized from numbers of which masters in fewer bits are rounded ones."""
    found = []
    for can_defer in (True, False):
        job = fp8cfg.build(
            small(
                "precision=fp16_fp8",
                "opt_level=O3",
                "storage.master_weight=fp16_scaled",
                "precision.initial_loss_scale=1024",
                *NEVER,
            )
        )
        job.optimizer.can_defer = can_defer
        _break_gradients(job, 0)
        result = runs.train_job(job, say=lambda _: None)
        found.append(
            (
                result.loss,
                job.optimizer.steps,
                stored_state_dict(job.model) | job.optimizer.state_tensors(),
            )
        )
        ahead.undo()
    (loss, made, tensors), (want, _, others) = found
    assert loss == want and made == 5
    assert [
        name for name, t in tensors.items() if not torch.equal(t.float(), others[name].float())
    ] == []


@pytest.mark.parametrize(
    "words",
    [
        ("precision=fp16",),
        ("precision=fp16_fp8", "fp8.params=false"),
        ("precision=fp16_fp8",),
        ("precision=fp16", "opt_level=O2"),
        ("precision=fp16", "optim.name=sgd"),
        ("precision=fp16_fp8", "fp8.interval=3"),
        ("precision=fp16_fp8", "fp8.interval=2", "fp8.params=false"),
    ],
    ids=" ".join,
)
def test_under_a_loss_scale_the_run_goes_on(
    words: tuple[str, ...], tmp_path: Path, ahead: pytest.MonkeyPatch
) -> None:
    """Two steps overflow, of which the second uses up the hysteresis; the next ones have the learning rate and the scale of a run that
    reads each step at once, in metrics, checkpoints and messages."""
    found = []
    recipe = small(
        *words,
        "precision.initial_loss_scale=1024",
        "precision.loss_scale_window=2",
        "trainer.max_steps=9",
    )
    for name in ("ahead", "one"):
        job, said = fp8cfg.build(recipe), list[str]()
        job.optimizer.can_defer = name == "ahead"
        _break_gradients(job, 3, 4)
        fp8cfg.fit(job, tmp_path / name, say=said.append)
        lines = [
            json.loads(line)
            for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        ]
        files = {
            str(p.relative_to(tmp_path / name)): p.read_bytes()
            for p in sorted((tmp_path / name).rglob("*.safetensors"))
        }
        found.append(
            (
                [{k: v for k, v in line.items() if k not in MEASURED} for line in lines],
                files,
                [s.replace(name, "") for s in said if "tokens/s" not in s],
            )
        )
        ahead.undo()
    lines = [line for line in found[0][0] if "loss_scale" in line]
    assert [line["stepped"] for line in lines] == [
        True,
        True,
        True,
        False,
        False,
        True,
        True,
        True,
        True,
    ]
    assert [line["loss_scale"] for line in lines] == [
        1024,
        2048,
        2048,
        2048,
        1024,
        1024,
        2048,
        2048,
        4096,
    ]
    assert found[0] == found[1]


def test_a_signal_stops_with_a_checkpoint_that_resumes_to_the_same_losses(
    tmp_path: Path, ahead: pytest.MonkeyPatch
) -> None:
    recipe = small("precision=bf16_fp8", *NEVER)
    job = fp8cfg.build(recipe)
    job.model.register_forward_hook(
        lambda *_: (
            os.kill(os.getpid(), signal.SIGTERM)
            if job.optimizer.steps == 2 and job.model.training
            else None
        )
    )
    with pytest.raises(loop.Interrupted, match="stopped after step 3 of 6"):
        fp8cfg.fit(job, tmp_path, say=lambda _: None)
    fp8cfg.resume(tmp_path, say=lambda _: None)
    got = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    ahead.undo()
    assert [line["step"] for line in got] == [1, 2, 3, 4, 5, 6]
    assert [line["loss"] for line in got] == [s.loss for s in steps(fp8cfg.build(recipe), 6)]


def test_a_stop_that_arrives_while_a_save_waits_for_a_launched_step() -> None:
    """Several ranks read requests with the metrics of steps. The last one read may ask for more."""
    calls: list[str] = []

    def finish_steps(max_pending: int) -> None:
        training.requested = loop.Request.STOP

    training: Any = SimpleNamespace(
        requested=loop.Request.SAVE,
        world=SimpleNamespace(size=2, apply_timeout=lambda *_: None),
        _finish_steps=finish_steps,
        _save_and_interrupt=lambda done: calls.append(f"stop {done}"),
        _save=lambda done: None,
    )
    loop._Training._follow_requests(training, 4)
    assert calls == ["stop 4"] and training.requested == loop.Request.NONE


def test_an_error_of_the_next_step_comes_after_the_record_of_the_one_before(
    tmp_path: Path, ahead: pytest.MonkeyPatch
) -> None:
    job = fp8cfg.build(small("precision=bf16", *NEVER))

    def fail(*_: Any) -> None:
        if job.optimizer.steps == 3:
            raise MemoryError("of this test")

    job.model.register_forward_pre_hook(fail)
    with pytest.raises(MemoryError):
        fp8cfg.fit(job, tmp_path, say=lambda _: None)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [
        1,
        2,
        3,
    ] and job.optimizer.deferred is None


def test_a_callback_finds_the_job_as_its_step_left_it(ahead: pytest.MonkeyPatch) -> None:
    job, seen = fp8cfg.build(small("precision=bf16", *NEVER)), []

    class Count(Callback):
        def step(self, done: int, values: Any) -> None:
            seen.append((done, job.optimizer.steps))

    runs.train_job(job, say=lambda _: None, callbacks=[Count()])
    assert seen == [(n, n) for n in range(1, 7)]


def test_what_needs_the_host_is_not_launched_ahead() -> None:
    """An optimizer that is not ours, as MS-AMP's. A CPU gains nothing."""
    job = fp8cfg.build(small("precision=bf16"))
    assert job.optimizer.can_defer and not can_run_ahead(job)
    job.optimizer.can_defer = False
    with pytest.raises(ValueError, match="cannot be deferred"):
        DeferredSteps(job.optimizer)


def _on_rank(world: World) -> dict[str, Any]:
    """Losses of a run to its end, and of one whose first rank is told to stop in its second step; and how far that came."""
    _run_ahead(pytest.MonkeyPatch(), True)  # in this process
    written, write = [], loop.RunLogs.write
    loop.RunLogs.write = lambda self, done, values: (
        written.append(values["loss"]),
        write(self, done, values),
    )[1]  # type: ignore[method-assign]
    words = ("precision=bf16_fp8", "trainer.devices=2", "trainer.micro_batch_size=4", *NEVER)
    runs.train_job(fp8cfg.build(small(*words)), world=world, say=lambda _: None)
    whole, job = written[:], fp8cfg.build(small(*words))
    written.clear()
    if world.first:
        job.model.register_forward_hook(
            lambda *_: os.kill(os.getpid(), signal.SIGTERM) if job.optimizer.steps == 1 else None
        )
    with pytest.raises(loop.Interrupted):
        runs.train_job(job, world=world, say=lambda _: None)
    found = {"whole": whole, "stopped": written[:], "steps": job.optimizer.steps}
    for ahead in (True, False):
        _run_ahead(pytest.MonkeyPatch(), ahead)
        written.clear()
        job = fp8cfg.build(
            small(
                "precision=fp16_fp8",
                "storage.shard=fsdp",
                "precision.initial_loss_scale=1024",
                *words[1:],
            )
        )
        if world.first:
            _break_gradients(job, 3)
        assert job.optimizer.can_defer
        runs.train_job(job, world=world, say=lambda _: None)
        found[f"fsdp ahead {ahead}"] = (
            written[:],
            job.optimizer.steps,
            job.optimizer.grad_norm,
            job.loss_scaler.state(),
        )
        found[f"stages ahead {ahead}"] = _in_stages(world, words[1:])
        found[f"masked ahead {ahead}"] = _masked(world, "precision=bf16_fp8", *words[1:])
        found[f"masked stages ahead {ahead}"] = _masked(
            world,
            "precision=fp16_fp8",
            "precision.initial_loss_scale=1024",
            "precision.loss_scale_window=2",
            "trainer.strategy.pipeline_model_parallel_size=2",
            *words[1:],
        )
    return found


def _masked(world: World, *words: str) -> Any:
    """What a run writes whose samples have unlike numbers of targets, and its fifth step none; and how it ends."""
    lines, targets = [], microbatches.count_local_targets
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.RunLogs,
            "write",
            lambda self, done, values: lines.append((values["loss"], values["grad_norm"])),
        )
        job = fp8cfg.build(small("data.eod_mask_loss=true", *words))
        patch.setattr(
            microbatches,
            "count_local_targets",
            lambda job, given: 0 if job.optimizer.steps == 4 else targets(job, given),
        )
        with pytest.raises(ConfigError) as end:
            runs.train_job(job, world=world, say=lambda _: None)
    weights = sum(t.double().abs().sum() for t in stored_state_dict(job.model).values())
    return lines, str(end.value), job.optimizer.steps, float(weights)


def _in_stages(world: World, words: tuple[str, ...]) -> Any:
    """What a run of two stages writes and says, which skips its fourth step."""
    lines, said = [], list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            loop.RunLogs,
            "write",
            lambda self, done, values: lines.append(
                {k: v for k, v in values.items() if k not in MEASURED}
            ),
        )
        job = fp8cfg.build(
            small(
                "precision=fp16_fp8",
                "precision.initial_loss_scale=1024",
                "precision.loss_scale_window=2",
                "fp8.interval=2",
                "trainer.strategy.pipeline_model_parallel_size=2",
                *words,
            )
        )
        if world.rank == 1:
            _break_gradients(job, 6, 7)  # both microbatches
        else:  # the third has another input, and gradients that do not fit later on
            job.model.layers.get_submodule("0").register_forward_pre_hook(
                lambda _, args: (args[0] * (30 if job.optimizer.steps == 2 else 1), *args[1:])
            )
        runs.train_job(job, world=world, say=said.append)
    said = [text for text in said if "tokens/s" not in text]
    return (
        lines,
        said,
        job.optimizer.steps,
        str((lines, said, job.loss_scaler.state())),
    )  # of a norm that is NaN


@pytest.mark.slow
def test_on_two_ranks_all_stop_at_one_step_and_skip_one(tmp_path: Path) -> None:
    """The wish to stop goes with the step's numbers, and is known a step later; under FSDP2 gradients and norm are split over the ranks."""
    first, second = on_ranks(2, _on_rank, tmp_path)
    same = [k for k in first if "stages" not in k and "masked" not in k]
    assert [first[k] for k in same] == [second[k] for k in same]
    assert len(first["whole"]) == 6
    assert first["steps"] == 3 and first["stopped"] == first["whole"][:3]
    assert (
        first["fsdp ahead True"] == first["fsdp ahead False"] and first["fsdp ahead True"][1] == 5
    )
    (lines, said, done, text), want = first["stages ahead True"], first["stages ahead False"]
    assert text == want[-1] and done == want[2] == 5
    assert [line["stepped"] for line in lines] == [True] * 3 + [False] + [True] * 2
    assert any(line.get("fp8_clipped") for line in lines) and any(
        " clipped, the most " in text for text in said
    )
    for name in ("masked", "masked stages"):
        assert (
            first[f"{name} ahead True"] == first[f"{name} ahead False"]
            and second[f"{name} ahead True"] == second[f"{name} ahead False"]
        )
        lines, message, done, _ = first[f"{name} ahead True"]
        assert (
            len(lines) == 4 and message == "data=tiny: no token of step 5 has a loss" and done == 4
        )
