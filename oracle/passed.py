"""The arguments of one call, and what they tell of it: dimensions by their shapes, rows, slots."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from oracle.calls.base import NULL_SLOT, PAD_SLOT, numbering

Tensor = torch.Tensor
ALIASES = {
    "checkpoint_state": "state",
    "correction_cache": "correction",
    "kg_cache": "key_gate",
}
"""Names in a public signature of what a case calls otherwise."""


@dataclass
class Passed:
    """Tensors by the case's names and in its shapes, but pools as large as they are; and the rest.

    ``slots[n]`` is the slot that the call names ``n``: pools are numbered anew, null ones stay.
    """

    operation: str
    tensors: dict[str, Tensor]
    scalars: dict[str, Any]
    sizes: dict[str, int] = field(default_factory=dict)
    slots: list[int] = field(default_factory=lambda: [NULL_SLOT])

    def number(self, name: str, default: Any = None) -> Any:
        """A scalar argument."""
        value = self.scalars.get(name)
        return default if value is None else value

    def integer(self, name: str) -> int | None:
        """A scalar argument that is a count, if it is given."""
        value = self.scalars.get(name)
        if value is not None and type(value) is not int:
            raise ValueError(f"{name} must be an integer; found {value!r:.40}")
        return value

    def bound(self) -> float | None:
        """The gate's lower bound."""
        value = self.scalars.get("lower_bound")
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"lower_bound must be a number or None; found {value!r:.40}")
        return None if value is None else float(value)

    def size(self, letter: str, scalar: str = "", default: int | None = None) -> int:
        """A dimension, of a tensor or told by a scalar."""
        found = self.sizes.get(letter, self.number(scalar, default))
        if type(found) is not int:
            raise ValueError(
                f"the tensors of this {self.operation} do not tell {letter}; give {scalar or letter}"
            )
        return found

    def fit(self, name: str, *shape: str) -> None:
        """Learn dimensions from a tensor's shape, such as ``T H 2K``; ``ValueError`` where they differ."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return
        if tensor.dim() != len(shape):
            raise ValueError(f"{name} must be [{', '.join(shape)}]; found {list(tensor.shape)}")
        for what, size in zip(shape, tensor.shape, strict=True):
            factor, letters = _product(what)
            known = [self.sizes[x] for x in letters if x in self.sizes]
            for n in known:
                factor *= n
            unknown = [x for x in letters if x not in self.sizes]
            if len(unknown) == 1 and factor and size % factor == 0:
                self.sizes[unknown[0]] = size // factor
            elif unknown or factor != size:
                raise ValueError(
                    f"{name} must be [{', '.join(shape)}] like the others; found {list(tensor.shape)}"
                )

    def dtype(self, *names: str, default: str) -> Any:
        """The dtype that these tensors share."""
        found = {str(self.tensors[n].dtype).removeprefix("torch.") for n in names if n in self.tensors}
        if len(found) > 1:
            raise ValueError(f"{', '.join(names)} must have one dtype; found {' and '.join(sorted(found))}")
        return found.pop() if found else default

    def integers(self, name: str) -> list[int]:
        """The elements of an index vector."""
        tensor = self.tensors[name]
        if tensor.dim() != 1 or tensor.dtype not in (torch.int32, torch.int64, torch.bool):
            raise ValueError(
                f"{name} must be a vector of integers; found {tensor.dtype} {list(tensor.shape)}"
            )
        return [int(x) for x in tensor.tolist()]

    def starts(self) -> tuple[int, ...]:
        """The rows' lengths, by query_start_loc."""
        if "query_start_loc" not in self.tensors:
            raise ValueError("needs query_start_loc: it says which tokens are a row's")
        starts = self.integers("query_start_loc")
        lengths = tuple(b - a for a, b in pairwise(starts))
        if not starts or starts[0] or min(lengths, default=0) < 0:
            raise ValueError("query_start_loc must begin with 0 and not decrease")
        return lengths

    def rows(self, name: str, count: int) -> list[int]:
        """The slots of the rows; without the vector, 1, 2, .. in a pool that is not there either."""
        slots = self.integers(name) if name in self.tensors else list(range(1, count + 1))
        if len(slots) != count:
            raise ValueError(f"{name} must name {count} slots, one a row; found {len(slots)}")
        return slots

    def batch(
        self, slots: list[int], qlens: tuple[int, ...], index: str, others: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The fields that every call has; the rows' slots, then others, numbered anew from 1."""
        names = numbering((*slots, *others))
        self.slots = [NULL_SLOT, *names]
        pool = self.sizes.get("S")
        if pool is not None and max(self.slots) >= pool:
            raise ValueError(f"a row names slot {max(self.slots)}; the pool has {pool}")
        fields = {
            "qlens": qlens,
            "slots": tuple(names.get(slot, max(slot, PAD_SLOT)) for slot in slots),
            "ids": tuple(range(len(qlens))),
            "pool": len(self.slots),
            "slots_dtype": self.dtype(index, default="int32"),
        }
        if "query_start_loc" in self.tensors:
            fields["starts_dtype"] = self.dtype("query_start_loc", default="int32")
        return fields

    def tail(self, qlens: tuple[int, ...]) -> int:
        """Tokens past the last row."""
        left = self.sizes.get("T", sum(qlens)) - sum(qlens)
        if left < 0:
            raise ValueError(f"query_start_loc ends at {sum(qlens)}; there are {self.sizes['T']} tokens")
        return left


def _product(text: str) -> tuple[int, str]:
    found = re.fullmatch(r"(\d*)([A-Z]*)", text)
    assert found is not None
    return int(found[1] or 1), found[2]


def by_name(arguments: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under the case's names, and what is no tensor."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            tensors[ALIASES.get(name, name)] = value.detach()
            if name.endswith("_cache"):
                scalars.setdefault("record_layout", "slot")
        elif name == "records" and hasattr(value, "correction"):
            tensors |= {"correction": value.correction, "key_gate": value.key_gate}
        elif value is not None or name == "null_block_id":
            scalars[name] = value
    return tensors, scalars
