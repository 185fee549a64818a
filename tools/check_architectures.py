#!/usr/bin/env python3
"""Train thirty architectures of transformers, torch, torchvision, timm and diffusers, small and with random weights, for a few steps
on a CPU in bf16, bf16_fp8 (delayed), bf16_fp8_block and torchao's Float8Linear, and print a table: the share of the FLOPs in FP8, the
last losses beside bf16's, and below each what stays out of FP8 and why. Exit code 1 where one does not train, has nothing in FP8, or
is refused for another reason than having no product that can be converted.

    python tools/check_architectures.py                          # makes an environment, and removes it
    python tools/check_architectures.py --torch-index URL          # torch's CPU wheels; the default index may have CUDA ones
    python tools/check_architectures.py --keep FOLDER            # the environment stays there, and is used again
    python tools/check_architectures.py --env PYTHON gpt2 vit    # an environment that is there; architectures by their names
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.environments import ROOT, TORCH, made

SCRIPT = ROOT / "tools" / "architectures" / "rows.py"
LIBRARIES = {"torchvision": "0.28.0", "timm": "1.0.31", "diffusers": "0.42.1", "torchao": "0.18.0"}
"""Versions that fit that torch."""
NAMES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "gemma2",
    "gemma3",
    "phi3",
    "deepseek_v3",
    "olmo2",
    "granite",
    "gpt_oss",
    "gpt2",
    "bert",
    "modernbert",
    "t5",
    "vit",
    "whisper",
    "mamba2",
    "torchvision_resnet",
    "torchvision_vit",
    "timm_vit",
    "timm_convnext",
    "nn_transformer",
    "nn_multihead_attention",
    "nn_lstm",
    "diffusers_unet",
    "diffusers_dit",
)
"""As tools/architectures has them."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "name", nargs="*", help=f"architectures, of {', '.join(NAMES)}; default: all"
    )
    parser.add_argument(
        "--torch-index", metavar="URL", help=f"pip's, for {TORCH} and what it requires"
    )
    parser.add_argument(
        "--keep", metavar="FOLDER", type=Path, help="where the environment is made, and stays"
    )
    parser.add_argument(
        "--env", metavar="PYTHON", help="the Python of an environment that is there; none is made"
    )
    options = parser.parse_args()
    if unknown := [name for name in options.name if name not in NAMES]:
        parser.error(f"{unknown[0]}: no such architecture; choose from {', '.join(NAMES)}")
    if options.env and (options.keep or options.torch_index):
        parser.error("--env makes no environment; drop --keep and --torch-index")
    return options


def main() -> int:
    options = arguments()
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    with tempfile.TemporaryDirectory() as folder:
        try:
            python = options.env or made(
                options.keep or Path(folder),
                options.torch_index,
                [f"{n}=={v}" for n, v in LIBRARIES.items()],
            )
        except subprocess.CalledProcessError as e:
            print(f"FAILED, no environment: {(e.stderr.strip().splitlines() or [str(e)])[-1]}")
            return 1
        done = subprocess.run(
            [python, str(SCRIPT), *options.name], env=environ, stderr=subprocess.PIPE, text=True
        )
    if done.returncode not in (0, 1):
        print(
            f"FAILED, exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['printed nothing'])[-1]}"
        )
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
