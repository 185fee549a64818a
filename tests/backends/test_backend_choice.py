"""Which backend `auto` takes, what an explicit one is refused for, and what each torchao rule says."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

import fp8cfg
from fp8cfg.backends import registry
from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.backends.native import rules as native_rules
from fp8cfg.backends.te import rules as te_rules
from fp8cfg.backends.torchao import rules as torchao_rules
from fp8cfg.schema.precision import Precision

CPU = Hardware("cpu")
HOPPER, BLACKWELL, AMPERE = (Hardware("cuda", c, (13, 0)) for c in ((9, 0), (10, 0), (8, 0)))


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Which libraries are installed, whatever is."""
    there = SimpleNamespace(te="", torchao="")
    monkeypatch.setattr(te_rules, "unavailable", lambda: there.te)
    monkeypatch.setattr(torchao_rules, "unavailable", lambda: there.torchao)
    monkeypatch.setattr(registry, "preference", lambda: ("te", "torchao", "native"))
    return there


def precision(**fp8: object) -> Precision:
    return Precision(fp8={"enabled": True, **fp8})


CURRENT, DELAYED = {"scaling": "current"}, {"scaling": "delayed"}


@pytest.mark.parametrize(
    ("fp8", "hardware", "backend", "product"),
    [
        (CURRENT, HOPPER, "te", "scaled_mm"),
        (DELAYED, HOPPER, "te", "scaled_mm"),
        (DELAYED | {"first_step": "in_time"}, HOPPER, "native", "scaled_mm"),
        (DELAYED | {"params": True, "keep_transpose_cache": True}, HOPPER, "native", "scaled_mm"),
        (CURRENT | {"granularity": "row"}, HOPPER, "torchao", "scaled_mm"),
        (CURRENT | {"emulate": True}, HOPPER, "native", "emulate"),
        (CURRENT, CPU, "native", "emulate"),
        (DELAYED, CPU, "native", "emulate"),
        ({"scaling": "mxfp8", "format": "e4m3"}, BLACKWELL, "te", "scaled_mm"),
    ],
)
def test_auto_takes_the_first_that_can(
    fp8: dict[str, object], hardware: Hardware, backend: str, product: str
) -> None:
    found = choose(precision(**fp8), hardware)
    assert (found.backend, found.product) == (backend, product) and found.why.startswith("auto; ")


def test_auto_says_whom_it_passed_over(installed: SimpleNamespace) -> None:
    installed.te = "transformer-engine is not installed"
    assert choose(precision(**CURRENT), HOPPER).passed_over == (
        "te: transformer-engine is not installed",
    )
    passed_over = choose(precision(**DELAYED), HOPPER).passed_over
    assert [line.partition(":")[0] for line in passed_over] == ["te", "torchao"]
    assert choose(precision(**CURRENT), CPU).passed_over == (
        "te, torchao: native goes first where FP8 is emulated",
    )
    assert choose(Precision(fp8={"enabled": True}, backend="native"), HOPPER).passed_over == ()


def test_statistics_need_the_native_backend() -> None:
    assert choose(precision(**CURRENT), HOPPER, statistics=10).backend == "native"
    p = precision(**CURRENT)
    p.backend = "torchao"
    with pytest.raises(
        fp8cfg.ConfigError,
        match=r"log\.fp8_stats_every_n_steps=10: backend=torchao has no such statistics",
    ):
        choose(p, HOPPER, statistics=10)


def test_nobody_can_and_who_could() -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        choose(precision(**CURRENT), AMPERE)
    assert len(e.value.problems) == 1 and "compute capability 8.0" in e.value.problems[0]


def test_who_could_if_it_were_installed(installed: SimpleNamespace) -> None:
    installed.te = "transformer-engine is not installed"
    installed.torchao = "torchao is not installed"
    with pytest.raises(fp8cfg.ConfigError) as e:
        choose(precision(scaling="mxfp8", format="e4m3"), Hardware("cuda", (10, 0), (12, 6)))
    assert e.value.problems[1:] == [
        "backend=auto: te could run this, but transformer-engine is not installed",
        "backend=auto: torchao could run this, but torchao is not installed",
    ]


def test_an_explicit_backend_is_never_another_one(installed: SimpleNamespace) -> None:
    p = precision(**CURRENT)
    p.backend = "torchao"
    assert choose(p, CPU).why == "asked for; torchao emulates FP8 on a CPU, in float32"
    installed.torchao = "torchao is not installed"
    with pytest.raises(
        fp8cfg.ConfigError, match="backend=torchao: torchao is not installed; set backend=native"
    ):
        choose(p, CPU)
    assert choose(p, HOPPER, here=False).backend == "torchao"


@pytest.mark.parametrize(
    ("change", "hardware", "line"),
    [
        ({"fp8": DELAYED}, CPU, "fp8.scaling=delayed: torchao has only current and mxfp8"),
        (
            {"compute": "fp16", "fp8": {"scaling": "mxfp8"}},
            CPU,
            "precision.compute=fp16: torchao quantizes bf16 and fp32 to MXFP8; set backend=native, or bf16",
        ),
        (
            {"fp8": {"scaling": "block"}},
            HOPPER,
            "fp8.scaling=block: torchao has only current and mxfp8",
        ),
        (
            {"fp8": CURRENT | {"params": True}},
            CPU,
            "fp8.params=true: torchao does not multiply weights that are stored in FP8",
        ),
        (
            {"fp8": CURRENT | {"dot_product_attention": True}},
            CPU,
            "fp8.dot_product_attention=true: torchao leaves attention",
        ),
        (
            {
                "fp8": {
                    "scaling": "mxfp8",
                    "format": "e4m3",
                    "override_linear_precision": {"dgrad": True},
                }
            },
            CPU,
            "fp8.override_linear_precision.dgrad=true: torchao's MXFP8Linear",
        ),
        (
            {"fp8": {"scaling": "mxfp8", "format": "e4m3", "enable_2d_quantization": True}},
            CPU,
            "fp8.enable_2d_quantization=true: torchao scales weights along rows",
        ),
        (
            {"fp8": {"scaling": "mxfp8", "format": "e4m3"}},
            HOPPER,
            "fp8.scaling=mxfp8: this GPU has compute capability 9.0, torchao's MXFP8 needs 10.0",
        ),
        (
            {"fp8": CURRENT},
            AMPERE,
            "fp8.enabled=true: this GPU has compute capability 8.0, FP8 needs 8.9",
        ),
        (
            {"fp8": CURRENT | {"granularity": "row"}, "compute": "fp16"},
            HOPPER,
            "fp8.granularity=row: torch's product with scales of rows gives bf16",
        ),
    ],
)
def test_what_torchao_refuses(
    change: dict[str, dict[str, object]], hardware: Hardware, line: str
) -> None:
    p = Precision(**change | {"fp8": {"enabled": True, **change["fp8"]}})
    found = [str(violation) for violation in torchao_rules.refusals(p, hardware)]
    assert len(found) == 1 and found[0].startswith(line) and "; " in found[0]


def test_blocks_with_e5m2_gradients_have_no_product_on_a_gpu() -> None:
    """torch's scaled_mm takes E4M3 x E4M3 alone with scales of blocks: three of the block presets would fail in their first step."""
    hybrid = Precision(fp8={"enabled": True, "scaling": "block", "format": "hybrid"})
    assert [str(violation) for violation in native_rules.refusals(hybrid, HOPPER)] == [
        "fp8.format=hybrid: torch multiplies fp8.scaling=block in E4M3 only, also gradients; set fp8.format=e4m3, or fp8.emulate=true to emulate"
    ]
    assert native_rules.refusals(hybrid, CPU) == []
    for words in (
        {"format": "e4m3"},
        {"emulate": True},
        {"override_linear_precision": {"dgrad": True, "wgrad": True}},
    ):
        assert (
            native_rules.refusals(
                Precision(fp8={"enabled": True, "scaling": "block", **words}), HOPPER
            )
            == []
        )


def test_shapes_and_tokens() -> None:
    mx, current = precision(scaling="mxfp8", format="e4m3").fp8, precision(**CURRENT).fp8
    assert torchao_rules.misfit(
        mx, 64, 48
    ) == "out_features=48 is not a multiple of 32" and not torchao_rules.misfit(current, 64, 48)
    assert [
        torchao_rules.tokens_multiple(f, product)
        for f in (mx, current)
        for product in ("emulate", "scaled_mm")
    ] == [32, 32, 1, 16]


def test_the_rules_load_neither_torch_nor_a_library() -> None:
    script = (
        "import sys; from fp8cfg.backends import choice, gemm_plan, protocol, registry; "
        "assert all(isinstance(registry.rules(name).unavailable(), str) for name in registry.names()); "
        "assert not {'torch', 'torchao', 'transformer_engine'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
