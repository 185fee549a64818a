#!/usr/bin/env python3
"""Registers, spills and shared memory of fp8cfg's Triton kernels, as ptxas counts them for the GPU that is there, also a fake one; warps
that an SM has registers for at once.

    . FOLDER/env.sh; $FAKE_GPU_PYTHON -m tools.fake_gpu.kernel_code                # sm_90
    . FOLDER/env.sh; FAKE_CC=100 $FAKE_GPU_PYTHON -m tools.fake_gpu.kernel_code    # sm_100
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

AMAXES, COUNT, FOUR_BITS = "compute_part_amaxes", "count_overflow", "cast_blocks NVFP4"
"""The kernels that convert nothing: two only read, the other makes its codes by arithmetic."""


class Resources(NamedTuple):
    """Of one thread: `registers`, and bytes `spilled` to memory; `shared` bytes of a block."""

    registers: int
    spilled: int
    shared: int


def resident_warps(registers: int, warps: int) -> int:
    """Warps of programs of `warps` that the 65,536 registers of an SM hold at once. A thread has a multiple of 8, an SM 64 warps at most."""
    return warps * min(64 // warps, 65536 // (-(-registers // 8) * 8 * 32 * warps))


def resources(ptx: str, shared: int = 0) -> Resources:
    """What ptxas says of a kernel. Raises RuntimeError where it does not take it."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"^\.target (sm_(\d+)\w*)", ptx, re.MULTILINE)
    assert target is not None, "PTX names its target"
    ptxas = get_ptxas(int(target[2])).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        done = subprocess.run(
            [ptxas, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(done.stderr)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", done.stderr)))
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert registers is not None, done.stderr
    return Resources(int(registers[1]), spilled, shared)


def compiled() -> dict[str, Any]:
    """The kernels, compiled for the GPU that is there."""
    import torch

    from fp8cfg.numerics import E4M3, E5M2
    from fp8cfg.numerics.kernels import blocks, rows, tensor

    found: dict[str, Any] = {}
    seen, counts = torch.zeros((), device="cuda"), torch.zeros(4, device="cuda")
    for delayed in (True, False):
        for dtype in (torch.bfloat16, torch.float32):
            t, parts = (
                torch.zeros(256, 512, device="cuda", dtype=dtype),
                torch.empty(tensor.PARTS, device="cuda"),
            )
            name = f"{AMAXES} {'delayed' if delayed else 'current'} {str(dtype).removeprefix('torch.')}"
            found[name] = tensor.compute_part_amaxes(
                t, parts, torch.ones(3, device="cuda") if delayed else None
            )
            name = f"{COUNT} {'of one scale' if delayed else 'of tiles'} {str(dtype).removeprefix('torch.')}"
            found[name] = tensor.count(
                t, seen, torch.ones((), device="cuda") if delayed else None, counts, E4M3.reach
            )
    for delayed in (True, False):
        for fmt, dtype in ((E4M3, torch.bfloat16), (E4M3, torch.float32), (E5M2, torch.bfloat16)):
            t = torch.zeros(256, 512, device="cuda", dtype=dtype)
            scales, history = (
                torch.ones(3, device="cuda") if delayed else None,
                torch.zeros(4, 3, device="cuda"),
            )
            data, transposed = (
                torch.empty_like(t, dtype=fmt.dtype),
                torch.empty(512, 256, device="cuda", dtype=fmt.dtype),
            )
            name = f"cast {'delayed' if delayed else 'current'} {str(dtype).removeprefix('torch.')} to {fmt.name}, transposed"
            found[name] = tensor.cast(
                t,
                scales,
                history,
                0,
                fmt.max,
                fmt.max,
                False,
                data,
                transposed,
                torch.empty((), device="cuda"),
                counts=counts,
                reach=fmt.reach,
            )
            if fmt is E4M3:  # with the amax of all tensor-parallel ranks
                found[f"{name}, amax given"] = tensor.cast(
                    t,
                    scales,
                    history,
                    0,
                    fmt.max,
                    fmt.max,
                    False,
                    data,
                    transposed,
                    torch.empty((), device="cuda"),
                    torch.ones(1, device="cuda"),
                    counts,
                    fmt.reach,
                )
    for square in (False, True):
        for dtype in (torch.bfloat16, torch.float32):
            t = torch.zeros(256, 512, device="cuda", dtype=dtype)
            data, transposed = (
                torch.empty_like(t, dtype=E4M3.dtype),
                torch.empty(512, 256, device="cuda", dtype=E4M3.dtype),
            )
            scales, other = (torch.empty(n, 4, device="cuda") for n in (256, 512))
            name = f"cast_blocks {'128x128' if square else '1x128 and 128x1'} {str(dtype).removeprefix('torch.')}"
            found[name] = blocks.cast_blocks(
                t,
                1e38,
                E4M3.max,
                True,
                square,
                data,
                scales,
                transposed,
                other,
                record=seen,
                counts=counts,
            )
            if not square:
                across = torch.empty(2, 512, device="cuda")
                found[f"cast_blocks 1x128 and 128x1 stored {str(dtype).removeprefix('torch.')}"] = (
                    blocks.cast_blocks(
                        t,
                        1e38,
                        E4M3.max,
                        True,
                        False,
                        data,
                        scales,
                        torch.empty_like(data),
                        across,
                        transpose=False,
                        record=seen,
                        counts=counts,
                    )
                )
    for dtype in (torch.bfloat16, torch.float32):
        t, kind = (
            torch.zeros(256, 512, device="cuda", dtype=dtype),
            str(dtype).removeprefix("torch."),
        )
        data, transposed = (
            torch.empty_like(t, dtype=E4M3.dtype),
            torch.empty(512, 256, device="cuda", dtype=E4M3.dtype),
        )
        for square in (False, True):
            scales, other = (
                torch.empty(2 * 4 * 512, device="cuda", dtype=torch.uint8) for _ in range(2)
            )
            name = f"cast_blocks MX {'32x32' if square else '1x32 and 32x1'} {kind}"
            found[name] = blocks.cast_blocks(
                t,
                0.0,
                E4M3.max,
                False,
                square,
                data,
                scales,
                transposed,
                other,
                mx=32,
                record=seen,
                counts=counts,
            )
        room = [
            torch.empty(n, device="cuda", dtype=torch.uint8)
            for n in (256 * 256, 2 * 8 * 512, 512 * 128, 4 * 4 * 512)
        ]
        random = (
            torch.zeros(2, device="cuda", dtype=torch.int32),
            torch.zeros((), device="cuda", dtype=torch.int32),
        )
        for name, across, draws in (
            ("1x16", (None, None), None),
            ("1x16 at random", (None, None), random),
            ("16x16", room[2:], None),
        ):
            found[f"{FOUR_BITS} {name} {kind}"] = blocks.cast_nvfp4(
                t, *room[:2], *across, torch.empty((), device="cuda"), draws, 1, seen, counts=counts
            )
        held = [
            torch.empty(shape, device="cuda", dtype=torch.uint8)
            for shape in ((256, 512), (256, 32), (256, 512), (16, 512))
        ]
        for name, into in (
            ("1x16 and 16x1 stored", held),
            ("16x16 stored", [held[0], torch.empty_like(held[3][:, :32]), None, None]),
        ):
            found[f"{FOUR_BITS} {name} {kind}"] = blocks.cast_nvfp4(
                t,
                *into,
                torch.empty((), device="cuda"),
                record=seen,
                counts=counts,
                transpose=False,
            )
        one, other = (torch.empty(n, 1, device="cuda") for n in (256, 512))
        found[f"cast_rows rows and columns {kind}"] = rows.cast_rows(
            t, E4M3.max, True, data, one, transposed, other, record=seen, counts=counts
        )
        for axis, n in ((1, 256), (0, 512)):  # of all tensor-parallel ranks
            amaxes, which = torch.empty(n, device="cuda"), "amaxes" if axis else "amaxes_t"
            found[f"cast_rows rows and columns {kind}, {which} given"] = rows.cast_rows(
                t,
                E4M3.max,
                True,
                data,
                one,
                transposed,
                other,
                record=seen,
                counts=counts,
                **{which: amaxes},
            )
        # As a weight is stored: nothing is transposed, scales of MX are bytes.
        again, across = torch.empty_like(data), torch.empty(1, 512, device="cuda")
        scales, other = (
            torch.empty(s, device="cuda", dtype=torch.uint8) for s in ((256, 16), (8, 512))
        )
        found[f"cast_blocks MX stored {kind}"] = blocks.cast_blocks(
            t,
            0.0,
            E4M3.max,
            False,
            False,
            data,
            scales,
            again,
            other,
            mx=32,
            transpose=False,
            record=seen,
            counts=counts,
        )
        found[f"cast_rows stored {kind}"] = rows.cast_rows(
            t, E4M3.max, True, data, one, again, across, transpose=False, record=seen, counts=counts
        )
    return found


def main() -> int:
    print(
        f"{'kernel':48}{'target':>9}{'registers':>11}{'spilled':>9}{'shared':>8}{'warps':>7}{'an SM':>7}"
    )
    wrong = 0
    for name, kernel in compiled().items():
        found = resources(kernel.asm["ptx"], kernel.metadata.shared)
        target = re.search(r"^\.target (\w+)", kernel.asm["ptx"], re.MULTILINE)
        print(
            f"{name:48}{target[1] if target else '':>9}{found.registers:11}{found.spilled:9}{found.shared:8}"
            f"{kernel.metadata.num_warps:7}{resident_warps(found.registers, kernel.metadata.num_warps):7}"
        )
        wrong += found.spilled > 0
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
