"""Tables of a Hopper GPU's approximate functions, and how the hardware reads them.

Measured on an H200 (sm_90): for all 2^32 inputs of ex2.approx.ftz, rsqrt.approx, rcp.approx.ftz,
div.approx.ftz(1, x) and div.full(1, x), and 2^32 random pairs of both divisions, the reading
rules below give the hardware's bits. Whether other architectures hold the same tables is unknown.

* ``ex2`` [2^23]: the fraction bits of 2^f, f = i / 2^23. The argument is fixed point with 23 fraction bits,
  truncated; a negative one is the ones' complement of its magnitude, unless the fraction is zero
  (then the negation). A result below 2^-126 becomes +0.
* ``rsq`` [2^24]: bits of 1/sqrt(m) for m in [1, 2), then for m in [2, 4): the index is the parity of
  the exponent before the 23 fraction bits. rsqrt.approx scales a subnormal by 2^24 and its result by 2^12.
* ``rcp`` [2^23]: bits of 1/m for m in [1, 2); sign and exponent are exact. Subnormal arguments
  count as zero, a result below 2^-126 becomes zero. div.approx.ftz(a, b) is a * rcp(b) with operands
  and result flushed; div.full(a, b) is (a * k) * rcp(b * k), k = 1/4 above 2^126, 2^24 for a subnormal b.

The file is xz over, per table: ``_HEADER``, then the differences of neighbouring entries as int8,
then the differences that no int8 holds as ``_EXCEPTION`` records.
"""

import lzma
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

FILE = Path(__file__).with_name("mufu_tables.xz")
_HEADER = np.dtype([("name", "S4"), ("entries", "<u4"), ("first", "<u4"), ("exceptions", "<u4")])
_EXCEPTION = np.dtype([("index", "<u4"), ("difference", "<i4")])


class Tables(NamedTuple):
    """The three tables, read-only u4 arrays of fp32 bits (``ex2``: of their fractions)."""

    ex2: np.ndarray
    rsq: np.ndarray
    rcp: np.ndarray


@cache
def tables() -> Tables:
    """The tables, read on the first call (about half a second)."""
    raw, at, found = lzma.decompress(FILE.read_bytes()), 0, {}
    while at < len(raw):
        header = np.frombuffer(raw, _HEADER, 1, at)[0]
        steps = int(header["entries"]) - 1
        at += _HEADER.itemsize
        values = np.empty(steps + 1, np.int32)
        values[0] = header["first"]
        values[1:] = np.frombuffer(raw, np.int8, steps, at)
        exceptions = np.frombuffer(raw, _EXCEPTION, int(header["exceptions"]), at + steps)
        values[1 + exceptions["index"].astype(np.int64)] = exceptions["difference"]
        at += steps + exceptions.nbytes
        table = np.cumsum(values, dtype=np.int32).view(np.uint32)
        table.setflags(write=False)
        found[bytes(header["name"]).decode()] = table
    return Tables(found["ex2"], found["rsq"], found["rcp"])


def encode(name: str, table: np.ndarray) -> bytes:
    """A table (u4, neighbours less than 2^31 apart) in the form that the file holds, before xz."""
    steps = np.diff(table.astype(np.int64))
    at = np.nonzero((steps < -128) | (steps > 127))[0]
    header = np.array((name.encode(), len(table), table[0], len(at)), _HEADER)
    exceptions = np.zeros(len(at), _EXCEPTION)
    exceptions["index"], exceptions["difference"] = at, steps[at]
    small = steps.copy()
    small[at] = 0
    return header.tobytes() + small.astype(np.int8).tobytes() + exceptions.tobytes()
