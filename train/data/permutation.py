"""A pseudo-random permutation of 0 .. size - 1, any value of which is computed alone.

The cipher is Simon (https://eprint.iacr.org/2013/404) with four rounds, whose keys
C++'s std::seed_seq makes from the seed. A value beyond the range is encrypted again
until it falls within (cycle walking). grain's `shuffle` is the same function, except
that it is no permutation of 4**k + 1 values for k of 8 or more.
"""

import functools

_NUM_ROUNDS = 4
_MIN_WORD_BITS = 8
_MASK32 = 2**32 - 1


def permute(index: int, size: int, seed: int) -> int:
    """Return the value at `index` of the permutation of 0 .. size - 1 of a seed."""
    assert 0 <= index < size, (index, size)
    if size == 1:
        return 0
    keys = _round_keys(seed)
    word_bits = max(_MIN_WORD_BITS, ((size - 1).bit_length() + 1) // 2)
    index = _encrypt(index, word_bits, keys)
    while index >= size:
        index = _encrypt(index, word_bits, keys)
    return index


def _encrypt(value: int, word_bits: int, keys: tuple[int, ...]) -> int:
    """Permute the numbers of 2 * word_bits bits by a Feistel network."""
    mask = 2**word_bits - 1

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> (word_bits - by)) & mask

    left, right = value >> word_bits, value & mask
    for key in keys:
        mixed = (rotate(right, 1) & rotate(right, 8)) ^ rotate(right, 2)
        left, right = right, left ^ mixed ^ (key & mask)
    return left << word_bits | right


@functools.lru_cache
def _round_keys(seed: int) -> tuple[int, ...]:
    """Return the numbers that std::seed_seq{seed} generates (C++, [rand.util.seedseq],
    for four numbers: s = 1, p = 1, q = 2)."""
    num = _NUM_ROUNDS
    word_k = [0x8B8B8B8B] * num
    for k in range(num):
        after, second = (k + 1) % num, (k + 2) % num
        mixed = word_k[k] ^ word_k[after] ^ word_k[k - 1]
        r1 = 1664525 * (mixed ^ mixed >> 27) & _MASK32
        r2 = r1 + (1 if k == 0 else k + seed if k == 1 else k) & _MASK32
        word_k[after] = word_k[after] + r1 & _MASK32
        word_k[second] = word_k[second] + r2 & _MASK32
        word_k[k] = r2
    for k in range(num):
        after, second = (k + 1) % num, (k + 2) % num
        mixed = word_k[k] + word_k[after] + word_k[k - 1] & _MASK32
        r3 = 1566083941 * (mixed ^ mixed >> 27) & _MASK32
        r4 = r3 - k & _MASK32
        word_k[after] ^= r3
        word_k[second] ^= r4
        word_k[k] = r4
    return tuple(word_k)
