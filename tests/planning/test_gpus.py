"""The table of GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

import fp8cfg
from fp8cfg.backends.choice import FP8_CAPABILITY
from fp8cfg.planning import hardware
from fp8cfg.planning.hardware import GPU, GPUS, find_gpu


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda g: g.name)
def test_figures_agree_with_one_another(gpu: GPU) -> None:
    assert (gpu.fp8 is not None) == (gpu.capability >= FP8_CAPABILITY)
    assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02)
    assert 16 << 30 < gpu.memory < 300 << 30 and gpu.source


def test_names() -> None:
    assert find_gpu("H100_PCIe") is GPUS["h100-pcie"]
    with pytest.raises(
        fp8cfg.ConfigError, match="--gpu h1000: no such GPU in the table; did you mean 'h100'"
    ):
        find_gpu("h1000")


@pytest.mark.parametrize(
    ("files", "cache"),
    [
        (("memory.max", "memory.current", "memory.stat"), "inactive_file"),
        (
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "memory/memory.stat",
            ),
            "total_inactive_file",
        ),
    ],
    ids=["cgroup v2", "cgroup v1"],
)
def test_the_page_cache_of_a_container_is_free_memory(
    files: tuple[str, ...], cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a container that has read 7 GiB of data would have 1 GiB left for a model."""
    monkeypatch.setattr(hardware, "CGROUP", tmp_path)
    (tmp_path / "memory").mkdir()
    plain = hardware.free_memory("cpu", 1)
    stat = f"anon 5\n{cache} {6 << 20}\nactive_file 7\n"
    for name, text in zip(files, (f"{8 << 20}\n", f"{7 << 20}\n", stat), strict=True):
        (tmp_path / name).write_text(text)
    assert hardware.free_memory("cpu", 1) == 7 << 20 < plain
    (tmp_path / files[2]).unlink()  # the limit counts without it too
    assert hardware.free_memory("cpu", 1) == 1 << 20
    (tmp_path / files[0]).write_text("max\n")
    assert hardware.free_memory("cpu", 1) > 8 << 20
