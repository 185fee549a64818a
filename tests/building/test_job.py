"""A built recipe in loops of one's own: what is copied, summed and silenced."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import fp8cfg
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.parallel.process_group import World
from fp8cfg.training.data import run_data
from tests.support.ranks import on_ranks
from tests.support.small import losses, small

TWO = ("precision=bf16_fp8", "trainer.micro_batch_size=4")


def by_hand(world: World) -> list[float]:
    job = fp8cfg.build(small(*TWO))
    batches, found = run_data(job.recipe)[0], []
    for step in range(3):
        with job.autocast():
            loss = job.model(*batches.batch(step, world.rank, world.size))
            job.backward(loss, parts=world.size)
        job.sum_gradients()
        if world.size > 1:
            with pytest.raises(RuntimeError, match="summed already"):
                job.sum_gradients()
        job.schedule.apply(job.optimizer, step)
        job.optimizer.step()
        job.optimizer.zero_grad()
        found.append(world.sum(loss.detach() / world.size).item())
    job.prove()
    return found


@pytest.mark.slow
def test_a_loop_of_ones_own_on_two_ranks(tmp_path: Path) -> None:
    """Each takes half of the batch that one rank takes in two microbatches: the same gradients, summed in another order."""
    first, second = on_ranks(2, by_hand, tmp_path)
    assert first == second == pytest.approx(losses(*TWO, count=3), abs=2e-6)
    assert by_hand(World()) == losses("precision=bf16_fp8", count=3), (
        "with one rank there is nothing to sum"
    )


def unsummed(world: World) -> list[str]:
    """Two steps whose gradients nobody sums, two that are summed, and two in which DistributedDataParallel does it."""
    said = []
    for way in ("nobody", "job", "others"):
        torch.manual_seed(0)
        job = fp8cfg.build(
            fp8cfg.compose(["precision=fp32", "trainer.accelerator=cpu"]), model=nn.Linear(64, 64)
        )
        model = nn.parallel.DistributedDataParallel(job.model) if way == "others" else job.model
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                job.backward(model(torch.randn(16, 64)).pow(2).mean())
                if way == "job":
                    job.sum_gradients()
                job.optimizer.step()
                job.optimizer.zero_grad()
        said += [
            f"{way}: {w.category.__name__} {str(w.message).partition(',')[0]} {Path(w.filename).name}"
            for w in seen
        ]
    return said


@pytest.mark.slow
def test_gradients_that_nobody_summed_are_said_once(tmp_path: Path) -> None:
    line = "nobody: RuntimeWarning the gradients of this step were not summed over the 2 ranks test_job.py"
    assert on_ranks(2, unsummed, tmp_path) == [[line], [line]]


def wrapped(world: World) -> list[torch.Tensor]:
    recipe = fp8cfg.compose(
        [
            "precision=bf16_fp8",
            "fp8={params: false, output_layer: true}",
            "backend=native",
            "trainer.accelerator=cpu",
        ]
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).bfloat16()
    fp8 = fp8cfg.convert_model(model, recipe)
    outer = nn.parallel.DistributedDataParallel(model)
    fp8cfg.apply_fp8_autowrap(outer, recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        torch.manual_seed(10 * step + world.rank)
        outer(torch.randn(16, 64).bfloat16()).float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    fp8.prove()
    return [*stored_state_dict(model).values()]


@pytest.mark.slow
def test_a_converted_model_trains_under_distributed_data_parallel(tmp_path: Path) -> None:
    """Parameters and scales are the same on both ranks, whose data are not."""
    first, second = on_ranks(2, wrapped, tmp_path)
    rolled = [
        slice(1, None) if a.shape == (1024, 3) else slice(None) for a in first
    ]  # the first row is of the last pass
    assert len(first) == 8 and all(
        torch.equal(a[rows], b[rows]) for a, b, rows in zip(first, second, rolled, strict=True)
    )


def test_a_job_is_not_copied_and_a_model_is() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8", "opt_level=O2"))
    batch = run_data(job.recipe)[0].batch(0)
    with pytest.raises(
        TypeError,
        match=r"a Job cannot be copied, .* fp8cfg\.convert_back\(copy\.deepcopy\(job\.model\)\) gives plain weights",
    ):
        copy.deepcopy(job)
    copied = copy.deepcopy(job.model)
    with torch.no_grad():
        assert torch.equal(copied(*batch), job.model(*batch))
    plain = fp8cfg.convert_back(copied)
    assert (
        {p.dtype for p in plain.parameters()} == {torch.float32}
        and not fp8cfg.has_fp8_layers(plain)
        and fp8cfg.has_fp8_layers(job.model)
    )


class Classifier(nn.Module):
    """Whose loss is a cross entropy of logits as the model gives them, after a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 16)

    def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.down(torch.relu(self.norm(self.up(x)))), targets)


def test_a_given_model_runs_in_torchs_autocast_and_a_recipes_does_not() -> None:
    """The loss is torch's own in bfloat16, bit for bit, and float32: in bfloat16 it would be one of 32 values between 2 and 4."""
    batch = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 16
    for words in (
        ("precision=bf16_mixed",),
        (
            "precision=bf16_fp8_current",
            "fp8.high_precision_at_start=0",
            "fp8.high_precision_at_end=0",
        ),
    ):
        job = fp8cfg.build(small(*words), model=Classifier())
        with job.autocast(enabled=False), torch.no_grad():
            loss = job.model(*batch)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            want = Classifier().bfloat16()(*batch)
        assert loss.dtype == torch.float32 and loss != loss.bfloat16()
        assert torch.equal(loss, want) or (job.recipe.fp8.enabled and abs(loss - want) < 2e-3), (
            "weights in FP8 alone are others"
        )
        assert not torch.is_autocast_enabled("cpu")
    for job, on in (
        (fp8cfg.build(small("precision=bf16_fp8")), False),
        (fp8cfg.build(small("precision=fp32"), model=Classifier()), False),
    ):
        with job.autocast():
            assert torch.is_autocast_enabled("cpu") is on


def test_an_average_of_plain_copies() -> None:
    """As the error of a job's copy says it; weights in FP8 alone are not averaged as they are."""
    job = fp8cfg.build(small("precision=bf16_fp8"))
    with pytest.raises(
        RuntimeError,
        match=r"^sub: this weight is quantized.*fp8cfg\.averaged\(job\).*fp8cfg\.convert_back\(model\)",
    ):
        both = AveragedModel(job.model)
        both.update_parameters(job.model), both.update_parameters(job.model)
    average = AveragedModel(fp8cfg.convert_back(copy.deepcopy(job.model)))
    for _ in range(2):
        average.update_parameters(fp8cfg.convert_back(copy.deepcopy(job.model)))
    batch = run_data(job.recipe)[0].batch(0)
    with torch.no_grad():
        assert torch.equal(average(*batch), job.model(*batch))


def test_compiling_silences_two_lines_of_torchs_and_no_other() -> None:
    job = fp8cfg.build(small("precision=bf16"))
    with warnings.catch_warnings():
        before = list(warnings.filters)
        job.compile_model()
        job.compile_model()
        assert len([f for f in warnings.filters if f not in before]) == 2
        with pytest.raises(UserWarning, match="mixed"):
            warnings.warn("bf16 and fp16 are mixed in a script of yours", stacklevel=1)
        with pytest.raises(UserWarning, match="Float8Training"):
            warnings.warn(
                "Float8TrainingTensor does not implement what your script wants", stacklevel=1
            )
        warnings.warn_explicit(
            "bf16 and fp16 are mixed in the scheduler node.",
            UserWarning,
            "cpp.py",
            1,
            "torch._inductor.codegen.cpp",
        )
        warnings.warn_explicit(
            "Float8TrainingTensor does not implement _stable_hash_for_caching",
            UserWarning,
            "autograd_cache.py",
            1,
            "torch._functorch._aot_autograd.autograd_cache",
        )


def test_a_copy_of_a_compiled_model_is_eager_and_has_its_own_weights() -> None:
    """Layers are compiled where they stand, once, and in training alone."""
    job, calls = fp8cfg.build(small("precision=bf16", "model.num_layers=1")), []
    job.compiler = lambda: lambda forward: lambda *args: calls.append(None) or forward(*args)  # type: ignore[method-assign]
    job.compile_model()
    job.compile_model()
    batch, other = run_data(job.recipe)[0].batch(0), copy.deepcopy(job.model)
    loss = job.forward(*batch)
    assert len(calls) == 1 and torch.equal(loss, other(*batch))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other(*batch), job.model.eval()(*batch)
    assert (
        len(calls) == 1
        and torch.equal(loss, job.model(*batch))
        and not torch.equal(loss, other(*batch))
    )


def test_a_job_prints_in_seven_lines() -> None:
    """Each of them changes with what it is about."""
    job = fp8cfg.build(small("precision=bf16_fp8"))
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 10))
    other = fp8cfg.build(
        small(
            "precision=fp16",
            "optim.name=sgd",
            "optim.lr_decay_style=constant",
            "trainer.max_steps=9",
        ),
        model=model,
    )
    lines = {line[:11].strip(): line[11:] for line in repr(job).splitlines()}
    assert (
        repr(job) == str(job)
        and len(repr(job)) < 700
        and max(map(len, repr(job).splitlines())) <= 80
    )
    assert lines.pop("model") == "Transformer (recipe llama_tiny), 108.86K parameters, on cpu"
    assert lines.pop("precision") == "bf16, FP8 delayed hybrid, history 1024 max, margin 0"
    assert lines.pop("backend") == "native: auto; a CPU emulates FP8"
    assert lines.pop("coverage").startswith("8 of 9 linear layers planned in FP8, ")
    assert (
        lines.pop("optimizer")
        == "adamw, weights fp8, fp32 masters, moments fp32, weight decay 0.1,"
    )
    assert lines.pop("schedule") == "cosine: 2 warm-up steps to lr 0.003, then to 0.0003 at step 6"
    assert lines.pop("state") == "0 of 6 optimizer steps done" and set(lines) == {""}
    for line in (
        "Sequential (given), 1.39K parameters",
        "fp16, no FP8",
        "sgd, weights fp16, fp32 masters, weight decay 0.1",
        "0 of 9 optimizer",
        "constant: 2 warm-up steps to lr 0.003\n",
    ):
        assert line in repr(other)
