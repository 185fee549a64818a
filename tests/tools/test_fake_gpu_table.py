"""Ceilings of tools/fake_gpu/table.py: what is above one is a line, and every case has one. The fake GPU itself is `make test-fake-gpu`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.fake_gpu.recorder import Requests
from tools.fake_gpu.table import CEILINGS, FIGURES, PEAK, counts, every_case, over, read, write

FORWARD = Requests(["K a", "T b", "C D2D 4", "M 512"])
BACKWARD = Requests(["G cublasLtMatmul", "S cudaStreamSynchronize", "C H2D 8"])
UPDATE = Requests(["K c", "S cudaMemcpy"])


def test_counts_are_by_kind_and_part() -> None:
    assert counts({"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}) == {
        "launches": 3,
        "forward": 2,
        "backward": 1,
        "update": 1,
        "copies": 2,
        "waits": 2,
    }
    assert counts({"step": BACKWARD}) == {"launches": 1, "copies": 1, "waits": 1}
    assert (BACKWARD.copies("H2D"), BACKWARD.copies("D2D"), (FORWARD + UPDATE).launches) == (
        1,
        0,
        3,
    )


def test_what_is_above_its_ceiling_is_a_line(tmp_path: Path) -> None:
    found, path = {**counts({"step": BACKWARD}), PEAK: 1.5}, tmp_path / "ceilings.toml"
    write({"step bf16": found, "other": {**found, "launches": 0, "waits": 0}}, path)
    ceilings = read(path)
    assert over("step bf16", found, ceilings) == []
    assert over("other", found, ceilings) == [
        "other: 1 launches, 0 are allowed",
        "other: 1 waits, 0 are allowed",
    ]
    assert over("step bf16", {**found, PEAK: 1.51}, ceilings) == []
    assert over("step bf16", {**found, PEAK: 1.52}, ceilings) == [
        "step bf16: 1.520 GiB of peak, 1.500 are allowed"
    ]
    assert over("another", found, ceilings) == [
        "another: no ceiling is recorded; run it with --record"
    ]


def test_every_case_has_its_ceilings() -> None:
    ceilings = read()
    assert set(ceilings) == {*every_case(blackwell=False), *every_case(blackwell=True)} and all(
        set(of) == {*FIGURES, PEAK} for of in ceilings.values()
    )


def test_ceilings_are_within_what_the_gpu_path_must_keep() -> None:
    """Whatever --record wrote: a linear under delayed scaling in 20 launches eagerly and 12 compiled, and nothing waits but an optimizer
    with quantized moments that is stepped by itself, which asks once whether its gradients are finite."""
    ceilings = read()
    assert (
        ceilings["linear delayed eager"]["launches"] <= 20
        and ceilings["linear delayed compiled"]["launches"] <= 12
    )
    assert {
        case.rpartition(" ")[0]: found["waits"]
        for case, found in ceilings.items()
        if found["waits"]
    } == {"low-bit AdamW 1": 1, "low-bit AdamW 4": 1}


README = {
    "linear, BF16": ["linear bf16"],
    "linear, delayed": ["linear delayed"],
    "linear, current": ["linear current"],
    "linear, rows": ["linear row"],
    "linear, blocks": ["linear block"],
    "linear, MXFP8, NVFP4, compute capability 10.0": ["linear mxfp8", "linear nvfp4"],
    "layer of an 8B model, BF16, delayed, blocks": [
        "8B layer bf16",
        "8B layer delayed",
        "8B layer block",
    ],
    "linear of Transformer Engine 2.20.2: delayed, current, blocks": [
        "te linear delayed",
        "te linear current",
        "te linear block",
    ],
    "linear of Transformer Engine, MXFP8, NVFP4, compute capability 10.0": [
        "te linear mxfp8",
        "te linear nvfp4",
    ],
    "low-bit AdamW, one tensor of 4M, four": ["low-bit AdamW 1", "low-bit AdamW 4"],
    "fused AdamW, four tensors": ["fused AdamW 4"],
    "step, bf16": ["step bf16"],
    "step, bf16_fp8": ["step bf16_fp8"],
    "step, bf16_fp8 with O1, O2, O3": ["step O1 bf16_fp8", "step O2 bf16_fp8", "step O3 bf16_fp8"],
    "step, backend=te, bf16_fp8, current, blocks": [
        "te step delayed",
        "te step current",
        "te step block",
    ],
    "step, fsdp bf16_fp8": ["step fsdp bf16_fp8"],
}


@pytest.mark.parametrize(("row", "cases"), README.items(), ids=README)
def test_the_readme_has_the_launches_of_the_ceilings(row: str, cases: list[str]) -> None:
    ceilings, table = read(), CEILINGS.with_name("README.md").read_text(encoding="utf-8")
    cells = re.search(rf"^\| {re.escape(row)} \|[^|]*\|([^|]*)\|([^|]*)\|$", table, re.MULTILINE)
    assert cells, "a row of this name"
    for how, cell in zip(("eager", "compiled"), cells.groups(), strict=True):
        said = [
            int(number.replace(",", ""))
            for number in re.findall(r"[\d,]*\d", cell.partition(" copies")[0])
        ]
        assert not cell.strip() or said[: len(cases)] == [
            ceilings[f"{case} {how}"]["launches"] for case in cases
        ], how
