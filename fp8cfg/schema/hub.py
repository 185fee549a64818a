"""Checkpoints and tokenizers in a folder, or on the Hugging Face hub as hf://OWNER/NAME[@REVISION]."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fp8cfg.schema.data import SHIPPED
from fp8cfg.schema.errors import ConfigError
from fp8cfg.schema.recipe import Recipe

PREFIX = "hf://"
BYTES = "bytes"
"""The value of data.tokenizer for the byte tokenizer."""
CONFIG = ("config.json",)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
HUB_WEIGHTS = ("*.safetensors", "*.json", *TOKENIZER)
_OTHER_FORMATS = ("*/*", "consolidated*")
"""Copies of the weights in other formats, such as original/*.pth. Not downloaded."""


def split_hub_id(name: str) -> tuple[str, str | None]:
    """Splits hf://OWNER/NAME@REVISION into repository and revision. Without "@" the latter is None."""
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    return repository, revision or None


def local_folder(name: str, key: str, files: tuple[str, ...]) -> Path:
    """Returns the local folder of a checkpoint, after a download if it is on the hub.

    Args:
        name: A path, or an id of the hub.
        key: Key of the recipe with this value, for errors.
        files: Glob patterns of the files to download.

    Raises:
        ConfigError: The hub does not have the repository, or cannot be reached.
    """
    if not name.startswith(PREFIX):
        return Path(name).expanduser()
    try:
        return _download(*split_hub_id(name), files)
    except ImportError:
        raise ConfigError(
            f"{key}={name}: needs the package huggingface_hub; pip install 'fp8cfg[hf]'"
        ) from None
    # HTTP errors of huggingface_hub are OSErrors. Its validation of ids raises ValueErrors.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={name}: {_reason(error, name)}") from None


def pinned(name: str, folder: Path) -> str:
    """Pins an id of the hub to the downloaded commit. Returns a path as it is.

    Args:
        name: A path, or an id of the hub.
        folder: Folder of the download. The cache of huggingface_hub names it after the commit.
    """
    if not name.startswith(PREFIX):
        return name
    repository, _ = split_hub_id(name)
    return f"{PREFIX}{repository}@{folder.name}"


@cache
def _download(repository: str, revision: str | None, files: tuple[str, ...]) -> Path:
    """Downloads files of a repository into huggingface_hub's cache.

    Cached for this process too, because each call asks the hub for the newest commit.
    """
    # An optional dependency.
    from huggingface_hub import snapshot_download

    folder = snapshot_download(
        repository,
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=list(_OTHER_FORMATS),
    )
    return Path(folder)


def _reason(error: Exception, name: str) -> str:
    """Returns the reason for a failed download of `name`, in one line."""
    from huggingface_hub import errors

    # The order matters: GatedRepoError is a RepositoryNotFoundError.
    repository, revision = split_hub_id(name)
    if isinstance(error, errors.HFValidationError) or "/" not in repository:
        return "is not a hub id; write hf://OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        return "is gated; ask for access on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "not found on the hub, or not accessible with this token (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}"
    cause = str(error.__cause__ or error).partition("\n")[0]
    return f"could not be downloaded, and is not in the cache ({cause})"


def chosen_tokenizer(recipe: Recipe) -> str | None:
    """Returns the tokenizer of a recipe: a path, an id of the hub, or None for the byte tokenizer.

    Without data.tokenizer, a pretrained model uses the tokenizer next to model.path or model.weights.
    Shipped corpora train on bytes, and token files are already tokenized.
    """
    data, model = recipe.data, recipe.model
    if data.tokenizer == BYTES:
        return None
    if data.tokenizer:
        return data.tokenizer
    if data.name in (*SHIPPED, "tokens"):
        return None
    return model.path or model.weights


def tokenizer_path(name: str | None) -> str | None:
    """Returns data.tokenizer as a local path, or None for bytes. Downloads as `local_folder`."""
    if name == BYTES:
        return None
    if name and name.startswith(PREFIX):
        return str(local_folder(name, "data.tokenizer", TOKENIZER))
    return name
