"""Statistics say what quantization loses, and a run with them is the run without them, bit for bit."""

from __future__ import annotations

import json
import math
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8cfg
from fp8cfg.building.job import Job
from fp8cfg.composition import to_yaml
from fp8cfg.numerics import E2M1, GRAD_OUTPUT, FP8Linear, Region, Scaling, fp8_linears
from fp8cfg.numerics.statistics import Statistics, collect_statistics
from fp8cfg.numerics.stored_state import stored_state_dict
from fp8cfg.run_folder.metrics_file import MEASURED, read_metrics
from fp8cfg.run_folder.run_folder import RunFolder
from fp8cfg.training.data import run_data
from tests.support import whole_checkpoints
from tests.support.ranks import launch
from tests.support.small import small, steps
from tests.support.traced import TRACE

EVERYWHERE = "fp8={high_precision_at_start: 0, high_precision_at_end: 0}"
SCALINGS = {
    "delayed": ("precision=bf16_fp8",),
    "current": ("precision=bf16_fp8_current", EVERYWHERE),
    "row": ("precision=bf16_fp8_current", EVERYWHERE, "fp8.granularity=row"),
    "block": ("precision=bf16_fp8_block",),
    "mxfp8": ("precision=bf16_mxfp8",),
    "nvfp4": ("precision=bf16_nvfp4",),
}


def linear(scaling: Scaling, weight: torch.Tensor, **options: object) -> FP8Linear:
    plain = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    plain.weight = nn.Parameter(weight)
    return FP8Linear.from_linear(plain, scaling, Region(active=True), **options)


def stats_of(layer: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, Statistics]:
    return {
        s.tensor: s
        for s in collect_statistics(layer, lambda: layer(x.requires_grad_()).backward(dy))
    }


def test_numbers_worked_out_by_hand() -> None:
    layer = linear(Scaling(first_step="te"), torch.eye(16))  # scale 1
    x, dy = torch.zeros(2, 16), torch.zeros(2, 16)
    x[0, :6] = torch.tensor(
        [448.0, 900.0, 2.0**-9, 2.0**-10, -(2.0**-11), 17.0]
    )  # 900 saturates, two vanish, 17 -> 16
    dy[1, :3] = torch.tensor([math.inf, math.nan, 1.0])
    found = stats_of(layer, x, dy)
    lost = math.sqrt(452**2 + 2.0**-20 + 2.0**-22 + 1) / math.sqrt(
        448**2 + 900**2 + 2.0**-18 + 2.0**-20 + 2.0**-22 + 17**2
    )
    assert found["input"] == Statistics(
        "", "input", "e4m3", 900.0, 1.0, 1.0, 2 / 32, 1 / 32, pytest.approx(lost), 26, 0, 32
    )
    assert found["weight"] == Statistics(
        "", "weight", "e4m3", 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 240, 0, 256
    )
    assert found["grad_output"] == Statistics(
        "", "grad_output", "e5m2", math.inf, 1.0, 1.0, 0.0, 1 / 32, 0.0, 29, 2, 32
    )


def test_scales_of_tiles_and_a_tensor_of_zeros() -> None:
    layer = linear(Scaling("block", power_2_scales=True, weights_2d=True), torch.eye(256))
    x = torch.ones(2, 256)
    x[:, 128:] *= 2.0**-20
    x[1] = 0
    found = stats_of(layer, x, torch.zeros(2, 256))
    assert (found["input"].scale_min, found["input"].scale_max) == (256.0, 2.0**28)
    assert found["grad_output"][3:9] == (0.0, None, None, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "scaling",
    [
        Scaling(),
        Scaling("current"),
        Scaling("current", power_2_scales=True),
        Scaling("current", granularity="row"),
        Scaling("block", power_2_scales=True, weights_2d=True),
        Scaling("block"),
        Scaling("mxfp8", backward=Scaling().forward),
        Scaling("nvfp4", forward=E2M1, backward=E2M1, weights_2d=True),
        Scaling("nvfp4", E2M1, E2M1, hadamard=False, stochastic=False),
    ],
    ids=str,
)
def test_errors_are_those_of_what_the_products_read(scaling: Scaling) -> None:
    g = torch.Generator().manual_seed(1)
    a, w, dy = (
        torch.randn(n, 144, generator=g) * torch.rand(144, generator=g) ** 8
        for n in (200, 144, 200)
    )
    one = linear(scaling, torch.eye(144))  # hands on what it read
    x = a.clone().requires_grad_()
    y = one(x)
    y.backward(dy)
    found = stats_of(linear(scaling, torch.eye(144)), a, dy)
    assert (
        found["input"].error == pytest.approx(distance(y, a), rel=1e-3)
        and found["input"].error > 0.005
    )
    if not scaling.rounds_stochastically(GRAD_OUTPUT):
        assert found["grad_output"].error == pytest.approx(distance(x.grad, dy), rel=1e-3)
        assert (x.grad == 0).sum().item() == found["grad_output"].zeros + round(
            found["grad_output"].underflow * dy.numel()
        )
    other = linear(scaling, w)
    assert stats_of(other, torch.eye(144), torch.eye(144))["weight"].error == pytest.approx(
        distance(other(torch.eye(144)).t(), w), rel=1e-3
    )


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def test_the_operand_that_is_measured_is_one_in_fp8() -> None:
    scaling, w, x, dy = (
        Scaling("block"),
        torch.randn(256, 128),
        torch.randn(130, 128),
        torch.randn(130, 256),
    )
    measured = {}
    for high in (
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (True, False, True),
    ):
        measured[high] = stats_of(linear(scaling, w, high_precision=high), x, dy)
    assert [list(m) for m in measured.values()] == [["input", "weight", "grad_output"]] * 2 + [
        ["input", "grad_output"],
        ["weight", "grad_output"],
    ]
    rows, columns = (measured[k]["input"] for k in ((False, False, False), (True, False, False)))
    assert rows.amax == columns.amax and rows.scale_max < columns.scale_max, (
        "along columns a tile has 128 or 2 values"
    )


@pytest.mark.parametrize(
    "words",
    [
        *SCALINGS.values(),
        (*SCALINGS["delayed"], "fp8.params=false"),
        (*SCALINGS["block"], "fp8.params=true"),
        (*SCALINGS["delayed"], "fp8.dot_product_attention=true"),
        (*SCALINGS["delayed"], "model.recompute_granularity=full"),
        ("precision=fp16_fp8", "precision.loss_scale=1024"),
    ],
    ids=" ".join,
)
def test_a_run_with_statistics_is_the_run_without(words: tuple[str, ...], tmp_path: Path) -> None:
    same_with_and_without(tmp_path, *words)


@pytest.mark.slow
def test_a_compiled_run_with_statistics_is_the_run_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "compiler", lambda job: TRACE)
    with torch._dynamo.config.patch(
        recompile_limit=1
    ):  # what is compiled once is never compiled again
        same_with_and_without(
            tmp_path, *SCALINGS["delayed"], "trainer.compile=on", "model.num_layers=1"
        )


def same_with_and_without(root: Path, *words: str) -> None:
    words = (
        *words,
        "trainer.max_steps=4",
        "trainer.micro_batch_size=4",
        "log.fp8_stats_every_n_steps=2",
    )
    runs, random = [], []
    for word in ("0", "2"):
        torch._dynamo.reset()
        torch.manual_seed(5)
        runs.append(fit(root / word, *words, f"log.fp8_stats_every_n_steps={word}"))
        random.append(torch.get_rng_state())
    (folder, job), (other, measured) = runs
    assert not folder.fp8_stats.exists() and {
        line["step"] for line in read_metrics(other.fp8_stats)
    } == {
        2,
        4,
    }
    assert [lines(f) for f in (folder, other)] == [lines(folder)] * 2
    for (name, a), b in zip(
        stored_state_dict(job.model).items(),
        stored_state_dict(measured.model).values(),
        strict=True,
    ):
        assert torch.equal(a, b), name
    for name, tensor in job.optimizer.state_tensors().items():
        assert torch.equal(tensor, measured.optimizer.state_tensors()[name]), name
    assert torch.equal(*random) and job.optimizer.state_json() == measured.optimizer.state_json()


def fit(root: Path, *words: str) -> tuple[RunFolder, Job]:
    recipe = small(*words)
    job = fp8cfg.build(recipe)
    with RunFolder.create(root, "x", datetime.now(), to_yaml(recipe)) as folder:
        fp8cfg.fit(job, folder, say=lambda _: None)
    return folder, job


def lines(folder: RunFolder) -> list[dict[str, object]]:
    return [
        {k: v for k, v in line.items() if k not in MEASURED}
        for line in read_metrics(folder.metrics)
    ]


def test_one_line_a_step_and_tensor(tmp_path: Path) -> None:
    folder, job = fit(
        tmp_path, "precision=bf16_fp8", "log.fp8_stats_every_n_steps=3", "log.loggers=[tensorboard]"
    )
    found = read_metrics(folder.fp8_stats)
    names = [n for n, m in job.model.named_modules() if isinstance(m, FP8Linear)]
    assert [(s["step"], s["layer"], s["tensor"]) for s in found] == [
        (step, name, tensor)
        for step in (3, 6)
        for name in names
        for tensor in ("input", "weight", "grad_output")
    ]
    assert list(found[0]) == ["step", *Statistics._fields]
    assert all(
        0.01 < s["error"] < 0.5 and s["nonfinite"] == 0 and s["scale_min"] > 0 for s in found
    )
    events = b"".join(p.read_bytes() for p in (folder.path / "tensorboard").iterdir())
    assert b"fp8/layers.0.mlp.linear_fc1/grad_output/underflow" in events


def test_a_resumed_run_writes_the_lines_that_a_whole_one_has(tmp_path: Path) -> None:

    words = (
        "precision=bf16_fp8",
        "log.fp8_stats_every_n_steps=1",
        "trainer.max_steps=4",
        "checkpoint.keep=9",
    )
    folder, _ = fit(tmp_path, *words)
    whole = folder.fp8_stats.read_bytes()
    with open(folder.fp8_stats, "ab") as file:
        file.write(b'{"step": 5, "la')
    job = fp8cfg.build(small(*words))
    fp8cfg.fit(
        job,
        folder,
        whole_checkpoints.load(folder.checkpoints / "step-00000002"),
        say=lambda _: None,
    )
    assert folder.fp8_stats.read_bytes() == whole


def test_a_run_that_no_longer_asks_for_them_drops_those_of_steps_it_repeats(tmp_path: Path) -> None:

    words = (
        "precision=bf16_fp8",
        "log.fp8_stats_every_n_steps=1",
        "trainer.max_steps=4",
        "checkpoint.keep=9",
    )
    folder, _ = fit(tmp_path, *words)
    job = fp8cfg.build(small(*words, "log.fp8_stats_every_n_steps=0"))
    fp8cfg.fit(
        job,
        folder,
        whole_checkpoints.load(folder.checkpoints / "step-00000002"),
        say=lambda _: None,
    )
    assert {line["step"] for line in read_metrics(folder.fp8_stats)} == {1, 2}


def test_recomputed_layers_are_measured_once() -> None:
    found = [
        collected(fp8cfg.build(small("precision=bf16_fp8", f"model.recompute_granularity={g}")))
        for g in ("none", "selective", "full")
    ]
    assert found[0] == found[1] == found[2] and len(found[0]) == 8 * 3


def collected(job: Job) -> list[Statistics]:
    tokens, targets = run_data(job.recipe)[0].batch(0)

    def run() -> None:
        with job.autocast():
            job.backward(job.model(tokens, targets))

    return collect_statistics(job.model, run, job.optimizer.masters)


def test_in_a_loop_of_ones_own_gradients_under_way_stay() -> None:
    job = fp8cfg.build(small("precision=bf16_fp8"))
    list(steps(job, 1))
    before = [p.grad for p in job.model.parameters()]
    before_it = [
        (layer.fp8_amax_history.clone(), layer.fp8_backward_amax.clone())
        for layer in fp8_linears(job.model)
    ]
    ran = [layer.gemms_ran for layer in fp8_linears(job.model)]
    for layer in fp8_linears(job.model):
        layer.clear_gemms_ran()
    assert len(collected(job)) == 24
    assert all(
        a is b for a, b in zip(before, (p.grad for p in job.model.parameters()), strict=True)
    )
    for (history, seen), layer in zip(before_it, fp8_linears(job.model), strict=True):
        assert torch.equal(history, layer.fp8_amax_history) and torch.equal(
            seen, layer.fp8_backward_amax
        )
    assert not any(layer.gemms_ran.any() for layer in fp8_linears(job.model)) and all(
        r.all() for r in ran
    ), "the proof of engagement stands alone"
    assert not any(layer._forward_hooks for layer in fp8_linears(job.model))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_in_a_loop_that_caches_weights_scales_stay_the_same(set_to_none: bool) -> None:
    """A weight that the measuring pass cached would not be recorded by the microbatches."""
    states = []
    for measured in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        recipe = fp8cfg.compose(
            ["precision=bf16_fp8", "fp8.params=false", "fp8.output_layer=true", EVERYWHERE]
        )
        fp8 = fp8cfg.convert_model(model, recipe)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(8, 32)

        def run(model: nn.Module = model, fp8: Any = fp8, x: torch.Tensor = x) -> None:
            with torch.autocast("cpu", torch.bfloat16), fp8.autocast():
                loss = model(x).float().square().mean()
            loss.backward()

        for _ in range(3):
            if measured:
                collect_statistics(model, run)
            run()
            run()
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            fp8.step()
        states.append([t for layer in fp8_linears(model) for t in layer.buffers()])
    for plain, with_statistics in zip(*states, strict=True):
        assert torch.equal(plain, with_statistics)


def test_float8_weights_without_their_masters_are_left_out() -> None:
    layer = linear(Scaling(), torch.randn(16, 16), fp8_params=True)
    assert list(stats_of(layer, torch.randn(3, 16), torch.randn(3, 16))) == ["input", "grad_output"]
    assert [
        s.tensor
        for s in collect_statistics(
            layer, lambda: layer(torch.randn(3, 16)), {layer.parameter: torch.randn(16, 16)}
        )
    ] == ["input", "weight"]


def test_a_pass_outside_of_the_region_is_an_error() -> None:
    layer = linear(Scaling(), torch.randn(16, 16))
    layer.region.active = False
    with pytest.raises(ValueError, match="no FP8 layer ran"):
        collect_statistics(layer, lambda: layer(torch.randn(3, 16)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("precision=bf16",),
            "log.fp8_stats_every_n_steps=2: has no effect with fp8.enabled=false; remove it or set precision=bf16_fp8",
        ),
        (
            ("precision=bf16_fp8", "trainer.max_steps=1", "optim.warmup_steps=0"),
            "log.fp8_stats_every_n_steps=2: has no effect, the run ends with trainer.max_steps=1; nearest is 1",
        ),
    ],
)
def test_a_key_that_would_do_nothing_is_refused(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        fp8cfg.build(small(*words, "log.fp8_stats_every_n_steps=2"))
    assert e.value.problems == [line]


@pytest.mark.slow
def test_of_two_ranks_the_first_measures_its_own_tensors(tmp_path: Path) -> None:
    from tests.support.small import SMALL

    words = (
        "precision=bf16_fp8",
        "trainer.max_steps=2",
        "optim.warmup_steps=1",
        "trainer.micro_batch_size=4",
        f"log.dir={tmp_path}",
    )
    done = launch(2, *SMALL, *words, "log.fp8_stats_every_n_steps=2")  # storage.shard=auto is zero1
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = tmp_path.iterdir()
    found = [json.loads(line) for line in (folder / "fp8_stats.jsonl").read_text().splitlines()]
    assert Counter(line["tensor"] for line in found) == {
        "input": 8,
        "grad_output": 8,
        "weight": 8,
    }, "masters are put together from their shards"
    assert found[0]["elements"] == 4 * 32 * 64
