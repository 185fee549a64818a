"""Training data: corpora, token files, sample order and batches. NumPy only; torch in the last step."""

from __future__ import annotations

from fp8cfg.data.batches import Batches, eval_batches
from fp8cfg.data.corpora import SOURCES, load_corpus
from fp8cfg.data.corpus import BYTE_VOCAB, EOS, Corpus, split
from fp8cfg.data.errors import DataError

__all__ = ["BYTE_VOCAB", "EOS", "SOURCES", "Batches", "Corpus", "DataError", "eval_batches", "load_corpus", "split"]
