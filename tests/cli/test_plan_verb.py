"""`fp8cfg plan`: what it prints, without torch, without a GPU, quickly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fp8cfg
from fp8cfg.__main__ import main
from fp8cfg.backends import registry
from fp8cfg.backends.te import rules as te_rules
from fp8cfg.backends.torchao import rules as torchao_rules
from tests.support.counting import calls


@pytest.fixture(autouse=True)
def only_native(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans for a GPU are those of an environment without other libraries."""
    monkeypatch.setattr(registry, "preference", lambda: ("te", "torchao", "native"))
    for rules in (te_rules, torchao_rules):
        monkeypatch.setattr(rules, "unavailable", lambda: "it is not installed")


LEVEL = [
    "opt_level=O2",
    "fp8.params=false",
    "model.recompute_granularity=full",
]  # which works with data parallelism only
LARGE = ["recipe=llama_405b", "precision=bf16_fp8", "--gpu", "h100"]


def plan(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, list[str]]:
    """The plan of a recipe that nothing runs there, and the lines that say so."""
    assert main(["plan", *argv]) == 2
    out, err = capsys.readouterr()
    assert all(line.startswith("error: ") for line in err.splitlines())
    return out, [line.removeprefix("error: ") for line in err.splitlines()]


def test_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "precision=bf16_fp8", "model.recompute_granularity=full", "--gpu", "h100")
    assert (
        out
        == """\
backend on h100: native, auto; FP8 matrix products of the GPU
  passed over te: it is not installed
  passed over torchao: it is not installed
data: stdlib, the source of Python's standard library, tokenizer bytes

   linear layers                        FLOPs  fprop     dgrad     wgrad
4  layers.*.self_attention.linear_qkv   15.1%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.self_attention.linear_proj   7.5%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc1              45.2%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
4  layers.*.mlp.linear_fc2              22.6%  e4m3xe4m3 e5m2xe4m3 e5m2xe4m3
1  output_layer                          2.0%  bf16: fp8.output_layer=false
   attention                             7.5%  bf16: scaled dot product
FP8: 16 of 17 linear layers, 90.5% of matmul FLOPs

low-precision chart  GEMM  comm  weight  master  grad  moments    B/param
this recipe: custom  fp8   fp32  fp8     fp32    fp32  fp32+fp32       17
FP16 AMP             fp16  fp32  fp32    none    fp32  fp32+fp32       16
TE                   fp8   fp32  fp32    none    fp32  fp32+fp32       16
Megatron BF16        bf16  fp32  bf16    fp32    fp32  fp32+fp32       18
O1                   fp8   fp8   fp16    none    fp8   fp32+fp32       11
O2                   fp8   fp8   fp16    none    fp8   fp8+fp16         6
O3                   fp8   fp8   fp8     fp16    fp8   fp8+fp16         7

model: 3.29M parameters (3,287,296)
layout: 1 rank

memory per rank       size  B/param
weights            3.3 MiB      1.0  bf16, FP8 layers fp8
masters           12.5 MiB      4.0  fp32
gradients         12.5 MiB      4.0  fp32
moments           25.1 MiB      8.0  fp32+fp32
FP8 copies       192.2 KiB      0.1  scales, amax histories
activations       14.0 MiB           16 x 256 tokens, recompute full
logits            12.8 MiB           vocab_size=272
backward          39.3 MiB           one layer again
to come           -8.5 MiB           less: freed before gradients exist
total            111.2 MiB
activations, backward: none 147.7 MiB, selective 126.7 MiB, full 57.6 MiB
fits h100, 79.1 GiB: 79.0 GiB to spare

published speedups of FP8 over BF16, not measured here
  1.69x  linear layers' GEMMs with quantization, H200 NVL
         nvidia.github.io/TransformerEngine, GEMM Speedups Across Precisions
sizes here: hidden 256, MLP 768, 4096 tokens: smaller than hidden 4096, MLP
  16384, 15872 tokens of those GEMMs, expect less
all matrix products at the peaks of h100: at most 1.83x
too small to win: layers.*.self_attention.linear_qkv 256 -> 512,
  layers.*.self_attention.linear_proj 256 -> 256, layers.*.mlp.linear_fc2 768 ->
  256
  by torchao's _auto_filter_for_recipe (float8_linear_utils.py), made on H100

will be built
  autocast      Job.autocast(compute=bf16, fp8_layers=16, product=scaled_mm)
  optimizer     MixedPrecisionOptimizer(inner=adamw, lr=0.003, betas=(0.9,
                0.95), eps=1e-05, weight_decay=0.1, clip_grad=1,
                reduce_amax=True)
  schedule      Schedule(max_lr=0.003, min_lr=0.0003, warmup_steps=20,
                max_steps=100, constant_steps=0, decay=cosine)
"""
    )


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ("--gpu h100 --gpus 64", " trainer.num_nodes=8"),
        ("--gpu h100 --gpus 32", ""),
        ("--gpu h200", ""),
    ],
)
def test_what_fits_ends_with_the_line_that_starts_it_there(
    options: str, more: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the machines that it was planned for, where the recipe has others; the plan of that line is the same one."""
    words = ["recipe=llama_70b", "precision=bf16_fp8"]
    assert main(["plan", *words, *options.split()]) == 0
    found, line = capsys.readouterr()
    blanks = ["data=jsonl", "data.path=PATH", "data.tokenizer=FOLDER"]
    assert line == f"runs there: fp8cfg {' '.join(words)}{more} {' '.join(blanks)}\n"
    assert plan(capsys, *line.split()[3:-3], *options.split()[:2]) == found
    (tmp_path / "a.jsonl").touch()
    (tmp_path / "tokenizer").mkdir()
    data = [f"data.path={tmp_path}/a.jsonl", f"data.tokenizer={tmp_path}/tokenizer"]
    assert main(["check", *line.split()[3:-2], *data]) == 0


def test_data_that_is_given_stays_in_the_line_that_starts_it_there(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["recipe=llama_70b", "data=text", "data.path=a", "data.tokenizer=b"]
    for typed, more in ((words, ""), (words[:3], " data.tokenizer=FOLDER")):
        assert main(["plan", *typed, "--gpu", "h200"]) == 0
        assert capsys.readouterr().err == f"runs there: fp8cfg {' '.join(typed)}{more}\n"


def test_the_count_to_the_digit_and_why_a_level_takes_more_than_the_chart_has(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "plan",
                "recipe=llama_8b",
                "precision=bf16_fp8",
                "opt_level=O2",
                "trainer.strategy.context_parallel_size=1",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "\nmodel: 8.03B parameters (8,030,261,248)\n" in out
    assert (
        """
total 10.9 B/param: 6 of the chart, for a parameter of a linear layer between
  steps, and FP8 copies 1.7, accumulation 2.8, other parameters, in wider
  formats, 0.3
"""
        in out
    )
    lines = out.splitlines()
    table = lines[lines.index("memory per rank       size  B/param") + 1 :]
    own = [float(line[:35].split()[-1]) for line in table[:5]]  # weights to accumulation
    assert sum(own) == pytest.approx(10.9, abs=0.15)  # each is rounded


def test_the_largest_recipe_on_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *LARGE)
    assert (
        """\
layout: 512 ranks = tensor 8 x pipeline 8 x context 4 x data 2
              layers  parameters    memory
first stage       15       6.24B  56.7 GiB
middle stage      16       6.38B  56.8 GiB
last stage        15       6.24B  46.5 GiB
"""
        in out
    )
    assert (
        "FP8: 504 of 505 linear layers" in out
        and "of the middle stage, the largest" in out
        and "\nfits h100, 79.1 GiB: 22.3 GiB to spare\n" in out
    )
    assert "too small to win: none" in out
    assert max(map(len, out.splitlines())) <= 80


def test_a_layout_that_is_not_run_is_planned_and_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, lines = refused(capsys, *LARGE, *LEVEL)
    assert "; set opt_level=null; as a smoke run: fp8cfg recipe=llama_405b " in lines[-1]
    assert lines[-1].endswith(" trainer.smoke=true")
    assert (
        "\ndoes not run: opt_level=O2: works with data parallelism only, not with\n" in out
        and "\nruns with: trainer.smoke=true\n" in out
    )
    assert "\nplan only: training does not support this layout\n" in out
    assert (
        "\nfits h100, 79.1 GiB, as planned for: " in out and max(map(len, out.splitlines())) <= 80
    )


def test_it_takes_no_torch_and_no_second(capsys: pytest.CaptureFixture[str]) -> None:
    script = f"import sys; from fp8cfg.__main__ import main; assert main({['plan', *LARGE]}) == 0; assert 'torch' not in sys.modules"
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        capture_output=True,
        cwd=Path(__file__).parents[2],
    )
    assert calls(lambda: plan(capsys, *LARGE)) < 1_000_000


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["precision=bf16_fp8_block", "fp8.format=e4m3", "--gpu", "h100"],
            ["backend on h100: native", "1.40x"],
        ),
        (
            ["precision=bf16_fp8_current", "fp8.high_precision_at_start=0", "--gpu", "b200"],
            ["1.39x", "at most"],
        ),
        (
            ["precision=bf16_fp8"],
            [
                "backend on a CPU (name a GPU: --gpu h100): native",
                "speedup: none, this machine emulates FP8",
            ],
        ),
        (
            ["precision=bf16", "--gpu", "H200"],
            ["backend on h200: native, no FP8 asked for", "this recipe: Megatron BF16"],
        ),
        (["precision=fp16"], ["loss scaling  LossScaler(initial_loss_scale=4.29497e+09"]),
        (
            ["precision=bf16_fp8", "fp8.emulate=true", "--gpu", "a100-40"],
            ["fp8.emulate=true", "speedup: none, this machine emulates FP8"],
        ),
    ],
)
def test_what_is_said(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = plan(capsys, *argv)
    assert [part for part in parts if part not in out] == []
    assert "will be built" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (
            ["precision=bf16_fp8", "--gpu", "a100-80"],
            [
                "cannot run on a100-80: fp8.enabled=true: this GPU has compute capability 8.0,\n  FP8 needs",
                "speedup: none, a100-80 has no FP8 units",
            ],
        ),
        (
            ["precision=bf16_mxfp8", "--gpu", "h100"],
            ["cannot run on h100: fp8.scaling=mxfp8: ", "1.42x", "FP8: 16 of 17", "B300"],
        ),
        (
            [
                "recipe=llama_70b",
                "precision=bf16_fp8",
                "fp8.params=false",
                "opt_level=O2",
                "--gpus",
                "64",
                "--gpu",
                "a100-80",
            ],
            [
                "cannot run on a100-80: ",
                "this recipe: O2",
                "layout: 64 ranks = tensor 4 x pipeline 4 x context 2 x data 2",
            ],
        ),
    ],
)
def test_a_recipe_that_nothing_runs_there_is_planned_and_refused(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, lines = refused(capsys, *argv)
    assert [part for part in parts if part not in out] == [] and "will be built" not in out
    first = " ".join(out.split("\n\n")[0].split())
    assert max(map(len, out.splitlines())) <= 80
    assert lines and f": {lines[0]}" in first
    assert all(f": {line}" in " ".join(out.split()) for line in lines)


def test_json_has_everything_in_a_stable_order(capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LARGE, *LEVEL, "--json")
    out, problems = refused(capsys, *words)
    assert out == refused(capsys, *words)[0]
    found = json.loads(out)
    assert list(found) == [
        "recipe",
        "data",
        "gpu",
        "gpus",
        "runs",
        "refusals",
        "coverage",
        "chart",
        "parameters",
        "shard",
        "ranks",
        "widest",
        "fits",
        "reserve",
        "tight",
        "problems",
        "write",
        "lines",
        "recompute",
        "published",
        "measured_here",
        "too_small",
        "built",
    ]
    assert found["problems"] == [
        line.partition("; as a smoke run")[0] for line in problems
    ] and found["write"] == ["trainer.smoke=true"]
    assert problems[-1] == f"{found['problems'][-1]}; as a smoke run: {' · '.join(found['lines'])}"
    assert (
        found["fits"] is True
        and found["measured_here"] is False
        and found["built"]["optimizer"]["rounding"] == "nearest"
    )
    assert [r["name"] for r in found["ranks"]] == ["first stage", "middle stage", "last stage"]
    assert all(sum(r["memory"].values()) == r["total"] for r in found["ranks"])
    out, lines = refused(capsys, "precision=bf16_fp8", "--gpu", "a100-40", "--json")
    assert json.loads(out)["built"] is None and json.loads(out)["refusals"] == lines


def test_the_graph_as_paths_for_graphviz_and_as_code(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("precision=fp16_fp8", "fp8.margin=1")
    tree = plan(capsys, *words, "--tree").splitlines()
    for line in (
        "recipe.trainer.plugins.compute = 'fp16'",
        "recipe.trainer.plugins.fp8.margin = 1",
        "recipe.trainer.plugins.fp8.override_linear_precision.wgrad = False",
        "recipe.trainer.plugins.backend = 'auto'",
        "recipe.name = 'llama_tiny'",
        "recipe.optim.name = 'adamw'",
        "recipe.trainer.plugins.hysteresis = 2",
        "autocast.fp8 -> recipe.trainer.plugins.fp8",
    ):
        assert line in tree
    dot = plan(capsys, *words, "--dot")
    assert (
        dot.startswith("graph {")
        and dot.rstrip().endswith("}")
        and dot.count("build_loss_scaler") == 1
    )
    code = plan(capsys, *words, "--code")
    made: dict[str, Any] = {}
    exec(code, made)
    assert made["graph"]() == fp8cfg.lower(fp8cfg.compose(words))
    assert len(code.splitlines()) < 100 and max(map(len, code.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--gpus", "0"], "--gpus 0: expected a number of GPUs, 1 to 9999999"),
        (["--gpus", "1e3"], "--gpus 1e3: expected a number of GPUs, 1 to 9999999"),
        (["--gpus", "9" * 5000], f"--gpus {'9' * 40}: expected"),
        (["--gpus", "²"], "--gpus ²: expected a number of GPUs, 1 to 9999999"),
        (
            ["recipe=llama_8b", "--gpus", "7"],
            "7 GPUs: must be a multiple of tensor x pipeline x context parallel size = 2; nearest is 8 (--gpus 8)",
        ),
        (["--gpu", "h1000"], "--gpu h1000: no such GPU in the table; did you mean 'h100'?"),
        (
            ["--gpu", "h100", "trainer.accelerator=cpu"],
            "--gpu h100: trainer.accelerator=cpu uses no GPU; remove one of them",
        ),
        (["--tree", "--dot"], "--tree --dot: choose one"),
        (["--jsn"], "--jsn: no such option; did you mean '--json'?"),
        (["precision=bf16_fp8", "fp8.exclude=['x']"], "fp8.exclude=x: matches no linear layer"),
        (
            ["precision=bf16_fp8", "--gpu", "a100-40", "--tree"],
            "fp8.enabled=true: this GPU has compute capability 8.0",
        ),
        (
            ["trainer.accelerator=cuda"],
            "trainer.accelerator=cuda: name the GPU, as in --gpu h100; there are a100-40, ",
        ),
        (["nowhere.yaml"], "nowhere.yaml: cannot be read"),
    ],
)
def test_mistakes(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {line}") and err.count("\n") == 1


@pytest.mark.parametrize("verb", [["check"], ["check", "--json"], ["plan"], []])
def test_too_little_fp8_has_one_exit_code(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["recipe=llama_tiny", "precision=bf16_fp8", "fp8.min_coverage=0.95"]
    assert main([*verb, *words, f"log.dir={tmp_path}"]) == 3
    line = "fp8.min_coverage=0.95: only 90.5% of matmul FLOPs would run in FP8"
    assert line in "".join(capsys.readouterr()) and list(tmp_path.iterdir()) == []


def test_mistakes_of_options_and_words_come_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu", "h1000", "fp8.margn=1"]) == 2
    assert [line.split(":")[1] for line in capsys.readouterr().err.splitlines()] == [
        " --gpu h1000",
        " fp8.margn",
    ]


def test_a_recipe_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("recipe: llama_tiny\nprecision: bf16_fp8\nmodel: {num_layers: 2}\n")
    assert "FP8: 8 of 9 linear layers" in plan(capsys, str(file))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "--help")
    assert "h200" in out and "--gpus N" in out and max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("shard", "each"), [("none", 7), ("zero1", 2 + 5 / 8), ("zero2", 1 + 6 / 8)]
)
def test_bytes_of_a_parameter_are_those_on_each_of_its_ranks(
    capsys: pytest.CaptureFixture[str], shard: str, each: float
) -> None:
    """O3's are 7, 2 + 5/N and 1 + 6/N."""
    words = (
        "precision=bf16_fp8",
        "opt_level=O3",
        f"storage.shard={shard}",
        "trainer.global_batch_size=128",
        "--gpus",
        "8",
    )
    assert json.loads(plan(capsys, *words, "--json"))["chart"]["bytes_per_parameter"] == each
    lines = plan(capsys, *words).splitlines()
    assert (
        next(line for line in lines if line.startswith("this recipe: O3")).split()[-1]
        == f"{each:.3g}"
    )
    assert (
        f"B/param here: on each of 8 ranks under storage.shard={shard}; unsharded 7" in lines
    ) == (shard != "none")
