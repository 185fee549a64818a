"""Training data: corpora, token files, sample order and batches.

The package uses NumPy. Only the last step of a batch needs torch.
"""

from __future__ import annotations

from fp8cfg.data.batches import Batches, eval_batches
from fp8cfg.data.corpus import SOURCES, Corpus, load_corpus, split
from fp8cfg.data.files import DataError
from fp8cfg.data.samples import IGNORED, Samples, Windows
from fp8cfg.data.tokenizer import BYTE_VOCAB, EOS

__all__ = [
    "BYTE_VOCAB",
    "EOS",
    "IGNORED",
    "SOURCES",
    "Batches",
    "Corpus",
    "DataError",
    "Samples",
    "Windows",
    "eval_batches",
    "load_corpus",
    "split",
]
