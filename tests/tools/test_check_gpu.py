"""tools/check_gpu.py on a CPU: its rows in processes of their own, and its bits over a stand-in for Transformer Engine's kernels."""

from __future__ import annotations

import argparse
import os
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8cfg.numerics.gemm import DGRAD, Operand
from fp8cfg.numerics.scaling import INPUT
from tests.support import te_standin
from tools.gpu_rows import products, te_bits

TOOL = Path(__file__).parents[2] / "tools" / "check_gpu.py"


@pytest.mark.slow
def test_it_runs_on_a_cpu() -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(TOOL),
            "--small",
            "--steps",
            "2",
            "--only",
            "bits",
            "bf16",
            "delayed",
            "row",
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOOL.parents[1])},
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and lines[-1] == "none failed"
    rows = {" ".join(line[:21].split()): line[21:].split() for line in lines}
    for model in ("tiny", "1b"):
        base = [float(loss) for loss in rows[f"{model} bf16"][:2]]
        for row in ("native delayed", "native row", "torchao row"):
            loss_1, loss_2, share, _, _ = rows[f"{model} {row}"]
            assert (
                [float(loss_1), float(loss_2)] == pytest.approx(base, rel=0.01)
                and loss_1 != loss_2
                and share in ("76%", "77%")
            )
        assert rows["bits kernels row"][:2] == rows["bits te delayed"][:2] == ["not", "run:"]
        assert (
            rows[f"{model} te delayed"][:2] == rows[f"{model} msamp delayed"][:2] == ["not", "run:"]
        )


@pytest.mark.parametrize("row", ["te delayed", "te delayed parts", "te current parts"])
def test_its_rows_of_te_run_over_the_stand_in(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8cfg.backends.te import decoder, rules

    monkeypatch.setattr(rules, "_hardware_lacks", lambda precision, hardware: [])
    monkeypatch.setattr(rules, "unavailable", lambda: "")
    monkeypatch.setattr(decoder, "obstacle", decoder.obstacle)  # and so put back
    tool = runpy.run_path(str(TOOL))
    args = argparse.Namespace(device="cpu", small=True, steps=4)
    with te_standin.transformer_engine():
        got = tool["train"](args, "tiny", row)
        want = tool["train"](args, "tiny", "bf16")
        with pytest.raises(ArithmeticError, match="its layers are"):
            other = (
                "te.TransformerLayer"
                if row.endswith("parts")
                else "te.Linear; not te.TransformerLayer: of this test"
            )
            monkeypatch.setattr(
                decoder, "describe_decoder_layers", lambda model: {"layers.0": other}
            )
            tool["train"](args, "tiny", row)
    assert [float(x) for x in got[:3]] == pytest.approx(
        [float(x) for x in want[:3]], rel=0.01
    ) and got[3] != want[3] == "0%"


@pytest.mark.parametrize("scaling", ["delayed", "current"])  # block's scales lie otherwise there
def test_bits_are_those_of_the_stand_in(scaling: str) -> None:
    tool = runpy.run_path(str(TOOL))
    with te_standin.transformer_engine():
        (text,) = tool["bits"](
            argparse.Namespace(device="cpu", no_proof=False), "bits", f"te {scaling}"
        )
    assert text.startswith("0 of ") and "transposes" in text


def test_bits_of_mx_are_those_of_the_stand_in_but_for_scales_of_zeros() -> None:
    tool = runpy.run_path(str(TOOL))
    with (
        te_standin.transformer_engine(),
        pytest.raises(
            ArithmeticError, match=r"^0 of \d+ bytes of data, \d+ of \d+ bytes of scales"
        ),
    ):
        tool["bits"](argparse.Namespace(device="cpu", no_proof=False), "bits", "te mxfp8")


class ReferenceQuantizer:
    """Transformer Engine's reference of its NVFP4 kernels, called and answering as the quantizer that launches them."""

    def __init__(self, rowwise: bool, columnwise: bool, with_2d_quantization: bool) -> None:
        from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

        assert rowwise and columnwise
        tile = (16, 16) if with_2d_quantization else (1, 16)
        e2m1 = reference_utils.Fp4Formats.E2M1
        self._reference = reference_nvfp4.NVFP4QuantizerRef(
            dtype=e2m1, quant_tile_shape=tile, columnwise=True
        )

    def __call__(self, x: torch.Tensor) -> SimpleNamespace:
        data, scale, data_t, scale_t, amax, _ = self._reference._quantize(x)
        across = {"_columnwise_data": data_t, "_columnwise_scale_inv": scale_t}
        return SimpleNamespace(
            _rowwise_data=data, _rowwise_scale_inv=scale, _amax_rowwise=amax.view(1), **across
        )


def test_bits_of_nvfp4_are_those_of_transformer_engines_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with te_standin.transformer_engine() as te:
        monkeypatch.setattr(te, "NVFP4Quantizer", ReferenceQuantizer)
        assert te_bits.te_bits("nvfp4", "cpu").verdict().startswith("0 of ")
        monkeypatch.setattr(te_bits, "INPUT", te_bits.WEIGHT)  # squares
        with pytest.raises(ArithmeticError, match=r"^[1-9]\d* of \d+ bytes of data, [1-9]"):
            te_bits.te_bits("nvfp4", "cpu").verdict()


def test_products_of_nvfp4_have_the_operands_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(a: Operand) -> torch.Tensor:
        assert a.scale_inv is not None and a.tile is not None and a.global_scale_inv is not None
        return (
            a.data.float()
            * a.scale_inv.float().repeat_interleave(a.tile[0], 0).repeat_interleave(a.tile[1], 1)
            * a.global_scale_inv
        )

    def gemm(a: Operand, b: Operand, out: torch.dtype, ran: None, slot: int) -> torch.Tensor:
        return (values(a) @ values(b).t()).to(out)

    monkeypatch.setattr(products, "gemm", gemm)
    found = products.products("nvfp4", "cpu")
    names = "fprop", "dgrad", "wgrad", "wgrad in float32"
    assert re.fullmatch(
        ", ".join(rf"{name} e2m1 x e2m1 1[4-8]\.\d%" for name in names) + " apart", found
    )
    made = products.operands
    monkeypatch.setattr(
        products,
        "operands",
        lambda t, role, scaling: made(t, role, replace(scaling, hadamard=role == INPUT)),
    )
    with pytest.raises(
        ArithmeticError, match=r"^wgrad e2m1 x e2m1 1[345]\d\.\d%; wgrad in float32 "
    ):
        products.products("nvfp4", "cpu")


@pytest.mark.parametrize("scaling", ["current", "row"])
def test_a_product_that_is_refused_or_wrong_is_named_beside_the_others(
    scaling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gemm(a: Operand, b: Operand, out: torch.dtype, ran: None, slot: int) -> torch.Tensor:
        if slot == DGRAD:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED")
        assert a.scale_inv is not None and b.scale_inv is not None
        y = (a.data.float() @ b.data.float().t()) * (
            a.scale_inv * b.scale_inv.t()
        )  # torch takes seconds for it on a CPU
        return y.to(out) * (2 if out == torch.float32 else 1)

    monkeypatch.setattr(products, "gemm", gemm)
    monkeypatch.setattr(products, "LARGE", {"row": ((7, 160, 32),)})
    large = r"; 7 x 160 x 32 e4m3 x e4m3 [34]\.\d%" if scaling == "row" else ""
    with pytest.raises(
        ArithmeticError,
        match=r"^dgrad e5m2 x e4m3 failed: RuntimeError: CUDA error: CUBLAS_STATUS_NOT_SUPPORTED; wgrad in float32 "
        r"e5m2 x e4m3 \d+\.\d%; fprop e4m3 x e4m3 [34]\.\d%; wgrad e5m2 x e4m3 [56]\.\d%"
        + large
        + "$",
    ):
        products.products(scaling, "cpu")


@pytest.mark.parametrize("name", ["check_gpu", "bench_gpu", "report_gpu"])
def test_without_a_gpu_nothing_runs_and_torch_says_why(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init() -> None:
        raise RuntimeError(
            "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
        )

    tool = runpy.run_path(str(TOOL.with_name(f"{name}.py")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", init)
    with pytest.raises(SystemExit) as ended:
        tool["main"]()
    assert ended.value.code == 2
    assert (
        "torch has no CUDA device here (The NVIDIA driver on your system is too old (found version 12040)); write "
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir()), "no empty file of results"


@pytest.mark.parametrize("name", ["check_gpu", "bench_gpu", "report_gpu"])
def test_a_file_that_cannot_be_written_is_refused_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, out = runpy.run_path(str(TOOL.with_name(f"{name}.py"))), tmp_path / "nowhere" / "gpu.txt"
    monkeypatch.setattr(sys, "argv", [name, "--small", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        tool["main"]()
    assert ended.value.code == 2 and capsys.readouterr().err.endswith(
        f"argument --out: {out}: No such file or directory\n"
    )
