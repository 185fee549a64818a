"""CUDA libraries that do nothing, for the libraries of torch that are given: writes and compiles every one that they link to.

    python make_libraries.py OUT TRITON_DRIVER INCLUDE:INCLUDE LIBRARY...

The runtime (libcudart), the driver (libcuda), NCCL and cuDNN's graphs are the C files in stubs/. Every other function that the libraries leave
undefined returns 0, but for those of ANSWERS and for products of matrices, which stand in the log; so do the functions of the driver
that Triton's driver.c names. Which library has a function is told by its name.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
RUNTIME, DRIVER = "cudart", "cuda"
SOURCES = {
    RUNTIME: ["request_log.c", "kernels.c", "memory.c", "device.c", "streams.c"],
    DRIVER: ["driver.c"],
    "cudnn": ["cudnn.c"],
    "nccl": ["nccl.c", "nccl_ranks.c"],
}
PREFIXES = {RUNTIME: "cuda", DRIVER: "cu", "nvshmem_host": "nvshmem"}
"""What the functions of a library begin with, where that is not its name."""
LIBRARY = re.compile(r"lib((?:cu|nv|nccl)\w*)\.so")
PRODUCT = re.compile(r"cublas.*gemm|cublasLtMatmul$", re.IGNORECASE)
ANSWERS = {
    "cublasCreate_v2": "(void **h) { *h = (void *)64; return 0; }",
    "cublasLtGetVersion": "(void) { return 130002; }",
    "cublasLtMatmulAlgoGetHeuristic": "(void *a, void *b, void *c, void *d, void *e, void *f, void *g, int n, char *found, int *count) "
    "{ for (int i = 0; i < 96; i++) found[i] = 0; *count = 1; return 0; }",
    "cuptiGetResultString": '(int e, const char **s) { *s = "fake"; return 0; }',
    "cuptiGetVersion": "(unsigned *v) { *v = 130000; return 0; }",
    "nvrtcCreateProgram": "(void **program) { *program = (void *)64; return 0; }",
    "nvrtcGetNumSupportedArchs": "(int *count) { *count = 1; return 0; }",
    "nvrtcGetSupportedArchs": "(int *found) { *found = 120; return 0; }",
    "nvrtcGetLoweredName": "(void *program, const char *expression, const char **name) { *name = expression; return 0; }",
    "nvrtcGetCUBINSize": "(void *program, size_t *size) { *size = 1; return 0; }",
    "nvrtcVersion": "(int *major, int *minor) { *major = 13, *minor = 0; return 0; }",
}


def output(*command: str | Path) -> list[str]:
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=True
    ).stdout.splitlines()


def cc(*arguments: str | Path) -> None:
    subprocess.run(["cc", "-fPIC", "-w", *map(str, arguments)], check=True)


def needed(files: list[Path]) -> dict[str, str]:
    """The file names of NVIDIA's libraries that `files` link to, by their short names."""
    lines = [line for f in files for line in output("readelf", "-d", f) if "NEEDED" in line]
    return {
        found[1]: line.split("[")[1].rstrip("]")
        for line in lines
        if (found := LIBRARY.search(line))
    }


def undefined(
    files: list[Path], libraries: dict[str, str]
) -> tuple[dict[str, set[str]], dict[str, str]]:
    """The functions that `files` want of each library, and the version of the symbols that they ask for."""
    functions: dict[str, set[str]] = {short: set() for short in libraries}
    versions = dict(libraries)
    for line in (line for f in files for line in output("nm", "-D", "-u", f)):
        symbol, _, version = line.split()[-1].partition("@")
        homes = [
            s
            for s in libraries
            if symbol.lstrip("_").lower().startswith(PREFIXES.get(s, s).lower())
        ]
        if homes and not symbol.startswith("_Z"):
            home = max(homes, key=lambda short: len(PREFIXES.get(short, short)))
            functions[home].add(symbol)
            versions[home] = version.strip("@") or versions[home]
    return functions, versions


def function(name: str) -> str:
    """A function in C that does nothing."""
    if name in ANSWERS:
        return f"long {name}{ANSWERS[name]}"
    if "String" in name:
        return f'const char *{name}(void) {{ return "fake"; }}'
    said = f'fake_request("G", "{name}"); ' if PRODUCT.match(name) else ""
    return f"int {name}(void) {{ {said}return 0; }}"


def main(out: Path, triton_driver: Path, include: list[str], files: list[Path]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    libraries = needed(files)
    functions, versions = undefined(files, libraries)
    functions[DRIVER] |= set(re.findall(r"\bcu[A-Z]\w+", triton_driver.read_text(encoding="utf-8")))
    for short in sorted(
        libraries, key=lambda s: s != RUNTIME
    ):  # the runtime first: it has the log, which the others link to
        name, objects = libraries[short], []
        for source in SOURCES.get(short, []):
            objects.append(out / f"{source}.o")
            cc(
                "-c",
                "-O1",
                "-o",
                objects[-1],
                STUBS / source,
                *(f"-I{folder}" for folder in include),
            )
        defined = {line.split()[-1] for o in objects for line in output("nm", "--defined-only", o)}
        rest, exported = out / f"{short}.c", out / f"{short}.map"
        rest.write_text(
            "#include <stddef.h>\nvoid fake_request(const char *, const char *);\n"
            + "\n".join(map(function, sorted(functions[short] - defined)))
            + "\n"
        )
        exported.write_text(f"{versions[short]} {{ global: *; }};\n")
        log = [] if short == RUNTIME else [out / libraries[RUNTIME]]
        cc(
            "-shared",
            "-fno-builtin",
            f"-Wl,-soname,{name},--version-script={exported}",
            "-o",
            out / name,
            rest,
            *objects,
            *log,
            "-ldl",
            "-lm",
            "-lpthread",
            "-lrt",
        )
        for made in (rest, exported, *objects):
            made.unlink()
    (out / "libcuda.so").unlink(missing_ok=True)
    (out / "libcuda.so").symlink_to("libcuda.so.1")  # Triton links its launchers with -lcuda
    print(f"{len(libraries)} libraries with {sum(map(len, functions.values()))} functions")


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        sys.argv[3].split(":"),
        [Path(file) for file in sys.argv[4:]],
    )
