"""Corpus: one long array of token ids, with an end token after each document.

By default tokens are bytes. This needs no download and is equal on all machines. The vocabulary
has 256 byte values and an end token, padded to a multiple of 16: FP8 GEMMs need dimensions of the
output layer that are divisible by 16.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fp8cfg.data.files import DataError, require
from fp8cfg.data.indexed import prefix_of, read_indexed, required_prefix, write_indexed
from fp8cfg.data.sources import (
    SUFFIXES,
    TABLES,
    Documents,
    kind_of,
    refuse_too_much,
    stdlib_documents,
    table_documents,
    table_files,
    text_documents,
    text_files,
    tiny_documents,
)
from fp8cfg.data.token_file import Tokens
from fp8cfg.data.tokenizer import (
    BYTES,
    Tokenizer,
    padded_vocabulary,
    refuse_vocabulary,
    token_dtype,
)

_BLOCK = 32_768  # tokens
_BLOCKS = 1_024
_AT_ONCE = 1_000  # documents per call of the tokenizer, which uses all cores
_BYTES_AT_ONCE = 1 << 22
_MIN_SEQ_LENGTH = 2
"""Minimum of model.seq_length."""
_MAX_FRACTION = 0.5
"""Upper bound of data.validation_fraction (exclusive)."""
_LARGE_FRACTION = 0.4
"""Value of data.validation_fraction that errors suggest for a short text."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Token ids of a data source.

    Attributes:
        name: Name of the source.
        tokens: Token ids, a read-only integer array [n] or a file.
        vocab_size: Upper bound of the ids. Ids in files are checked as they are read.
        sha256: `fingerprint(tokens)`.
        description: Text for the header of a run.
        documents: First token of each document, int64 [d]. None if unknown.
        eos: End token of documents. None if unknown.
    """

    name: str
    tokens: Tokens
    vocab_size: int
    sha256: str
    description: str
    documents: np.ndarray | None = None
    eos: int | None = None


def encode_documents(documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    """Yields the token ids of each document with its end token.

    Args:
        documents: Texts in UTF-8. They are read as needed.
        tokenizer: The tokenizer.

    Yields:
        Token ids [n] of one document, uint16 or int32 depending on the vocabulary.
    """
    dtype = token_dtype(tokenizer.size)
    for group in _group_documents(documents):
        for ids in tokenizer.encode(group):
            tokens = np.empty(len(ids) + 1, dtype=dtype)
            tokens[:-1] = ids
            tokens[-1] = tokenizer.eos
            yield tokens


def _group_documents(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Yields groups of documents that are large enough to use all cores in the tokenizer.

    If a document cannot be read, the documents before it are yielded before the DataError.
    """
    group: list[bytes] = []
    size = 0
    iterator = iter(documents)
    error = None
    while error is None:
        try:
            document = next(iterator)
        except StopIteration:
            break
        except DataError as read_error:
            error = read_error
            break
        group.append(document)
        size += len(document)
        if len(group) == _AT_ONCE or size >= _BYTES_AT_ONCE:
            yield group
            group, size = [], 0
    if group:
        yield group
    if error is not None:
        raise error


def from_documents(
    name: str, documents: Iterable[bytes], description: str, tokenizer: Tokenizer = BYTES
) -> Corpus:
    """Tokenizes all documents into a corpus in memory.

    Args:
        name: Name of the source.
        documents: Texts in UTF-8.
        description: Text for the header of a run.
        tokenizer: The tokenizer.

    Raises:
        DataError: All documents are empty, or one cannot be read.
    """
    pieces = list(encode_documents(documents, tokenizer))
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)
    # An empty document still has its end token.
    if lengths.sum() == len(pieces):
        raise _empty(description or name)
    tokens = np.concatenate(pieces)
    tokens.flags.writeable = False
    starts = np.cumsum(lengths) - lengths
    return Corpus(
        name,
        tokens,
        padded_vocabulary(tokenizer),
        fingerprint(tokens),
        description,
        starts,
        tokenizer.eos,
    )


def fingerprint(tokens: Tokens) -> str:
    """Returns a SHA-256 of dtype, length and values, in hexadecimal.

    Above 33.5 million tokens only 1024 evenly spread blocks of 32768 are read. So a file of a
    terabyte opens quickly, but a small edit in it may go unnoticed.

    Args:
        tokens: Token ids [n].
    """
    if len(tokens) <= _BLOCK * _BLOCKS:
        starts = np.arange(0, len(tokens), _BLOCK)
    else:
        starts = np.arange(_BLOCKS) * (len(tokens) - _BLOCK) // (_BLOCKS - 1)
    # Little-endian on all machines, so that checkpoints can move between them.
    portable = tokens.dtype.newbyteorder("<")
    digest = hashlib.sha256(f"{tokens.dtype.name} {len(tokens)}\n".encode())
    for start in starts.tolist():
        digest.update(tokens[start : start + _BLOCK].astype(portable, copy=False).tobytes())
    return digest.hexdigest()


def split(corpus: Corpus, validation_fraction: float, seq_length: int) -> tuple[Corpus, Corpus]:
    """Splits a corpus into training data and validation data at its end.

    The cut moves to the nearest start of a document, unless this makes the validation part less
    than half or more than twice as long as asked for. Then the document is cut.

    Args:
        corpus: The corpus.
        validation_fraction: Share of tokens to validate on, between 0 and 1.
        seq_length: Tokens per sample.

    Returns:
        The training part and the validation part.

    Raises:
        DataError: A part has less than one window of seq_length + 1 tokens. The message suggests a
            value.
    """
    length = len(corpus.tokens)
    window = seq_length + 1
    if not 0 < validation_fraction < 1:
        raise DataError(
            f"validation_fraction={validation_fraction} must lie between 0 and 1, for example 0.05"
        )
    held_out = round(length * validation_fraction)
    # Rounded up to six digits, so that the suggested value has at least one window.
    min_fraction = math.ceil(window / length * 1e6) / 1e6
    if length < 2 * window or (held_out < window and min_fraction >= _MAX_FRACTION):
        raise DataError(
            f"corpus {corpus.name!r} has {length} tokens, too few to train and validate on windows"
            f" of {window}: use more text{_suggest_seq_length(length, validation_fraction)}"
        )
    if held_out < window:
        raise DataError(
            f"the validation part has {held_out} tokens, less than one window of seq_length + 1 ="
            f" {window}: use data.validation_fraction={min_fraction:g} or more"
        )
    if length - held_out < window:
        max_fraction = math.floor((length - window) / length * 1e6) / 1e6
        raise DataError(
            f"the training part has {length - held_out} tokens, less than one window of"
            f" seq_length + 1 = {window}: use data.validation_fraction={max_fraction:g} or less"
        )
    cut = _find_cut(corpus.documents, length, held_out, window)
    return _part(corpus, "training", 0, cut), _part(corpus, "validation", cut, length)


def _find_cut(documents: np.ndarray | None, length: int, held_out: int, window: int) -> int:
    """Returns where to cut: at the start of a document, or exactly `held_out` from the end."""
    cut = length - held_out
    if documents is None or len(documents) == 0:
        return cut
    # The last document before the cut and the first one after it.
    index = int(np.searchsorted(documents, cut))
    candidates = []
    for start in documents[max(0, index - 1) : index + 1].tolist():
        has_about_its_size = held_out / 2 <= length - start <= held_out * 2
        if has_about_its_size and window <= start <= length - window:
            candidates.append(start)
    return min(candidates, key=lambda start: abs(start - cut), default=cut)


def _suggest_seq_length(length: int, validation_fraction: float) -> str:
    """Returns advice on a model.seq_length for which `length` tokens suffice. "" if none does."""
    held_out = round(length * validation_fraction)
    max_seq_length = min(held_out, length - held_out) - 1
    if max_seq_length >= _MIN_SEQ_LENGTH:
        return f" or model.seq_length={max_seq_length} or less"
    max_seq_length = round(length * _LARGE_FRACTION) - 1
    if max_seq_length < _MIN_SEQ_LENGTH:
        return ""
    return (
        f", or model.seq_length={max_seq_length} or less with"
        f" data.validation_fraction={_LARGE_FRACTION}"
    )


def _part(corpus: Corpus, part: str, start: int, stop: int) -> Corpus:
    """Returns the tokens `start` to `stop` as a corpus."""
    tokens = corpus.tokens[start:stop]
    documents = None
    # In later parts document 0 would not be the first document of the files.
    if corpus.documents is not None and start == 0:
        documents = corpus.documents[corpus.documents < stop]
    description = f"{corpus.description}; {part} part, tokens {start} to {stop}"
    return replace(
        corpus,
        tokens=tokens,
        sha256=fingerprint(tokens),
        description=description,
        documents=documents,
    )


SOURCES = ("stdlib", "tiny", "text", *TABLES, "tokens", "chat")
WITH_PATH = {
    "text": "a text file or a folder of them",
    **TABLES,
    "tokens": "the common name of a Megatron .bin/.idx pair",
    "chat": "a .jsonl file of conversations",
}
"""Sources that need data.path, and the meaning of the path."""


def documents(
    name: str, path: str | os.PathLike[str] | None = None, text_key: str = "text"
) -> Documents:
    """Opens the texts of a source.

    Args:
        name: Name of the source. Not "tokens" (no text) and not "chat" (conversations).
        path: File, folder or pattern. Only for sources in WITH_PATH.
        text_key: Column of the text in tables.

    Raises:
        DataError: The name is unknown, or the path is missing, does not exist or has no effect.
    """
    if name not in SOURCES:
        raise _unknown(name)
    if name in WITH_PATH and path is None:
        raise DataError(f"data source {name!r} needs a path: {WITH_PATH[name]}")
    # Reject a path without effect: the user probably wanted data=text.
    if name not in WITH_PATH and path is not None:
        raise DataError(
            f"data source {name!r} takes no path, and {os.fspath(path)!r} would be ignored: use"
            " 'text'"
        )
    if name in TABLES and path is not None:
        return table_documents(name, os.fspath(path), text_key)
    if name == "text" and path is not None:
        return text_documents(path)
    if name in WITH_PATH:
        readable = ["text", *TABLES]
        raise DataError(
            f"data source {name!r} has no documents of text; use {', '.join(readable[:-1])} or"
            f" {readable[-1]}"
        )
    if name == "stdlib":
        return stdlib_documents()
    return tiny_documents()


def source_files(name: str, path: str) -> list[Path]:
    """Returns the files of a source, without reading them. For a saved dataset, its folder.

    Args:
        name: Name of the source.
        path: File, folder, pattern, or prefix of token files.

    Raises:
        DataError: A file is missing.
    """
    if name == "chat":
        name = kind_of(path)
    if name == "text":
        return text_files(Path(path))[0]
    if name in SUFFIXES:
        return table_files(name, path)[0]
    if name == "tokens":
        return [Path(f"{required_prefix(path)}.bin")]
    require(Path(path))
    return [Path(path)]


def load_corpus(
    name: str,
    path: str | os.PathLike[str] | None = None,
    vocab_size: int | None = None,
    text_key: str = "text",
    tokenizer: Tokenizer = BYTES,
) -> Corpus:
    """Loads a corpus. Texts are tokenized into memory, token files are read as needed.

    Args:
        name: Name of the source. "stdlib" and "tiny" have no path.
        path: File, folder, pattern, or prefix of token files.
        vocab_size: Vocabulary of the model. Defaults to the tokenizer's. Required for "tokens".
        text_key: Column of the text in tables.
        tokenizer: The tokenizer. For "tokens", it tells the end token.

    Raises:
        DataError: The vocabulary is too small, or the text too large for memory. Or see
            `documents`.
    """
    if name == "tokens" and path is not None:
        return _token_corpus(path, vocab_size, tokenizer)
    source = documents(name, path, text_key)
    if vocab_size is not None:
        refuse_vocabulary(tokenizer, vocab_size)
    refuse_too_much(source, path)
    texts = _CountedTexts(source.texts)
    corpus = from_documents(source.name, texts, source.what, tokenizer)
    description = f"{source.what}, {texts.num_documents} documents{source.remark}"
    return replace(corpus, description=description, vocab_size=vocab_size or corpus.vocab_size)


class _CountedTexts:
    """Iterator over texts that counts documents."""

    def __init__(self, texts: Iterator[bytes]) -> None:
        self.texts = texts
        self.num_documents = 0

    def __iter__(self) -> Iterator[bytes]:
        for text in self.texts:
            self.num_documents += 1
            yield text


def _empty(source: str) -> DataError:
    """Returns the error for a source without text."""
    return DataError(f"{source}: empty, there is no text in it")


def _unknown(name: str) -> DataError:
    """Returns the error for an unknown source, with the nearest name."""
    close = difflib.get_close_matches(str(name), SOURCES, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return DataError(f"unknown data source {name!r}: {hint}known are {', '.join(SOURCES)}")


def _token_corpus(
    path: str | os.PathLike[str], vocab_size: int | None, tokenizer: Tokenizer
) -> Corpus:
    """Opens token files as a corpus."""
    if vocab_size is None:
        raise DataError("data source 'tokens' needs vocab_size: token files do not record it")
    if tokenizer is not BYTES:
        refuse_vocabulary(tokenizer, vocab_size)
    indexed = read_indexed(path)
    tokens = indexed.stream()
    if len(tokens) == 0:
        raise DataError(f"{indexed.path}.idx: all sequences are empty")
    # The index lists sequences, and documents as ranges of sequences. An empty document at the end
    # starts after the last sequence.
    firsts = indexed.documents[:-1]
    starts = indexed.starts[firsts[firsts < len(indexed.starts)]] - indexed.starts[0]
    description = (
        f"{indexed.path}.bin, {len(firsts)} documents, {len(tokens)} {tokens.dtype.name} tokens"
    )
    eos = None if tokenizer is BYTES else tokenizer.eos
    return Corpus("tokens", tokens, vocab_size, fingerprint(tokens), description, starts, eos)


@dataclass
class Prepared:
    """Result of `prepare`.

    Attributes:
        path: Prefix of the two files.
        tokens: Number of tokens, end tokens included.
        documents: Number of documents.
    """

    path: Path
    tokens: int = 0
    documents: int = 0


def prepare(
    out: str | os.PathLike[str], name: str, path: str | None, text_key: str, tokenizer: Tokenizer
) -> Prepared:
    """Tokenizes a source into token files, for `fp8cfg data prepare`.

    A run on the source has equal tokens, and so equal losses. Documents are streamed. The files get
    their names when both are complete.

    Args:
        out: Prefix of the files. ".bin" and ".idx" are added.
        name: Name of the source.
        path: File, folder or pattern of the source.
        text_key: Column of the text in tables.
        tokenizer: The tokenizer.

    Raises:
        DataError: A file exists already, the source cannot be read, or it has no text.
        OSError: The files cannot be written.
    """
    result = Prepared(prefix_of(out))
    for ending in (".idx", ".bin"):
        if os.path.lexists(f"{result.path}{ending}"):
            raise DataError(f"{result.path}{ending}: exists already; name another, or remove it")
    source = documents(name, path, text_key)
    result.path.parent.mkdir(parents=True, exist_ok=True)

    def count_documents() -> Iterator[np.ndarray]:
        """Yields the documents and counts them in `result`."""
        for tokens in encode_documents(source.texts, tokenizer):
            result.tokens += len(tokens)
            result.documents += 1
            yield tokens
        if result.tokens == result.documents:  # only end tokens
            raise _empty(source.what)

    write_indexed(result.path, count_documents(), tokenizer.size)
    return result
