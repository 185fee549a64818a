"""`fp8cfg.advise`: training is not affected, planted trouble is named, and the advice heals gradients."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.building import model as model_building
from fp8cfg.building.job import Job
from fp8cfg.numerics.gemm import DGRAD, FPROP, WGRAD
from fp8cfg.numerics.scaling import GRAD_OUTPUT, INPUT, WEIGHT
from fp8cfg.parallel.process_group import current
from fp8cfg.schema.presets import precision_preset
from fp8cfg.studies import advice_rules
from fp8cfg.studies.advice import find_layers
from fp8cfg.studies.advice_report import Advice
from fp8cfg.studies.advice_rules import (
    ALARM,
    LayerError,
    Remedy,
    choose_remedy,
    delayed_overrides,
)
from fp8cfg.studies.operand_errors import (
    AmaxSeries,
    Candidate,
    GemmError,
    healthy_errors,
    make_sample,
    measure_gemm,
)
from fp8cfg.studies.operand_probe import OperandProbe
from fp8cfg.training.data import run_data
from fp8cfg.training.memory_measurement import LiveBytes
from fp8cfg.training.step import train_step
from tests.support import planted
from tests.support.planted import NOTHING, PLANTS, TINY_HEAD
from tests.support.small import small, small_words
from tests.support.verbs import refused

Out = pytest.CaptureFixture[str]
PRESETS = ("bf16_fp8", "bf16_fp8_current", "bf16_fp8_block", "bf16_mxfp8", "bf16_nvfp4")


def candidate(preset: str, **fp8: Any) -> Candidate:
    precision = precision_preset(preset).merged({"fp8": fp8})
    return Candidate(f"{preset} {fp8}", preset, (), precision.fp8)


CANDIDATES = [candidate(preset) for preset in PRESETS]


# --- training is not affected


def trained(recipe: fp8cfg.Recipe, probes: bool) -> tuple[list[float], list[Tensor], OperandProbe]:
    """Trains a recipe. Returns its losses, its last weights and the probe."""
    torch.manual_seed(recipe.trainer.seed)
    job = fp8cfg.build(recipe)
    batches, _ = run_data(recipe)
    probe = OperandProbe(find_layers(job.model, linears(job))[0] if probes else {}, CANDIDATES)
    losses = []
    with probe:
        for step in range(4):
            with probe.step(measured=step % 2 == 1):
                losses.append(train_step(job, batches, step, current()).wait().loss)
    return losses, [p.detach().clone() for p in job.model.parameters()], probe


def linears(job: Job) -> list[str]:
    return [name for name, m in job.model.named_modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize(
    "words",
    [
        ("trainer.micro_batch_size=4",),
        ("model.recompute_granularity=selective",),
        ("model.recompute_granularity=full",),
        ("lora.enabled=true", "model.share_embeddings_and_output_weights=true"),
    ],
    ids=["two microbatches", "selective", "full", "adapters"],
)
def test_losses_and_weights_keep_their_bits(words: tuple[str, ...]) -> None:
    recipe = small(*words)
    recipe.trainer.compile = "off"
    losses, weights, probe = trained(recipe, probes=True)
    plain_losses, plain_weights, _ = trained(recipe, probes=False)
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, plain_weights, strict=True))
    assert probe.measured == [2, 4]
    gemms = {gemm for _, gemm in probe.errors}
    # Frozen weights have no gradient.
    assert gemms == ({FPROP, DGRAD} if recipe.lora.enabled else {FPROP, DGRAD, WGRAD})


def test_recomputation_measures_the_same_errors() -> None:
    """The input of wgrad is computed again for the measurement too."""
    errors = []
    for granularity in ("none", "full"):
        recipe = small(f"model.recompute_granularity={granularity}")
        errors.append(trained(recipe, probes=True)[2].errors)
    assert errors[0] == errors[1]


def test_memory_of_one_layer_at_a_time() -> None:
    """The peak grows by a few copies of the largest operands, whatever the number of layers."""
    peaks = {}
    for layers in (2, 6):
        for probes in (False, True):
            recipe = small(f"model.num_layers={layers}", "trainer.global_batch_size=32")
            recipe.trainer.micro_batch_size = 32
            job = fp8cfg.build(recipe)
            batches, _ = run_data(recipe)
            found = find_layers(job.model, linears(job))[0] if probes else {}
            probe = OperandProbe(found, CANDIDATES)
            train_step(job, batches, 0, current()).wait()
            with probe, LiveBytes(job.model.parameters()) as live, probe.step(measured=True):
                train_step(job, batches, 1, current()).wait()
            peaks[layers, probes] = live.peak
    more = {layers: peaks[layers, True] - peaks[layers, False] for layers in (2, 6)}
    assert more[6] <= more[2] + 200_000
    assert peaks[6, False] > 1.5 * peaks[2, False]


# --- the numbers


def test_the_error_of_a_product_is_that_of_torchs_own_casts() -> None:
    """Current scaling of whole matrices, by torch's dtypes and float64 products."""
    torch.manual_seed(0)
    x = torch.randn(96, 200, dtype=torch.float32) * torch.logspace(-3, 0, 96)[:, None]
    w = torch.randn(80, 200, dtype=torch.float32)
    e4m3 = candidate("bf16_fp8_current")
    samples = [make_sample(r, FPROP, t, AmaxSeries(), [e4m3]) for r, t in ((INPUT, x), (WEIGHT, w))]
    found = GemmError.read(FPROP, measure_gemm(FPROP, *samples, [e4m3]).tolist()[0])

    def rounded(t: Tensor) -> Tensor:
        scale = 448 / t.abs().max()
        return ((t * scale).to(torch.float8_e4m3fn).float() / scale).double()

    rows = samples[0].rows.double(), samples[1].rows.double()
    q = [rounded(t)[: len(t)] for t in (x, w)]
    exact = x.double() @ w.double().t()
    lost = (q[0] @ q[1].t() - exact).norm(dim=1) / exact.norm(dim=1)
    assert len(rows[0]) < len(x)  # sampled
    assert found.error == pytest.approx(float(lost.square().mean().sqrt()), rel=0.1)
    tensor = rounded(x)
    snr = 20 * math.log10(float(x.double().norm() / (tensor - x).norm()))
    assert found.operands[0].snr == pytest.approx(snr, abs=1)
    flushed = float(((tensor == 0) & (x != 0)).double().mean())
    assert found.operands[0].underflow == pytest.approx(flushed, abs=0.01)


def test_healthy_errors_are_those_of_the_formats() -> None:
    """A uniform error of half a step: 2^-4 / sqrt(3) of a power of two for three bits of mantissa."""
    for preset, errors in zip(PRESETS, healthy_errors(CANDIDATES), strict=True):
        if preset == "bf16_nvfp4":
            assert 0.1 < errors[FPROP] < 0.2
        else:
            # Two operands; the mean over mantissas from 1 to 2 is 0.72 of the error at 1.
            assert errors[FPROP] == pytest.approx(2**0.5 * 2**-4 / 3**0.5 * 0.72, rel=0.05)


def test_delayed_scales_are_those_of_the_layers() -> None:
    """The scale of the probe is the one that an FP8 layer has after the same steps."""
    layer = nn.Sequential(nn.Linear(64, 64, bias=False))
    fp8 = fp8cfg.convert_model(layer, fp8cfg.compose(["precision=bf16_fp8", "fp8.params=false"]))
    series = AmaxSeries()
    for size in (1.0, 4.0, 2.0):
        x = size * torch.randn(32, 64, dtype=torch.float32)
        with fp8.autocast():
            layer(x).square().sum().backward()
        fp8.step()
        series.record(INPUT, x)
        series.end_step()
    scale = series.scale(INPUT, candidate("bf16_fp8").scaling)
    assert scale is not None
    assert float(scale) == float(fp8.model[0].fp8_scale[INPUT])  # type: ignore[index]


def delayed_advice(sizes: list[float]) -> str:
    """The override for a gradient that has these amaxes, the last one in the measured step."""
    series = AmaxSeries()
    for size in sizes:
        series.record(GRAD_OUTPUT, torch.full((4, 4), size, dtype=torch.float32))
        series.end_step()
    clipped = 0.1 if sizes[-1] > max(sizes[:-1]) else 0.0
    error = LayerError("a", "delayed", "dgrad", 0.5, 0.06, "grad_output", 6.0, 0.0, clipped)
    found = delayed_overrides(
        candidate("bf16_fp8"), {"a": [error]}, {"a": series}, measured=[len(sizes)]
    )
    assert len(found) == 1 and "a: grad_output" in found[0].reasons[0]
    return found[0].word


def test_a_growing_tensor_asks_for_margin_and_a_shrinking_one_for_a_shorter_history() -> None:
    assert delayed_advice([1.0, 1.0, 6.0]) == "fp8.margin=3"
    assert delayed_advice([1e6, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]) == (
        "fp8.amax_history_len=4"
    )


def test_an_idle_layer_has_a_history_of_zeros() -> None:
    series = AmaxSeries()
    for size in (None, 2.0, None, None, 6.0, None):
        if size is not None:
            series.record(INPUT, torch.full((4, 4), size, dtype=torch.float32))
        series.end_step()
    assert [float(step[INPUT]) for step in series.steps] == [0.0, 2.0, 0.0, 0.0, 6.0]
    error = LayerError("a", "delayed", "fprop", 0.5, 0.06, "input", 6.0, 0.0, 0.1)
    found = delayed_overrides(
        candidate("bf16_fp8"), {"a": [error]}, {"a": series}, measured=[2, 4, 5, 6]
    )
    assert [override.word for override in found] == ["fp8.margin=2"]


# --- planted trouble


def advice_on(model: planted.Transformer) -> Advice:
    copied = planted.copy_of(model)
    # Without a learning rate: a step of the optimizer would change what is planted.
    return fp8cfg.advise_model(copied, planted.training(copied, lr=0.0), steps=2, every=2)


def names(advice: Advice, scaling: str) -> set[tuple[str, str]]:
    """The layers and tensors that are blamed under a scaling."""
    errors = [error for error in advice.unhealthy if error.scaling == scaling]
    return {(error.layer, error.tensor) for error in errors}


def test_a_head_with_tiny_gradients_is_named_and_kept_out_of_fp8() -> None:
    model = planted.make_model(TINY_HEAD)
    advice = advice_on(model)
    assert names(advice, "delayed hybrid") == {(TINY_HEAD.layer, TINY_HEAD.tensors[0])}
    assert names(advice, "mxfp8") == set()  # a scale for 32 tokens of each feature
    remedy = next(each for each in advice.remedies if each.scaling == "delayed hybrid")
    assert [each.word for each in remedy.overrides] == [f"fp8.exclude=[{TINY_HEAD.layer}]"]
    assert remedy.layers == (TINY_HEAD.layer,)
    assert 0 < remedy.share < remedy.share_before
    assert f"{TINY_HEAD.layer}: grad_output" in str(advice)
    # The other scalings have the layer, so that one of them is advised.
    assert advice.recipe.fp8.exclude == ()
    exact = planted.gradients(planted.copy_of(model), contextlib.nullcontext())
    plain = planted.fp8_errors(model, exact, ["precision=bf16_fp8", "fp8.params=false"])
    assert remedy.recipe is not None
    advised = planted.fp8_errors(model, exact, remedy.recipe)
    assert plain[TINY_HEAD.layer] > 2 * advised[TINY_HEAD.layer]
    assert max(advised.values()) < 0.13


def test_planted_trouble_is_named_and_healed(capsys: Out) -> None:
    """The table of the guide. Every row has the blamed tensors and the worst gradient error."""
    table = planted.table(advice_on)
    with capsys.disabled():
        print(f"\n{planted.text(table)}")
    healthy = {row.scaling: row.advised for row in table if row.plant == NOTHING}
    for row in table:
        if row.blamed:
            assert (row.plant.layer, row.plant.tensors[0]) in row.blamed, row
            assert row.blamed <= {(row.plant.layer, tensor) for tensor in row.plant.tensors}, row
            assert row.advised < 1.6 * healthy[row.scaling], row
        else:
            assert row.plain < 2.5 * healthy[row.scaling], row
    assert not any(row.blamed for row in table if row.plant == NOTHING)
    for plant in PLANTS[1:]:
        assert any(row.blamed for row in table if row.plant == plant), plant.name


def test_parity_fails_under_the_preset_and_passes_with_the_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The output layer in FP8, with tiny gradients of most of the vocabulary."""
    make = model_building.make_transformer

    def plant(config: Any, **options: Any) -> planted.Transformer:
        model = make(config, **options)
        factors = torch.full((config.vocab_size,), 2.0**-40, dtype=torch.float32)
        factors[::4] = 1.0
        planted.scale_gradient(model.output_layer, factors)
        return model

    monkeypatch.setattr(model_building, "make_transformer", plant)
    words = ("precision=bf16_fp8", "fp8.output_layer=true")
    run = ("trainer.max_steps=40", "trainer.val_check_interval=0", "checkpoint.every_n_steps=0")
    # Adam learns from tiny gradients if eps is smaller.
    keys = ("optim.eps=1e-30", "optim.lr=3e-3", f"log.dir={tmp_path}", "trainer.compile=off")
    recipe = small(*words, *run, *keys)
    advice = fp8cfg.advise(recipe, steps=4, every=2)
    assert names(advice, "delayed hybrid") == {("output_layer", "grad_output")}
    assert advice.overrides == ["fp8.output_layer=false"]
    baseline = fp8cfg.compose(["precision=bf16"], base=recipe)
    precisions = ["bf16", "bf16_fp8 fp8.output_layer=true", f"bf16_fp8 {advice.overrides[0]}"]
    report = fp8cfg.parity(baseline, precisions, seeds=2, say=lambda _: None)
    plain, advised = report.verdicts
    assert plain.verdict.startswith("worse")
    assert advised.verdict == "within noise"


def remedy(scaling: str, share_before: float, share: float) -> Remedy:
    recipe = fp8cfg.Recipe() if share else None
    return Remedy(scaling, (), (), recipe, (), (), share, share_before)


def test_the_preferred_scaling_is_advised_unless_it_loses_many_flops() -> None:
    remedies = [
        remedy("delayed hybrid", 0.9, 0.9),
        remedy("current hybrid", 0.85, 0.85),
        remedy("mxfp8", 0.9, 0.9),
        remedy("nvfp4", 0.9, 0.9),
    ]

    def advised(is_blackwell: bool) -> str:
        chosen = choose_remedy(remedies, is_blackwell)
        return "" if chosen is None else chosen.scaling

    # As docs/choosing-a-precision.md: the layers that a preset keeps out do not count.
    assert advised(is_blackwell=False) == "current hybrid"
    assert advised(is_blackwell=True) == "mxfp8"
    remedies[1] = remedy("current hybrid", 0.85, 0.82)
    assert advised(is_blackwell=False) == "current hybrid"
    remedies[1] = remedy("current hybrid", 0.85, 0.7)
    assert advised(is_blackwell=False) == "delayed hybrid"
    remedies[0] = remedies[2] = remedy("mxfp8", 0.9, 0.0)
    assert advised(is_blackwell=True) == "current hybrid"
    assert choose_remedy([remedy("mxfp8", 0.9, 0.0)], True) is None


# --- the models of users


class TwoHeads(nn.Module):
    """A convolution, a layer that is called twice, one that is never called, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(32, 32)
        self.idle = nn.Linear(32, 32)
        self.conv = nn.Conv1d(32, 32, 1)
        self.lm_head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(x).relu_())
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.lm_head(x).logsumexp(-1).mean()  # type: ignore[no-any-return]


def step_of(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float32)

    def step() -> None:
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()

    return step


def test_layers_that_cannot_be_measured_are_listed() -> None:
    model = TwoHeads()
    advice = fp8cfg.advise_model(model, step_of(model), "bf16_fp8", steps=2, every=1)
    assert set(advice.unmeasured) == {"conv", "idle"}
    assert {error.layer for error in advice.errors} == {"shared", "lm_head"}
    text = str(advice)
    assert "not measured: idle: it did not run in the measured steps" in text
    # The advice is about the scaling of the recipe, and fits convert_model.
    assert advice.asked and advice.remedy is not None and advice.remedy.scaling == "delayed hybrid"
    fp8 = fp8cfg.convert_model(model, advice.recipe)
    assert "lm_head" in str(fp8)
    with pytest.raises(fp8cfg.ConfigError, match="has FP8 layers already"):
        fp8cfg.advise_model(model, step_of(model))


def test_a_model_without_healthy_layers_stays_in_high_precision() -> None:
    """Inputs and weights span 2^60, in opposite order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    span = torch.logspace(-60, 0, 64, 2, dtype=torch.float32)
    with torch.no_grad():
        model[0].weight /= span  # type: ignore[operator, arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    x = torch.randn(64, 64, dtype=torch.float32).requires_grad_()

    def step() -> None:
        optimizer.zero_grad()
        model(x * span).square().sum().backward()
        optimizer.step()

    advice = fp8cfg.advise_model(model, step, "bf16_fp8", steps=2, every=2)
    assert advice.remedy is None and advice.overrides == ["precision=bf16"]
    assert not advice.recipe.fp8.enabled
    assert "advice: stay with precision=bf16" in str(advice)
    assert fp8cfg.from_yaml(advice.yaml()).precision.compute == "bf16"


def test_a_model_that_does_not_train_is_refused() -> None:
    model = TwoHeads()
    with pytest.raises(fp8cfg.ConfigError, match="no linear layer ran a training pass"):
        fp8cfg.advise_model(model, lambda: None, steps=2)
    with pytest.raises(fp8cfg.ConfigError, match="steps=1: must be at least 2"):
        fp8cfg.advise_model(model, step_of(model), steps=1)


# --- the command


SMALL = (
    "recipe=llama_tiny",
    "data=tiny",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.seq_length=32",
    "trainer.global_batch_size=4",
    "trainer.micro_batch_size=4",
)


def test_the_command_writes_a_recipe_that_trains(capsys: Out, tmp_path: Path) -> None:
    file = tmp_path / "advised.yaml"
    words = [*SMALL, "--steps", "2", "--every", "1", "--gpu", "h100", "--output", str(file)]
    assert main(["advise", *words, "--json"]) == 0
    out = capsys.readouterr()
    data = json.loads(out.out)
    assert f"wrote {file}" in out.err
    assert data["hardware"] == "h100"
    assert [each["scaling"] for each in data["scalings"]] == [
        "delayed hybrid",
        "delayed e4m3",
        "current hybrid",
        "current e4m3",
        "current row hybrid",
        "current row e4m3",
        "block e4m3",
    ]
    assert set(data["unsupported"]) == {"block hybrid", "mxfp8", "nvfp4"}
    # The first gradients of queries and keys are too small for a single scale in E4M3.
    hybrid = [error for error in data["errors"] if error["scaling"].startswith("current")]
    hybrid = [error for error in hybrid if error["scaling"].endswith("hybrid")]
    assert len(hybrid) > 40 and all(error["ratio"] < ALARM for error in hybrid)
    assert data["advice"]["scaling"] == "current hybrid"
    recipe = fp8cfg.from_yaml(file)
    assert recipe.fp8.enabled and recipe.model.hidden_size == 64
    folder = f"log.folder={tmp_path / 'run'}"
    assert main([str(file), "trainer.max_steps=1", "optim.warmup_steps=0", folder]) == 0
    capsys.readouterr()
    # Before anything is trained.
    lines = refused(capsys, "advise", *words)
    assert lines == [f"--output {file}: exists already; remove it or write to another"]


def test_what_the_command_cannot_do(capsys: Out) -> None:
    assert (
        "no FP8 scaling runs on a100-80" in refused(capsys, "advise", *SMALL, "--gpu", "a100-80")[0]
    )
    assert "--steps ten: expected a number" in refused(capsys, "advise", "--steps", "ten")[0]
    assert "steps=1: must be at least 2" in refused(capsys, "advise", *SMALL, "--steps", "1")[0]
    assert "did you mean 'fp8.margin'" in refused(capsys, "advise", "fp8.margn=1")[0]
    assert "no such GPU" in refused(capsys, "advise", "--gpu", "h1000")[0]


@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_an_overflowed_gradient_is_not_measured(factor: float) -> None:
    """A step that the loss scaler skips has no error, not an error of 0."""
    layer = nn.Linear(32, 32)
    probe = OperandProbe({"layer": (layer, lambda weight: weight)}, [candidate("bf16_fp8_current")])
    x = torch.randn(8, 32, requires_grad=True)
    with probe:
        for scale in (1.0, factor):
            with probe.step(measured=True):
                (layer(x).square().sum() * scale).backward()
    measured = {gemm: len(steps) for (_, gemm), steps in probe.errors.items()}
    assert measured == {FPROP: 2, DGRAD: 1, WGRAD: 1}
    assert probe.overflowed == {("layer", DGRAD), ("layer", WGRAD)}
    assert torch.stack(probe.layers["layer"].amaxes.steps).isfinite().all()


def test_advice_without_a_usable_gradient_is_an_error() -> None:
    """fp16 begins with a loss scale of 2^32, under which all first gradients overflow."""
    recipe = small("precision=fp16")
    with pytest.raises(fp8cfg.ConfigError, match=r"overflowed in all measured steps \(1, 2\)"):
        fp8cfg.advise(recipe, steps=2, every=1)


def test_the_proposed_command_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    """It keeps --config-dir, and drops overrides of FP8 if the advice has none."""
    monkeypatch.setattr(advice_rules, "ALARM", 0.0)  # no layer is healthy
    words = small_words("precision=bf16_fp8", "fp8.margin=1")
    folder = tmp_path / "my presets"
    folder.mkdir()
    assert main(["advise", *words, "--steps", "2", "--config-dir", str(folder)]) == 0
    *_, line = capsys.readouterr().err.splitlines()
    command = shlex.split(line.removeprefix("train with: "))
    assert command[-1] == f"--config-dir={folder}"
    assert "precision=bf16" in command and "fp8.margin=1" not in command
    assert main(["check", *command[1:]]) == 0
