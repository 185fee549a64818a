"""Ceilings of tools/fake_gpu/table.py: what is above one is a line, and every case has one. The fake GPU itself is `make test-fake-gpu`."""

from __future__ import annotations

from pathlib import Path

from tools.fake_gpu.recorder import Requests
from tools.fake_gpu.table import FIGURES, PEAK, counts, every_case, over, read, write

FORWARD = Requests(["K a", "T b", "C D2D 4", "M 512"])
BACKWARD = Requests(["G cublasLtMatmul", "S cudaStreamSynchronize", "C H2D 8"])
UPDATE = Requests(["K c", "S cudaMemcpy"])


def test_counts_are_by_kind_and_part() -> None:
    assert counts({"forward": FORWARD, "backward": BACKWARD, "update": UPDATE}) == {
        "launches": 3, "forward": 2, "backward": 1, "update": 1, "copies": 2, "waits": 2}
    assert counts({"step": BACKWARD}) == {"launches": 1, "copies": 1, "waits": 1}
    assert (BACKWARD.copies("H2D"), BACKWARD.copies("D2D"), (FORWARD + UPDATE).launches) == (1, 0, 3)


def test_what_is_above_its_ceiling_is_a_line(tmp_path: Path) -> None:
    found, path = {**counts({"step": BACKWARD}), PEAK: 1.5}, tmp_path / "ceilings.toml"
    write({"step bf16": found, "other": {**found, "launches": 0, "waits": 0}}, path)
    ceilings = read(path)
    assert over("step bf16", found, ceilings) == []
    assert over("other", found, ceilings) == ["other: 1 launches, 0 are allowed", "other: 1 waits, 0 are allowed"]
    assert over("step bf16", {**found, PEAK: 1.51}, ceilings) == []
    assert over("step bf16", {**found, PEAK: 1.52}, ceilings) == ["step bf16: 1.520 GiB of peak, 1.500 are allowed"]
    assert over("another", found, ceilings) == ["another: no ceiling is recorded; run it with --record"]


def test_every_case_has_its_ceilings() -> None:
    ceilings = read()
    assert set(ceilings) == {*every_case(blackwell=False), *every_case(blackwell=True)} and all(set(of) == {*FIGURES, PEAK} for of in ceilings.values())
