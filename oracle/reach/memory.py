"""Where tensors lie: per tensor, whether its address and strides keep what vector loads want."""

from collections.abc import Iterable

from oracle.case import Case
from oracle.layout import DENSE, TensorSpec, placed

ALIGNMENT = 16
"""Bytes of the widest load."""


def base(name: str) -> str:
    """A tensor's name without its layer."""
    return name.partition(".")[0]


def names(specs: Iterable[TensorSpec]) -> list[str]:
    """Every class of address and strides that these tensors may be in."""
    return list(dict.fromkeys(name for spec in specs for name in _classes(spec)))


def _classes(spec: TensorSpec) -> list[str]:
    """The classes that a tensor's contract leaves open: any address, and strides as far as they are free."""
    found = [_address(spec.name)]
    if spec.strided != "dense":
        found.append(_leading(spec.name))
    if spec.strided in ("inner", "any") and len(spec.shape) > 1:
        found.append(_inner(spec.name))
    return found


def _address(name: str) -> str:
    return f"{base(name)}: address off {ALIGNMENT} bytes"


def _leading(name: str) -> str:
    return f"{base(name)}: leading stride off {ALIGNMENT} bytes"


def _inner(name: str) -> str:
    return f"{base(name)}: not dense inside"


def places(case: Case) -> set[str]:
    """The classes that the case's tensors are in, because it moved them there.

    A dense tensor whose rows happen to be odd is in none: dimensions have buckets of their own.
    """
    specs, found = case.call.tensors(), set()
    paged = {name for page in case.pages for name in page.members}
    moved = case.layouts.keys() | paged
    for name, spot in placed(specs, case.layouts, case.pages).items() if moved else ():
        spec, layout = specs[name], case.layouts.get(name, DENSE)
        if name not in moved or 0 in spec.shape:
            continue
        if spot.start % ALIGNMENT:
            found.add(_address(name))
        if (any(layout.gaps[:1]) or name in paged) and spot.strides[0] * spec.itemsize % ALIGNMENT:
            found.add(_leading(name))
        if any(layout.gaps[1:]) or layout.order not in ((), tuple(range(len(spec.shape)))):
            found.add(_inner(name))
    return found
