"""Files of a pretrained model's weights. Loads no torch."""

from __future__ import annotations

from pathlib import Path

INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


def missing_weights(folder: Path) -> str:
    """Returns why a folder has no readable weights and what to do, or "" if it has some."""
    if (folder / INDEX).is_file() or (folder / SINGLE_FILE).is_file():
        return ""
    if any(folder.glob("pytorch_model*.bin")) or any(folder.glob("*.pt*")):
        line = (
            "from transformers import AutoModelForCausalLM as A; "
            f"A.from_pretrained('{folder}').save_pretrained('{folder}')"
        )
        return (
            "has pickled weights, which can run code and are not read; write them as safetensors:"
            f' python -c "{line}"'
        )
    return (
        f"has neither {SINGLE_FILE} nor {INDEX}; copy the weights there, or set model.weights=null"
        " to start from random weights"
    )
