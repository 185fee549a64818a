"""Recognition of other projects' files by their top-level keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple


class Signature(NamedTuple):
    """Top-level keys of a project's files: all of `required` and at least one of `distinctive`."""

    project: str
    required: frozenset[str]
    distinctive: frozenset[str]
    verb: str | None = None
    """Name of the project in `fp8cfg import`. None without an importer."""


def _keys(text: str) -> frozenset[str]:
    """Splits a text into keys."""
    return frozenset(text.split())


SIGNATURES = (
    Signature(
        "Accelerate",
        _keys("mixed_precision"),
        _keys("compute_environment distributed_type num_processes fp8_config"),
        "accelerate",
    ),
    Signature(
        "DeepSpeed",
        frozenset(),
        _keys("zero_optimization train_micro_batch_size_per_gpu msamp"),
        "deepspeed",
    ),
    Signature(
        "axolotl", _keys("base_model"), _keys("sequence_len datasets adapter micro_batch_size")
    ),
    Signature(
        "LLaMA-Factory", _keys("model_name_or_path"), _keys("finetuning_type stage cutoff_len")
    ),
    Signature(
        "TRL or transformers",
        _keys("model_name_or_path"),
        _keys("per_device_train_batch_size dataset_name output_dir"),
    ),
    Signature("ms-swift", _keys("model dataset"), _keys("train_type tuner_type torch_dtype")),
    Signature("nanotron", _keys("parallelism tokens"), _keys("model optimizer")),
    Signature("NeMo 1", _keys("exp_manager"), _keys("model trainer"), "nemo"),
    Signature(
        "Megatron-Bridge",
        _keys("train model"),
        _keys("optimizer scheduler mixed_precision"),
        "bridge",
    ),
)
_PROJECTS = {
    "accelerate": {
        "compute_environment",
        "distributed_type",
        "downcast_bf16",
        "fp8_config",
        "fsdp_config",
        "deepspeed_config",
        "machine_rank",
        "main_training_function",
        "mixed_precision",
        "num_machines",
        "num_processes",
        "rdzv_backend",
    },
    "deepspeed": {
        "bf16",
        "fp16",
        "gradient_clipping",
        "msamp",
        "optimizer",
        "scheduler",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "zero_allow_untested_optimizer",
    },
}
"""Top-level keys of importable files. Two of them identify the project if no signature matches."""


def matching(keys: Iterable[str]) -> list[Signature]:
    """Returns the signatures of all projects with these top-level keys.

    Several can match: the keys of TRL and LLaMA-Factory overlap.
    """
    names = set(keys)
    return [
        signature
        for signature in SIGNATURES
        if signature.required <= names and not signature.distinctive.isdisjoint(names)
    ]


def importable(keys: Collection[str]) -> str | None:
    """Returns the name in `fp8cfg import` for a file with these top-level keys.

    Returns None for a recipe, and for projects without an importer. Their keys then get one message
    each.
    """
    # The first signature decides, even if it has no importer. Otherwise a file of transformers with
    # bf16 and fp16 would count as a file of DeepSpeed.
    signatures = matching(keys)
    if signatures:
        return signatures[0].verb
    for name, theirs in _PROJECTS.items():
        if len(theirs.intersection(keys)) > 1:
            return name
    return None
