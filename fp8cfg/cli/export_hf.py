"""`export hf`: the weights of a run as a Hugging Face checkpoint, in BF16 or FP8."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fp8cfg.cli.argv import Arguments
from fp8cfg.config.errors import ConfigError, NotWritable, printable

if TYPE_CHECKING:
    from torch import Tensor

    from fp8cfg.config.hugging_face import Family
    from fp8cfg.training.run_model import RunModel


def run(arguments: Arguments) -> int:
    """Write the folder that `arguments` name: hf, the run, and where to. Returns the exit code."""
    if len(arguments.plain) != 3 or arguments.words:
        raise ConfigError("export hf: needs a run folder and a new folder, as in: fp8cfg export hf runs/NAME OUT --fp8 block")
    fp8, out = arguments.one("--fp8"), Path(arguments.plain[2])
    if fp8 not in (None, "block", "tensor"):
        raise ConfigError(f"--fp8 {fp8}: not an option; write --fp8 block or --fp8 tensor, or leave it out for BF16")
    _refuse_what_is_there(out)
    from fp8cfg.config import hugging_face
    from fp8cfg.training import run_model

    found = run_model.load(Path(arguments.plain[1]), print)
    family = hugging_face.of_model(found.recipe.model)
    with _new_folder(out) as made:
        _write(found, family, made, fp8)
    what = f"FP8 with {fp8} scales" if fp8 else "BF16"
    print(f"wrote {printable(str(out))}: {family.architecture}, {what}, the weights of step {found.step}")
    return 0


def _refuse_what_is_there(out: Path) -> None:
    try:
        empty = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    except OSError as e:
        raise ConfigError(f"{str(out)[:60]}: cannot be looked at ({e.strerror})") from None
    if not empty:
        raise ConfigError(f"{out}: exists already; name a new folder")


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder that is `out` at the end of the block, and gone where that fails: half an export would be taken for a whole one.
    Raises NotWritable."""
    from safetensors import SafetensorError

    whole = out.resolve()
    made = whole.with_name(f".{whole.name[:100]}.tmp-{uuid.uuid4().hex[:12]}")
    try:
        made.mkdir(parents=True)
        yield made
        made.rename(whole)
    except (OSError, SafetensorError) as e:
        raise NotWritable(f"{out}: cannot be written ({getattr(e, 'strerror', None) or e})") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(found: RunModel, family: Family, out: Path, fp8: str | None) -> None:
    from fp8cfg.layer_plan import transformer_config
    from fp8cfg.models import hf, hf_export

    planned = {p.name for p in found.plan if p.fp8} or {p.name for p in found.plan}
    linears = {name: module for name, module in found.model.named_modules() if name in {p.name for p in found.plan}}
    parameters = dict(found.model.named_parameters())

    def read(name: str) -> Tensor:
        module, _, leaf = name.rpartition(".")
        layer = linears.get(module)
        if leaf == "weight" and hasattr(layer, "dequantized_weight"):
            import torch

            wide: Tensor = layer.dequantized_weight(torch.float32)  # type: ignore[union-attr]
            return wide.detach().cpu()
        return parameters[name].detach().cpu()

    scales = {f"{name}.weight": scale.cpu() for name, layer in linears.items()
              if (scale := getattr(layer, "fp8_weight_scale_inv", None)) is not None and scale.numel() == 1}
    layout = hf.Layout(family.names, family.conv1d, family.model.layernorm_zero_centered_gamma)
    if fp8 and family.conv1d:
        raise ConfigError(f"--fp8 {fp8}: {family.architecture} multiplies by Conv1D, for which there is no FP8 layout; write BF16")
    hf_export.write(out, transformer_config(found.recipe), family.write(found.recipe.model), layout, read, fp8,
                    planned - {"output_layer"}, scales)
