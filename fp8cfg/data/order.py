"""Sample order (shuffling) as a pure function of seed, epoch and index.

Nothing is shuffled and nothing is stored: sample i of an epoch is a keyed permutation of i. A run then resumes from one
integer, and the order cannot depend on how many workers or ranks read it.

The permutation is a balanced Feistel network (Luby and Rackoff, 1988) over the smallest even number of bits that holds
the range, brought down to the range by cycle-walking: apply it again until the value falls inside (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", 2002, method 2). Levanter orders its data by the same idea (`data/_prp.py`).
"""

from __future__ import annotations

import hashlib

import numpy as np

from fp8cfg.data.errors import DataError

# Four rounds make a strong permutation of a large domain; the small ones of short corpora need more to mix.
_ROUNDS = 8
_MOST = 1 << 62


def permute(index: np.ndarray | int, n: int, seed: int, epoch: int) -> np.ndarray:
    """The image of `index` under the permutation of range(n) that `seed` and `epoch` select.

    index: integers in [0, n), any shape. Returns int64 of that shape. The values are equal on every platform.
    """
    values = np.asarray(index, dtype=np.int64)
    if not 0 < n <= _MOST:
        raise DataError(f"n={n}: can order between 1 and 2**62 samples")
    if values.size and (values.min() < 0 or values.max() >= n):
        raise DataError(
            f"sample index {int(values.min())}..{int(values.max())} is outside of range({n})"
        )
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    keys = _keys(seed, epoch)
    out = _feistel(values.reshape(-1).astype(np.uint64), keys, half)
    # The domain is at most four times the range, so a value is expected back within four steps; it comes back at the
    # latest when its cycle closes, because it started inside.
    while (outside := out >= np.uint64(n)).any():
        out[outside] = _feistel(out[outside], keys, half)
    return out.astype(np.int64).reshape(values.shape)


def offset(n: int, seed: int, epoch: int) -> int:
    """The offset in [0, n), selected by `seed` and `epoch`, at which an epoch begins to cut the corpus into windows."""
    return int.from_bytes(_digest("offset", seed, epoch), "little") % n


def _feistel(values: np.ndarray, keys: np.ndarray, half: np.uint64) -> np.ndarray:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    joined: np.ndarray = (left << half) | right
    return joined


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele, Lea and Flood, 2014); array arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def _keys(seed: int, epoch: int) -> np.ndarray:
    return np.frombuffer(_digest("order", seed, epoch), dtype="<u8")[:_ROUNDS].astype(np.uint64)


def _digest(purpose: str, seed: int, epoch: int) -> bytes:
    return hashlib.blake2b(
        f"{purpose} {int(seed)} {int(epoch)}".encode(), digest_size=8 * _ROUNDS
    ).digest()
