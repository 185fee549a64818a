"""Backend reference: which scaling each backend runs on which hardware, from its rules, and what it does with each key, from
tested cells.
"""

from __future__ import annotations

from fp8cfg.backends.choice import against
from fp8cfg.backends.protocol import Hardware
from fp8cfg.backends.registry import rules
from fp8cfg.schema.presets import precision_preset
from tools.reference.markdown import table

HARDWARE = {
    "CPU": Hardware("cpu"),
    "H100": Hardware("cuda", (9, 0), (12, 9)),
    "B200": Hardware("cuda", (10, 0), (13, 0)),
}
PRESETS = {
    "delayed": "bf16_fp8",
    "current": "bf16_fp8_current",
    "block": "bf16_fp8_block",
    "mxfp8": "bf16_mxfp8",
    "nvfp4": "bf16_nvfp4",
}
BACKENDS = ("native", "torchao", "te", "msamp")


def support_table() -> str:
    """A row a backend and device, a column a scaling."""
    rows = [
        [backend, device, *(_cell(backend, scaling, hardware) for scaling in PRESETS)]
        for backend in BACKENDS
        for device, hardware in HARDWARE.items()
    ]
    rows = [row for row in rows if any(cell != "-" for cell in row[2:])]
    return table(["backend", "on", *PRESETS], rows)


def _cell(backend: str, scaling: str, hardware: Hardware) -> str:
    found = _takes(backend, scaling, hardware, False)
    if hardware.device == "cpu":
        return "ran" if found else "-"
    return (
        "not run"
        if found == "scaled_mm"
        else "emulation"
        if _takes(backend, scaling, hardware, True)
        else "-"
    )


def _takes(backend: str, scaling: str, hardware: Hardware, emulate: bool) -> str:
    """How the backend multiplies there, with the keys beside the preset's that it wants; empty where it refuses."""
    precision = precision_preset(PRESETS[scaling])
    precision.backend, precision.fp8.emulate = backend, emulate  # type: ignore[assignment]
    if backend in ("torchao", "msamp"):
        precision.fp8.params = False
    if backend == "native" and scaling == "block" and hardware.device == "cuda":
        precision.fp8.format = "e4m3"
    if backend == "msamp" and scaling == "delayed":
        precision.fp8.amax_history_len, precision.fp8.reduce_amax, precision.storage.accumulate = (
            16,
            False,
            "stored",
        )
    return (
        ""
        if against(backend, precision, hardware, here=False)
        else rules(backend).product(precision, hardware)[0]
    )


def support_page() -> str:
    return "\n\n".join(
        [
            "# Backends, scalings and hardware",
            "As the rules of the backends have it, for bf16 presets; native multiplies blocks on a "
            "GPU under `fp8.format=e4m3`.",
            support_table(),
            "ran: trained on a CPU by the tests, FP8 emulated, with the values that FP8 hardware rounds to. not run: the backend takes the recipe on "
            "that GPU, and it has not been run there. emulation: taken there with `fp8.emulate=true` alone, not run either. `-`: refused with exit "
            "code 2 and the reason. H100 stands for compute capability 9.0 with CUDA 12.9, B200 for 10.0 with CUDA 13.0.",
            "Transformer Engine and MS-AMP have no CPU path: their backends are tested on a CPU with the libraries' own Python over stand-ins for "
            "their compiled parts. torchao's layers train on a CPU as they are. [What each backend does with each key](backends.md).",
        ]
    )


def page() -> str:
    from tests.support.backend_table import markdown

    return "\n\n".join(
        [
            "# Backends by key",
            f"What {', '.join(BACKENDS)} do with each key of precision: applied, and where a test reads that back, or refused, "
            "and with which line. Tests hold every cell; those of Transformer Engine are read from its own objects, those of MS-AMP from a "
            "stand-in of its public API. `precision=bf16_fp8 backend=NAME` and `fp8cfg check` say the same of one recipe.",
            markdown(),
        ]
    )
