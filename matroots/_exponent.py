# SPDX-License-Identifier: Apache-2.0
"""The exponent p of ``A^{-1/p}``: what is accepted, and the cheapest way to raise a matrix to a power."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from numbers import Rational, Real

Exponent = Fraction | float
"""``Fraction`` whenever the caller's p is an integer or a rational; ``float`` for any other real."""

LARGEST = 2**20  # beyond it a root of any float is 1 to single precision
_LONGEST_SEARCHED = 256


def parse_exponent(p: object) -> Exponent:
    """Return p as a ``Fraction`` (integers, rationals, integer-valued floats) or a ``float``.

    Raises ``TypeError`` when p is no real number and ``ValueError`` when it is not in 1..2^20.
    """
    if isinstance(p, bool) or not isinstance(p, Real):
        raise TypeError(f"p: expected a real number >= 1, got {type(p).__name__}")
    if p < 1 or not p <= LARGEST:
        raise ValueError(f"p: expected a number from 1 to {LARGEST}, got {p}")
    if isinstance(p, Rational):
        return Fraction(int(p.numerator), int(p.denominator))
    value = float(p)
    return Fraction(int(value)) if value.is_integer() else value


def as_integer(p: Exponent) -> int | None:
    """Return p as an ``int`` where it is one, else ``None``."""
    return p.numerator if isinstance(p, Fraction) and p.denominator == 1 else None


@cache
def addition_chain(power: int) -> tuple[tuple[int, int], ...]:
    """Return a shortest way to build ``x^power`` from x by products of powers already at hand.

    Entry k is a pair (i, j): the k-th new power is the product of the powers numbered i and j, where
    number 0 is x itself. The chain is a shortest *star* chain (each link uses the newest power), which
    is a shortest chain for every exponent below 12,509; beyond 256 the binary method is used.

    >>> len(addition_chain(4)), len(addition_chain(15)), len(addition_chain(1))
    (2, 5, 0)
    """
    if power > _LONGEST_SEARCHED:
        return _binary_chain(power)
    length = max(power - 1, 0).bit_length()
    while (chain := _search((1,), power, length)) is None:
        length += 1
    return chain


def _search(powers: tuple[int, ...], power: int, links: int) -> tuple[tuple[int, int], ...] | None:
    """Depth-first search for a star chain from ``powers`` to ``power`` with at most ``links`` links."""
    newest = len(powers) - 1
    if powers[-1] == power:
        return ()
    if links == 0 or powers[-1] << links < power:
        return None
    for j in range(newest, -1, -1):
        candidate = powers[-1] + powers[j]
        if candidate <= power:
            rest = _search((*powers, candidate), power, links - 1)
            if rest is not None:
                return ((newest, j), *rest)
    return None


def _binary_chain(power: int) -> tuple[tuple[int, int], ...]:
    chain: list[tuple[int, int]] = []
    for bit in bin(power)[3:]:
        chain.append((len(chain), len(chain)))
        if bit == "1":
            chain.append((len(chain), 0))
    return tuple(chain)
