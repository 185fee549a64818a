"""Tokenizer: text to token ids and back; of bytes, or of a local tokenizer.json, which the tokenizers library reads.

The ids of begin, end and padding, and the chat template, stand in tokenizer_config.json and chat_template.jinja, where
transformers' `save_pretrained` writes them. Nothing is fetched: a folder or a file on this machine is what is read.
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
"""The end of a document, after the 256 byte values."""
BYTE_VOCAB = 272
"""Rows of an embedding of bytes: FP8 products want a multiple of 16."""
_WIDE = 65_500  # from this vocabulary on token ids are int32 (Megatron's `DType.optimal_dtype`)


class Encoded(NamedTuple):
    """Token ids of one text, and for each the characters that it stands for, [start, stop) int64 [n, 2]."""

    ids: np.ndarray
    spans: np.ndarray


@dataclass(frozen=True)
class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 at the end of a document."""

    size: int = EOS + 1
    eos: int = EOS
    pad: int = EOS
    sha256: str | None = None
    chat_template: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, without an end token."""
        return [np.frombuffer(text, dtype=np.uint8) for text in texts]

    def encode_spans(self, text: str) -> Encoded:
        """The ids of one text with the characters that they stand for."""
        sizes = [len(c.encode("utf-8", "replace")) for c in text]
        at = np.repeat(np.arange(len(text)), sizes)
        return Encoded(
            np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64),
            np.stack([at, at + 1], 1),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; what is no UTF-8 is replaced, what is no byte is left out."""
        return bytes(i for i in ids if i < EOS).decode("utf-8", "replace")


@dataclass(frozen=True)
class FileTokenizer:
    """The tokenizer of a tokenizer.json. `variables` are the special tokens by the names that chat templates have for them."""

    path: Path
    backend_tokenizer: Any
    size: int
    eos: int
    pad: int
    sha256: str
    chat_template: str | None
    variables: Mapping[str, str]

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, without special tokens around it."""
        decoded = [text.decode("utf-8", "replace") for text in texts]
        found = self.backend_tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in found]

    def encode_spans(self, text: str) -> Encoded:
        """The ids of one text, as it stands, with the characters that they stand for."""
        found = self.backend_tokenizer.encode(text, add_special_tokens=False)
        return Encoded(
            np.asarray(found.ids, dtype=np.int64),
            np.asarray(found.offsets, dtype=np.int64).reshape(-1, 2),
        )

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out; ids beyond the vocabulary, which only padding rows have, too."""
        return str(
            self.backend_tokenizer.decode(
                [i for i in ids if i < self.size], skip_special_tokens=True
            )
        )


Tokenizer = ByteTokenizer | FileTokenizer
BYTES = ByteTokenizer()


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of `path`, a tokenizer.json or a folder with one; that of bytes for None.

    DataError for what is not there or cannot be read, without an end token, and where the tokenizers library is not installed.
    """
    if path is None:
        return BYTES
    given = Path(path)
    require(given)
    file = given / "tokenizer.json" if given.is_dir() else given
    require(file)
    text = _text(file)
    library = _library(file, text)
    config = _config(file.with_name("tokenizer_config.json"))
    tokens = {
        name: _special(config, name)
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
    }
    template = _template(file.parent, config)
    eos = _id(library, file, tokens["eos_token"])
    pad = library.token_to_id(tokens["pad_token"]) if tokens["pad_token"] else None
    said = json.dumps([tokens, template], sort_keys=True)
    return FileTokenizer(
        file,
        library,
        max(library.get_vocab().values(), default=-1) + 1,
        eos,
        eos if pad is None else pad,
        hashlib.sha256(f"{text}\n{said}".encode()).hexdigest(),
        template,
        {k: v for k, v in tokens.items() if v},
    )


def refuse_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise DataError where a model of `vocab_size` has no row for a token; the number to write is a multiple of 16, for FP8."""
    if tokenizer.size > vocab_size:
        what = "bytes and the end token"
        if isinstance(tokenizer, FileTokenizer):
            what = f"the {tokenizer.size} tokens of {tokenizer.path}"
        raise DataError(
            f"vocab_size={vocab_size} cannot hold {what}: use {padded_vocabulary(tokenizer)} or"
            " more"
        )


def padded_vocabulary(tokenizer: Tokenizer) -> int:
    """The least multiple of 16 that holds every token."""
    return -(-tokenizer.size // 16) * 16


def token_dtype(size: int) -> np.dtype:
    """The type of ids below `size`, in memory and in Megatron's files."""
    return np.dtype("<u2" if size < _WIDE else "<i4")


def _library(file: Path, text: str) -> Any:
    try:
        from tokenizers import Tokenizer as Library
    except ImportError:
        raise DataError(
            f"{file}: needs the package tokenizers; pip install 'fp8cfg[data]'"
        ) from None
    try:
        library = Library.from_str(text)
    except Exception as e:  # the library raises Exception itself
        raise DataError(
            f"{file}: no tokenizer.json that tokenizers reads ({' '.join(str(e).split())[:120]})"
        ) from None
    library.no_truncation()
    library.no_padding()
    return library


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise DataError(
            f"{file}: cannot be read ({getattr(e, 'strerror', None) or 'not UTF-8'})"
        ) from None


def _config(file: Path) -> Mapping[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(_text(file))
    except (ValueError, RecursionError):
        raise DataError(f"{file}: not JSON") from None
    if not isinstance(config, dict):
        raise DataError(f"{file}: not a JSON object")
    return config


def _special(config: Mapping[str, Any], name: str) -> str | None:
    """A special token, which older files write as an object with its text in `content`."""
    token = config.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) and token else None


def _id(library: Any, file: Path, token: str | None) -> int:
    """The id of the end token."""
    found = library.token_to_id(token) if token else None
    if found is not None:
        return int(found)
    special = sorted(t.content for t in library.get_added_tokens_decoder().values() if t.special)
    there = (
        f"its special tokens are {' '.join(special[:8])}" if special else "it has no special token"
    )
    if token:
        raise DataError(
            f"{file}: does not have the eos_token {token!r} of tokenizer_config.json; {there}"
        )
    beside = file.parent / "tokenizer_config.json"
    raise DataError(
        f'{file}: no end token is said; write {{"eos_token": "..."}} into {beside}; {there}'
    )


def _template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: chat_template.jinja, or the one of tokenizer_config.json, of several the one called default."""
    if (file := folder / "chat_template.jinja").is_file():
        return _text(file)
    said = config.get("chat_template")
    if isinstance(said, list):
        said = next(
            (t.get("template") for t in said if isinstance(t, dict) and t.get("name") == "default"),
            None,
        )
    return said if isinstance(said, str) else None
