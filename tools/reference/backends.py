"""Backend reference: which scaling each backend runs on which hardware, from its rules, and what it does with each key, from
tested cells.
"""

from __future__ import annotations

from fp8cfg.backends.choice import backend_violations
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
        if backend_violations(backend, precision, hardware, here=False)
        else rules(backend).product(precision, hardware)[0]
    )


def support_page() -> str:
    return "\n\n".join(
        [
            "# Backends, scalings and hardware",
            "From the rules of the backends, for BF16 presets. On a GPU, native block scaling needs `fp8.format=e4m3`.",
            support_table(),
            "| cell | meaning |\n| --- | --- |\n"
            "| ran | the tests train it on a CPU, with emulated FP8: the same values as FP8 hardware |\n"
            "| not run | the backend accepts the recipe on this GPU, but it has not been run there |\n"
            "| emulation | accepted only with `fp8.emulate=true`, and not run |\n"
            "| `-` | an error with exit code 2 and the reason |",
            "H100 means compute capability 9.0 with CUDA 12.9, B200 means 10.0 with CUDA 13.0.",
            "Transformer Engine and MS-AMP don't run on CPUs. Tests use their Python code over stand-ins for the compiled parts. torchao's layers "
            "train on a CPU. See also [each key by backend](backends.md).",
        ]
    )


def page() -> str:
    from tests.support.backend_table import markdown

    return "\n\n".join(
        [
            "# Backends by key",
            f'The effect of each key of precision in {", ".join(BACKENDS)}. "applied" names the place where a test reads the value back. '
            "\"refused\" has the error. Tests check every cell: Transformer Engine's from its own objects, MS-AMP's from a stand-in of its "
            "public API. For one recipe, use `fp8cfg check` with `backend=NAME`.",
            markdown(),
        ]
    )
