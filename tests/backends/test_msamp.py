"""backend=msamp: what is missing, and what it refuses, over a stand-in of MS-AMP's public API."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.backends.choice import Hardware, choose
from fp8cfg.backends.msamp import rules
from fp8cfg.schema.precision import Precision
from tests.support.msamp_standin import WORDS
from tests.support.small import small

H100, CPU = Hardware("cuda", (9, 0), (12, 2)), Hardware("cpu")
FP8 = {"enabled": True, "amax_history_len": 16, "reduce_amax": False}
STORED = {"accumulate": "stored"}


def precision(
    fp8: dict[str, Any] | None = None, storage: dict[str, Any] | None = None, **keys: Any
) -> Precision:
    return Precision(
        backend="msamp", fp8=FP8 | (fp8 or {}), storage=STORED | (storage or {}), **keys
    )


# What is missing.


def test_where_it_is_not_installed_the_same_native_row_is_named() -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        choose(precision(), H100)
    assert e.value.problems == [
        "backend=msamp: msamp is not installed, and on no index (github.com/Azure/MS-AMP); set backend=native opt_level=O2 "
        "storage.weight_grad=fp8_pow2 storage.comm=fp8_pow2 storage.exp_avg=fp8_pow2"
    ]
    assert choose(precision(), H100, here=False).backend == "msamp"


@pytest.mark.parametrize(
    ("level", "words"),
    [
        ("O1", "backend=native opt_level=O1 storage.weight_grad=fp8_pow2 storage.comm=fp8_pow2"),
        (
            "O3",
            "backend=native opt_level=O3 storage.weight_grad=fp8_pow2 storage.comm=fp8_pow2 storage.exp_avg=fp8_pow2 storage.shard=zero1",
        ),
    ],
)
def test_the_native_row_is_a_recipe(level: str, words: str) -> None:
    assert rules.instead(precision(opt_level=level)) == words
    small("precision=bf16_fp8", *words.split()).check()


def test_parts_that_are_missing_are_named(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rules.unavailable() == ""
    for name in ("msamp_adamw.py", "libmsamp_dist.so"):
        (installed / name).unlink()
    sys.path_importer_cache.clear()
    assert (
        rules.unavailable()
        == f"msamp is installed without msamp_adamw, {installed}/libmsamp_dist.so, which it loads"
    )


def test_looking_for_it_does_not_import_it(tmp_path: Path) -> None:
    (tmp_path / "msamp").mkdir()
    (tmp_path / "msamp" / "__init__.py").write_text("raise SystemExit('imported')")
    script = (
        "import sys; from fp8cfg.backends.msamp import rules as msamp_rules; assert 'installed without msamp_adamw' in msamp_rules.unavailable(); "
        "assert not {'torch', 'msamp'} & set(sys.modules)"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"},
    )


def test_auto_takes_it_for_a_recipe_that_says_what_it_does_alone(installed: Path) -> None:
    auto = precision().model_copy(update={"backend": "auto"})
    assert choose(auto, H100).passed_over[0] == (
        "msamp: opt_level=null: MS-AMP stores state by a level"
    )
    auto.opt_level = "O2"
    assert (
        "msamp: storage.weight_grad=fp8: MS-AMP's O2 has fp8_pow2 there"
        in choose(auto, H100).passed_over[0]
    )
    for column in ("weight_grad", "comm", "exp_avg"):
        setattr(auto.storage, column, "fp8_pow2")
    assert choose(auto, H100).backend == "msamp"
    (installed / "msamp" / "__init__.py").unlink()
    for file in sorted((installed / "msamp").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (installed / "msamp").rmdir()
    sys.path_importer_cache.clear()
    assert (
        choose(auto, H100).passed_over[0]
        == "msamp: msamp is not installed, and on no index (github.com/Azure/MS-AMP)"
    )


# What it cannot do.


@pytest.mark.parametrize(
    ("change", "hardware", "line"),
    [
        (
            {"fp8": {"scaling": "current"}},
            H100,
            "fp8.scaling=current: MS-AMP has only delayed scaling; set fp8.scaling=delayed",
        ),
        ({"fp8": {"scaling": "current", "granularity": "row"}}, H100, "fp8.scaling=current: "),
        (
            {"fp8": {"format": "e4m3"}},
            H100,
            "fp8.format=e4m3: MS-AMP quantizes to E4M3 forward, and gradients to E5M2; set fp8.format=hybrid",
        ),
        ({"fp8": {"margin": 1}}, H100, "fp8.margin=1: MS-AMP has no margin; set fp8.margin=0"),
        ({"fp8": {"interval": 2}}, H100, "fp8.interval=2: "),
        (
            {"fp8": {"amax_history_len": 1024}},
            H100,
            "fp8.amax_history_len=1024: MS-AMP keeps the amaxes of 16 steps; set fp8.amax_history_len=16",
        ),
        (
            {"fp8": {"amax_compute_algo": "most_recent"}},
            H100,
            "fp8.amax_compute_algo=most_recent: ",
        ),
        ({"fp8": {"reduce_amax": True}}, H100, "fp8.reduce_amax=true: "),
        ({"fp8": {"first_step": "te"}}, H100, "fp8.first_step=te: "),
        ({"fp8": {"dot_product_attention": True}}, H100, "fp8.dot_product_attention=true: "),
        ({"fp8": {"multi_head_attention": True}}, H100, "fp8.multi_head_attention=true: "),
        ({"fp8": {"emulate": True}}, H100, "fp8.emulate=true: "),
        (
            {"fp8": {"override_linear_precision": {"wgrad": True}}},
            H100,
            "fp8.override_linear_precision.wgrad=true: MS-AMP multiplies all three in FP8; remove it",
        ),
        (
            {"opt_level": "O3"},
            H100,
            "opt_level=O3: MS-AMP has it only through DeepSpeed, whose JSON `fp8cfg export deepspeed` writes; set opt_level=O2, or backend=native opt_level=O3",
        ),
        (
            {"storage": {"exp_avg": "fp8"}},
            H100,
            "storage.exp_avg=fp8: MS-AMP's O2 has fp8_pow2 there; remove it, or set backend=native opt_level=O2",
        ),
        (
            {"storage": {"exp_avg": "fp8_pow2"}, "opt_level": "O1"},
            H100,
            "storage.exp_avg=fp8_pow2: MS-AMP's O1 has fp32 there",
        ),
        (
            {"storage": {"weight": "fp8"}},
            H100,
            "storage.weight=fp8: MS-AMP's O2 has fp16_scaled there",
        ),
        (
            {"storage": {"master_weight": "fp32"}},
            H100,
            "storage.master_weight=fp32: MS-AMP's O2 has none there",
        ),
        ({"storage": {"comm": "fp32"}}, H100, "storage.comm=fp32: "),
        ({"storage": {"rounding": "stochastic"}}, H100, "storage.rounding=stochastic: "),
        ({"storage": {"shard": "zero1"}}, H100, "storage.shard=zero1: "),
        (
            {"storage": {"accumulate": "wide"}},
            H100,
            "storage.accumulate=wide: MS-AMP adds each microbatch to FP8 gradients; set storage.accumulate=stored",
        ),
        (
            {},
            CPU,
            "backend=msamp: MS-AMP runs only on CUDA, this is a CPU; set backend=native opt_level=O2 storage.weight_grad=fp8_pow2",
        ),
        (
            {},
            Hardware("cuda", (8, 0)),
            "backend=msamp: this GPU has compute capability 8.0, MS-AMP multiplies in FP8 only on an H100; set backend=native opt_level=O2",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], hardware: Hardware, line: str) -> None:
    found = [str(violation) for violation in rules.refusals(precision(**change), hardware)]
    assert len(found) == 1 and found[0].startswith(line) and "; " in found[0], found


def test_what_is_not() -> None:
    assert (
        rules.refusals(precision(), H100) == rules.refusals(precision(opt_level="O1"), H100) == []
    )
    assert (
        rules.refusals(
            precision(
                storage={
                    "weight": "fp16_scaled",
                    "exp_avg": "fp8_pow2",
                    "exp_avg_sq": "fp16_scaled",
                }
            ),
            H100,
        )
        == []
    )
    assert (
        rules.misfit(precision().fp8, 3, 5) == ""
        and rules.tokens_multiple(precision().fp8, "scaled_mm") == 1
    )


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("optim.name=sgd",), "opt_level=O2: needs optim.name=adamw or adam, not sgd (MS-AMP)"),
        (
            ("optim.name=adam", "optim.weight_decay=0.1"),
            "optim.weight_decay=0.1: with optim.name=adam MS-AMP leaves it out of the moments that it stores; set optim.name=adamw",
        ),
        (("precision=bf16",), "backend=msamp: has no effect with fp8.enabled=false"),
        (
            ("optim.betas=[0.98,0.95]",),
            "optim.betas=[0.98, 0.95]: rounding in storage.exp_avg=fp8_pow2 stops an average of rate 0.98",
        ),
    ],
)
def test_rules_of_the_recipe(words: tuple[str, ...], line: str) -> None:
    with pytest.raises(fp8cfg.ConfigError) as e:
        small(*WORDS[0 if "precision=bf16" not in words else 1 :], *words).check()
    assert any(problem.startswith(line) for problem in e.value.problems), e.value.problems
