"""Splitmix64, the generator from which schedules and perturbations are drawn."""

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND, _ALL = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xFFFF_FFFF_FFFF_FFFF


class Generator:
    """A stream of 64-bit numbers that its seed determines."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _ALL

    def next(self) -> int:
        """The next 64 bits."""
        self._state = (self._state + GOLDEN) & _ALL
        z = self._state
        z = (z ^ z >> 30) * _FIRST & _ALL
        z = (z ^ z >> 27) * _SECOND & _ALL
        return z ^ z >> 31

    def below(self, limit: int) -> int:
        """A number in [0, limit), limit below 2^32."""
        return (self.next() >> 32) * limit >> 32


def finalise(z: np.ndarray) -> np.ndarray:
    """The generator's output function on an array of u8 states."""
    z = (z ^ z >> np.uint64(30)) * np.uint64(_FIRST)
    z = (z ^ z >> np.uint64(27)) * np.uint64(_SECOND)
    z ^= z >> np.uint64(31)
    return z
