"""Tokenizers: bytes, or a local tokenizer.json through the tokenizers library.

Special tokens and the chat template come from tokenizer_config.json and chat_template.jinja, as
`save_pretrained` of transformers writes them. This module downloads nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8cfg.data.files import DataError, require

EOS = 256
"""End token of the byte tokenizer, after the 256 byte values."""
BYTE_VOCAB = 272
"""Vocabulary of a model of bytes, a multiple of 16 for FP8 GEMMs."""
_WIDE = 65_500  # larger vocabularies use int32 ids (Megatron's `DType.optimal_dtype`)


class Encoded(NamedTuple):
    """A tokenized text.

    Attributes:
        ids: Token ids, int64 [n].
        spans: Characters of each token as [start, stop), int64 [n, 2].
    """

    ids: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: ids 0 to 255, and 256 as end token."""

    size: int = EOS + 1
    eos: int = EOS
    pad: int = EOS
    sha256: str | None = None
    chat_template: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, uint8 [n], without an end token."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def encode_spans(self, text: str) -> Encoded:
        """Returns the ids of a text and their characters."""
        # A character has up to four bytes, all with the same span.
        sizes = [len(character.encode("utf-8", "replace")) for character in text]
        positions = np.repeat(np.arange(len(text)), sizes)
        ids = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        return Encoded(ids.astype(np.int64), np.stack([positions, positions + 1], 1))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Invalid UTF-8 is replaced, end tokens are skipped."""
        return bytes(token for token in ids if token < EOS).decode("utf-8", "replace")


@dataclass(frozen=True)
class FileTokenizer:
    """Tokenizer from a tokenizer.json.

    Attributes:
        path: The file.
        backend_tokenizer: `tokenizers.Tokenizer`.
        size: Largest id plus 1.
        eos: Id of the end token.
        pad: Id for padding. The end token if the file has no padding token.
        sha256: Fingerprint of the tokenizer, its special tokens and its template.
        chat_template: Jinja template, None without one.
        variables: Special tokens by their names in templates, such as "bos_token".
    """

    path: Path
    backend_tokenizer: Any
    size: int
    eos: int
    pad: int
    sha256: str
    chat_template: str | None
    variables: Mapping[str, str]

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Returns the ids of each text, int64 [n], without special tokens around it."""
        decoded = [text.decode("utf-8", "replace") for text in texts]
        encodings = self.backend_tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode_spans(self, text: str) -> Encoded:
        """Returns the ids of a text and their characters, without special tokens around it."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=False)
        return Encoded(
            np.asarray(encoding.ids, dtype=np.int64),
            np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids. Special tokens are skipped."""
        # The padded rows of the output layer can be sampled too, and have no token.
        known_ids = [token for token in ids if token < self.size]
        return str(self.backend_tokenizer.decode(known_ids, skip_special_tokens=True))


Tokenizer = ByteTokenizer | FileTokenizer
BYTES = ByteTokenizer()


def load_tokenizer(path: str | None) -> Tokenizer:
    """Loads a tokenizer.

    Args:
        path: A tokenizer.json, or a folder with one. None for bytes.

    Raises:
        DataError: The file is missing or damaged, or has no end token. Or the tokenizers library
            is not installed.
    """
    if path is None:
        return BYTES
    source = Path(path)
    require(source)
    file = source / "tokenizer.json" if source.is_dir() else source
    require(file)
    text = _read_text(file)
    backend_tokenizer = _parse(file, text)
    config = _read_config(file.with_name("tokenizer_config.json"))
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _special_token(config, name) for name in names}
    template = _chat_template(file.parent, config)
    eos = _end_token_id(backend_tokenizer, file, tokens["eos_token"])
    pad = None
    if tokens["pad_token"]:
        pad = backend_tokenizer.token_to_id(tokens["pad_token"])
    if pad is None:
        pad = eos
    settings = json.dumps([tokens, template], sort_keys=True)
    return FileTokenizer(
        file,
        backend_tokenizer,
        # Not get_vocab_size(): ids can have gaps.
        max(backend_tokenizer.get_vocab().values(), default=-1) + 1,
        eos,
        pad,
        hashlib.sha256(f"{text}\n{settings}".encode()).hexdigest(),
        template,
        {name: token for name, token in tokens.items() if token},
    )


def refuse_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Checks that a model has a row for each token.

    Args:
        tokenizer: The tokenizer.
        vocab_size: Vocabulary of the model.

    Raises:
        DataError: The vocabulary is too small. The message suggests a multiple of 16, for FP8.
    """
    if tokenizer.size > vocab_size:
        tokens = "bytes and the end token"
        if isinstance(tokenizer, FileTokenizer):
            tokens = f"the {tokenizer.size} tokens of {tokenizer.path}"
        raise DataError(
            f"vocab_size={vocab_size} cannot hold {tokens}: use {padded_vocabulary(tokenizer)} or"
            " more"
        )


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """Returns the vocabulary of a tokenizer, rounded up to a multiple of 16 for FP8 GEMMs."""
    return -(-tokenizer.size // 16) * 16


def token_dtype(size: int) -> np.dtype:
    """Returns the dtype of ids below `size`, in memory and in token files."""
    return np.dtype("<u2" if size < _WIDE else "<i4")


def _parse(file: Path, text: str) -> Any:
    """Parses a tokenizer.json with the tokenizers library."""
    try:
        from tokenizers import Tokenizer as BackendTokenizer
    except ImportError:
        raise DataError(
            f"{file}: needs the package tokenizers; pip install 'fp8cfg[data]'"
        ) from None
    try:
        tokenizer = BackendTokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        details = " ".join(str(error).split())[:120]
        raise DataError(
            f"{file}: not a tokenizer.json of the tokenizers library ({details})"
        ) from None
    # The file may turn these on. They would cut documents or add padding to them.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_text(file: Path) -> str:
    """Reads a text file. Raises DataError."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or 'not UTF-8'})") from None
    except UnicodeDecodeError:
        raise DataError(f"{file}: cannot be read (not UTF-8)") from None


def _read_config(file: Path) -> Mapping[str, Any]:
    """Reads tokenizer_config.json. Empty if it does not exist."""
    if not file.exists():
        return {}
    try:
        config = json.loads(_read_text(file))
    except (ValueError, RecursionError):
        raise DataError(f"{file}: not JSON") from None
    if not isinstance(config, dict):
        raise DataError(f"{file}: not a JSON object")
    return config


def _special_token(config: Mapping[str, Any], name: str) -> str | None:
    """Returns a special token, None without one."""
    token = config.get(name)
    # Older versions of transformers write an object with the text in `content`.
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or not token:
        return None
    return token


def _end_token_id(tokenizer: Any, file: Path, token: str | None) -> int:
    """Returns the id of the end token. Raises DataError if it is missing."""
    if token:
        token_id = tokenizer.token_to_id(token)
        if token_id is not None:
            return int(token_id)
    added_tokens = tokenizer.get_added_tokens_decoder().values()
    special = sorted(added.content for added in added_tokens if added.special)
    candidates = "it has no special token"
    if special:
        candidates = f"its special tokens are {' '.join(special[:8])}"
    if token:
        raise DataError(
            f"{file}: does not have the eos_token {token!r} of tokenizer_config.json; {candidates}"
        )
    config = file.parent / "tokenizer_config.json"
    raise DataError(
        f'{file}: no end token is set; write {{"eos_token": "..."}} into {config}; {candidates}'
    )


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Returns the chat template, None without one."""
    # Newer versions of transformers write a file, older ones an entry of tokenizer_config.json.
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    template = config.get("chat_template")
    # Several templates are a list of named ones.
    if isinstance(template, list):
        named = template
        template = None
        for entry in named:
            if isinstance(entry, dict) and entry.get("name") == "default":
                template = entry.get("template")
                break
    if not isinstance(template, str):
        return None
    return template
