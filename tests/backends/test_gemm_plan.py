"""Which linear layers run in FP8, decided from names and shapes, and every other one with its reason."""

from __future__ import annotations

import pytest

import fp8cfg
from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.backends.gemm_plan import PlannedLinear, layer_numbering, plan_linears
from fp8cfg.backends.native import rules
from fp8cfg.planning.coverage import planned_coverage
from fp8cfg.planning.layer_plan import plan_layers
from fp8cfg.recipes import llama_8b, llama_tiny
from fp8cfg.schema.fp8 import FP8
from fp8cfg.schema.precision import Precision
from tests.support.counting import calls

SHAPES = [
    ("layers.0.a", 64, 64),
    ("layers.1.a", 64, 64),
    ("layers.1.odd", 64, 40),
    ("layers.2.a", 64, 64),
    ("output_layer", 64, 256),
]
E4M3, E5M2 = ("e4m3", "e4m3"), ("e5m2", "e4m3")


def plans(**fp8: object) -> dict[str, PlannedLinear]:
    return {
        p.name: p
        for p in plan_linears(SHAPES, FP8(enabled=True, **fp8), layer_numbering(3), rules.misfit)
    }


def test_formats_of_the_three_products() -> None:
    assert plans()["layers.0.a"].gemms == (E4M3, E5M2, E5M2)
    assert plans(format="e4m3")["layers.0.a"].gemms == (E4M3, E4M3, E4M3)


def test_one_odd_layer_is_listed_and_does_not_stop_the_rest() -> None:
    found = plans()
    assert (
        not found["layers.1.odd"].fp8
        and found["layers.1.odd"].reason == "out_features=40 is not a multiple of 16"
    )
    assert [n for n, p in found.items() if p.fp8] == ["layers.0.a", "layers.1.a", "layers.2.a"]


@pytest.mark.parametrize(
    ("change", "layer", "reason"),
    [
        ({}, "output_layer", "fp8.output_layer=false"),
        ({"high_precision_at_start": 1}, "layers.0.a", "fp8.high_precision_at_start=1"),
        ({"high_precision_at_end": 1}, "layers.2.a", "fp8.high_precision_at_end=1"),
        ({"exclude": ("layers.1.*",)}, "layers.1.a", "fp8.exclude layers.1.*"),
        ({"include": ("layers.0.*",)}, "layers.1.a", "not in fp8.include"),
    ],
)
def test_each_way_to_stay_in_high_precision_has_its_reason(
    change: dict[str, object], layer: str, reason: str
) -> None:
    p = plans(**change)[layer]
    assert not p.fp8 and p.reason == reason


def test_exclude_wins_over_include_and_the_output_layer_can_be_asked_for() -> None:
    found = plans(include=("*",), exclude=("layers.0.*",), output_layer=True)
    assert not found["layers.0.a"].fp8 and found["layers.1.a"].fp8 and found["output_layer"].fp8


def test_single_products_can_stay_in_high_precision() -> None:
    p = plans(override_linear_precision={"wgrad": True})["layers.0.a"]
    assert p.gemms == (E4M3, E5M2, None) and p.reason == "fp8.override_linear_precision.wgrad"
    assert p.fp8 and p.fp8_share == pytest.approx(2 / 3)


def test_a_pattern_that_matches_nothing_is_an_error_with_the_nearest_layer() -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        plans(include=("layers.*.b",), exclude=("nothing",))
    assert (
        e.value.problems[0]
        == "fp8.include=layers.*.b: matches no linear layer; did you mean 'layers.*.a'?"
    )
    assert e.value.problems[1].startswith("fp8.exclude=nothing: matches no linear layer")


def test_fp8_that_reaches_no_layer_is_an_error() -> None:
    line = r"fp8\.exclude=\['\*'\]: leaves no linear layer in FP8 \(0 of 5\); narrow fp8.exclude"
    with pytest.raises(fp8cfg.ConfigError, match=line):
        plans(exclude=("*",))
    line = r"fp8\.enabled=true: none of 5 linear layers would run in FP8 \(fp8.high"
    with pytest.raises(fp8cfg.ConfigError, match=line):
        plans(high_precision_at_start=3)


def test_share_of_flops_by_hand() -> None:
    r = llama_tiny()
    r.precision = "bf16_fp8"
    coverage = planned_coverage(r, plan_layers(r))
    hidden, ffn, qkv = 256, 768, 512
    linear = 4 * (hidden * qkv + hidden * hidden + hidden * 2 * ffn + ffn * hidden)
    head, attention = (
        hidden * 272,
        4 * 256 * 256,
    )  # causal half: seq/2 keys, two products, 256 channels
    assert coverage.share == pytest.approx(linear / (linear + head + attention))
    assert coverage.layers_in_fp8 == 16 and len(coverage.linears) == 17
    assert (
        f"{coverage.share:.1%}" in str(coverage) and max(map(len, str(coverage).splitlines())) <= 80
    )


HOPPER, AMPERE, CPU = (
    Hardware("cuda", (9, 0), (13, 0)),
    Hardware("cuda", (8, 0), (13, 0)),
    Hardware("cpu"),
)
ADA, BLACKWELL, OLD_CUDA = (
    Hardware("cuda", (8, 9), (13, 0)),
    Hardware("cuda", (10, 0), (13, 0)),
    Hardware("cuda", (9, 0), (12, 8)),
)


def test_the_backend_for_each_machine() -> None:
    p = fp8cfg.bf16_with_fp8_mixed()
    assert choose(p, CPU).product == "emulate" and choose(p, HOPPER).product == "scaled_mm"
    with pytest.raises(fp8cfg.ConfigError, match=r"compute capability 8\.0, FP8 needs 8\.9"):
        choose(p, AMPERE)
    p.fp8.emulate = True
    assert choose(p, AMPERE).product == "emulate" == choose(p, HOPPER).product
    assert choose(fp8cfg.bf16_mixed(), AMPERE).product == "none"


@pytest.mark.parametrize(
    ("scaling", "hardware", "line"),
    [
        ("block", HOPPER, ""),
        ("mxfp8", BLACKWELL, ""),
        ("nvfp4", BLACKWELL, ""),
        ("current", BLACKWELL, ""),
        ("delayed", ADA, ""),
        (
            "block",
            OLD_CUDA,
            "fp8.scaling=block: torch has CUDA 12.8, block scaling needs 12.9; set fp8.emulate=true to emulate, or "
            "precision=bf16_fp8_current",
        ),
        (
            "block",
            ADA,
            "fp8.scaling=block: this GPU has compute capability 8.9, block scaling needs 9.0 (Hopper); set fp8.emulate=true "
            "to emulate, or precision=bf16_fp8_current",
        ),
        (
            "block",
            BLACKWELL,
            "fp8.scaling=block: this GPU has compute capability 10.0, block scaling needs 9.0 (Hopper); set "
            "fp8.emulate=true to emulate, or precision=bf16_fp8_current",
        ),
        (
            "mxfp8",
            HOPPER,
            "fp8.scaling=mxfp8: this GPU has compute capability 9.0, mxfp8 scaling needs 10.0 (Blackwell); set "
            "fp8.emulate=true to emulate, or precision=bf16_fp8_current",
        ),
        (
            "nvfp4",
            Hardware("cuda", (10, 0), (12, 7)),
            "fp8.scaling=nvfp4: torch has CUDA 12.7, nvfp4 scaling needs 12.8; set "
            "fp8.emulate=true to emulate, or precision=bf16_fp8_current",
        ),
    ],
)
def test_each_scaling_on_each_hardware(scaling: str, hardware: Hardware, line: str) -> None:
    p = Precision(fp8={"enabled": True, "scaling": scaling, "format": "e4m3"}, backend="native")
    if line:
        with pytest.raises(fp8cfg.ConfigError) as e:
            choose(p, hardware)
        assert e.value.problems == [line]
        p.fp8.emulate = True
        assert choose(p, hardware).product == "emulate"
    else:
        assert choose(p, hardware).product == "scaled_mm"
    assert choose(p, CPU).product == "emulate"


def test_storage_is_no_matter_of_the_backend() -> None:
    for change in (
        {"opt_level": "O2"},
        {"storage": {"weight": "fp16_scaled", "master_weight": "none"}},
        {"storage": {"shard": "zero2"}},
    ):
        assert choose(Precision(fp8={"enabled": True}, **change), CPU).backend == "native"


def test_llama_8b_is_planned_without_torch_and_quickly() -> None:
    r = llama_8b()
    r.precision = "bf16_fp8_current"
    assert calls(lambda: planned_coverage(r, plan_layers(r))) < 10_000
    coverage = planned_coverage(r, plan_layers(r))
    assert coverage.layers_in_fp8 == 30 * 4 and len(coverage.linears) == 129


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"include": ("layers.0.*", "output_layer")},
            "fp8.include=output_layer: has no effect, its layers stay in high precision (fp8.output_layer=false)",
        ),
        (
            {"include": ("layers.0.*",), "output_layer": True},
            "fp8.output_layer=true: has no effect, its layers stay in high precision (not in fp8.include)",
        ),
        (
            {"include": ("layers.0.*", "layers.1.*"), "high_precision_at_start": 1},
            "fp8.include=layers.0.*: has no effect, its layers stay in high precision (fp8.high_precision_at_start=1)",
        ),
    ],
)
def test_a_selector_that_selects_nothing_for_fp8_is_refused(
    change: dict[str, object], line: str
) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        plans(**change)
    assert e.value.problems == [line]


def test_what_fits_is_found_quickly_for_a_deep_model() -> None:
    from fp8cfg.planning.fit_search import check_memory
    from fp8cfg.planning.peak_memory import plan_memory

    r = fp8cfg.compose(["model.num_layers=3000", "precision=bf16_fp8"])

    def refuse() -> None:
        with pytest.raises(fp8cfg.ConfigError, match="nearest that fit: ") as e:
            check_memory(r, "cpu", free)
        messages.append(str(e.value))

    free = sum(plan_memory(r, "cpu").values()) * 3 // 4
    messages: list[str] = []
    assert calls(refuse) < 8_000_000
    words = messages[0].split("nearest that fit: ")[1].split(" \u00b7 ")[0].split()
    fit = fp8cfg.compose(words, base=r)
    assert words and sum(plan_memory(fit, "cpu").values()) <= free
