"""Hugging Face hub: hf://OWNER/NAME, or hf://OWNER/NAME@REVISION, where a local folder could stand. Loads no torch.

The hub is asked for such ids alone, by huggingface_hub, once in each process, and what it gives stays in that library's own cache;
its environment counts (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Of a repository only the files that are read come over, and
nothing that is pickled or runs code.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fp8cfg.config.errors import ConfigError

PREFIX = "hf://"
CONFIG = ("config.json",)
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
WEIGHTS = ("*.safetensors", "*.json", *TOKENIZER)
_LEFT = ("*/*", "consolidated*")
"""Not downloaded: other forms of the same weights, which have folders or names of their own."""


def split(name: str) -> tuple[str, str | None]:
    """The repository and the revision of an id, None where it names none."""
    repository, _, revision = name.removeprefix(PREFIX).partition("@")
    return repository, revision or None


def local_folder(name: str, key: str, files: tuple[str, ...]) -> Path:
    """The folder of `name`: a path as it is, or where the `files` of an id of the hub are now. Raises ConfigError, which names
    `key`, for an id that cannot be had."""
    if not name.startswith(PREFIX):
        return Path(name).expanduser()
    try:
        return _downloaded(*split(name), files)
    except ImportError:
        raise ConfigError(
            f"{key}={name}: needs the package huggingface_hub; pip install 'fp8cfg[hf]'"
        ) from None
    except (OSError, ValueError) as e:
        raise ConfigError(f"{key}={name}: {_reason(e, name)}") from None


def tokenizer_path(name: str | None) -> str | None:
    """data.tokenizer as a path of this machine. Raises ConfigError as `local_folder`."""
    return (
        str(local_folder(name, "data.tokenizer", TOKENIZER))
        if name and name.startswith(PREFIX)
        else name
    )


def pinned(name: str, folder: Path) -> str:
    """An id of the hub with the commit that `folder` holds; a path as it is."""
    return f"{PREFIX}{split(name)[0]}@{folder.name}" if name.startswith(PREFIX) else name


@cache
def _downloaded(repository: str, revision: str | None, files: tuple[str, ...]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository, revision=revision, allow_patterns=list(files), ignore_patterns=list(_LEFT)
        )
    )


def _reason(error: Exception, name: str) -> str:
    """Why huggingface_hub did not give `name`, in one line."""
    from huggingface_hub import errors

    repository, revision = split(name)
    if isinstance(error, errors.HFValidationError) or "/" not in repository:
        return "is no id of the hub; write hf://OWNER/NAME"
    if isinstance(error, errors.GatedRepoError):
        return "is gated; ask for access on its page, and set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or none for this token (HF_TOKEN)"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repository} has no revision {revision}"
    why = str(error.__cause__ or error).partition("\n")[0]
    return f"could not be downloaded, and is not in the cache ({why})"
