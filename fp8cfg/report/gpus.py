"""GPU specifications by name: memory, compute capability and dense peak throughput, for plans on machines not at hand."""

from __future__ import annotations

from dataclasses import dataclass

from fp8cfg.config.errors import ConfigError, suggest


@dataclass(frozen=True)
class GPU:
    """One GPU. `gib` is the memory that CUDA reports: total capacity in torch's out-of-memory messages, the least of those
    found; CUDA itself takes about half a GiB of it. `bf16` and `fp8` are dense peaks in TFLOP/s with float32 accumulation,
    `fp8` None where there are no such units."""

    name: str
    gib: float
    capability: tuple[int, int]
    bf16: float
    fp8: float | None
    source: str

    @property
    def memory(self) -> int:
        """Bytes."""
        return int(self.gib * 2**30)


GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40", 39.3, (8, 0), 312, None, "NVIDIA A100 datasheet"),
        GPU("a100-80", 79.1, (8, 0), 312, None, "NVIDIA A100 datasheet"),
        GPU("h100", 79.1, (9, 0), 989, 1979, "NVIDIA H100 datasheet, SXM"),
        GPU("h100-pcie", 79.1, (9, 0), 756, 1513, "NVIDIA H100 datasheet, PCIe"),
        GPU("h200", 139.7, (9, 0), 989, 1979, "NVIDIA H200 datasheet, SXM"),
        GPU("b200", 178.3, (10, 0), 2250, 4500, "NVIDIA HGX B200 datasheet, an eighth of it"),
        GPU("l4", 22.0, (8, 9), 121, 242, "NVIDIA L4 datasheet"),
        GPU("l40s", 44.3, (8, 9), 362, 733, "NVIDIA L40S datasheet"),
        GPU("rtx4090", 23.5, (8, 9), 165, 330, "NVIDIA Ada architecture whitepaper"),
        GPU("rtx5090", 31.3, (12, 0), 209, 419, "NVIDIA RTX Blackwell architecture whitepaper"),
    )
}
"""Datasheets give most peaks with sparsity; these are half of those."""


def named(name: str, option: str = "--gpu ") -> GPU:
    """The GPU called `name`, whatever its case. Raises ConfigError with the nearest name; `option` is what named it."""
    gpu = GPUS.get(name.lower().replace("_", "-"))
    if gpu is None:
        near = [known for known in GPUS if known.startswith(name.lower())]
        hint = f"; did you mean {' or '.join(near)}?" if near else suggest(name, GPUS)
        raise ConfigError(f"{option}{name}: no such GPU in the table{hint}")
    return gpu
