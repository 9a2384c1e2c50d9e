"""What an implementation offers: names of operations, and callables with the public signatures.

A kernel is plugged in by a factory that returns an ``Implementation``; see the README for
one in ten lines. Which record layout a verify callable takes is told by its signature: a
parameter ``records`` means one record row per batch row, ``correction_cache`` and
``kg_cache`` mean one per state slot.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
import torch

from oracle.case import Activation, Case, Index, Small, State, Window

OPERATIONS = ("verify",)
"""Operations that a case can describe, as ``--op`` names them."""


class UnavailableError(ValueError):
    """An implementation, operation or device that cannot be had here; one line says why."""


def one_line(text: object, limit: int = 400) -> str:
    """What a kernel or a file says, as one line that a terminal can show: no control characters."""
    words = " ".join(str(text).split())[:limit]
    return "".join(letter if letter.isprintable() else "?" for letter in words)


@dataclass(frozen=True)
class Records:
    """Record buffers as verify takes them: correction [R, H, Q, V] fp32, key_gate [R, H, Q, 2K]."""

    correction: torch.Tensor
    key_gate: torch.Tensor


@dataclass(frozen=True)
class Domain:
    """What an implementation takes, for the strategies: they draw nothing outside it.

    An empty tuple means no restriction.
    """

    records: Annotated[tuple[Literal["row", "slot"], ...], msgspec.Meta(min_length=1)] = ("row", "slot")
    head_dims: tuple[tuple[Small, Small], ...] = ()
    """Allowed (key_dim, value_dim)."""
    windows: tuple[Window, ...] = ()
    activations: tuple[Activation, ...] = ()
    states: tuple[State, ...] = ()
    index_dtypes: tuple[Index, ...] = ()


@dataclass(frozen=True)
class Implementation:
    """One subject of the suite.

    ``operations`` maps a name of ``OPERATIONS`` to a callable with the public signature, or
    to several that differ in record layout. ``absent`` says why an operation is missing.
    ``arithmetic`` names the declared fp32 arithmetic (``oracle.tracked``); ``path`` is asked
    after each call which code path it took.
    """

    name: str
    operations: Mapping[str, Callable[..., object] | tuple[Callable[..., object], ...]]
    version: str = ""
    arithmetic: str = "any-order-fp32"
    devices: tuple[str, ...] = ("cpu", "cuda")
    domain: Domain = field(default_factory=Domain)
    absent: Mapping[str, str] = field(default_factory=dict)
    path: Callable[[], str] = str

    def variants(self, operation: str) -> dict[str, Callable[..., object]]:
        """The operation's callables by record layout; ``UnavailableError`` if it has none."""
        entry = self.operations.get(operation)
        if entry is None:
            why = self.absent.get(operation, f"{self.name} does not offer it")
            raise UnavailableError(f"{operation}: {why}")
        functions = entry if isinstance(entry, tuple) else (entry,)
        return {record_layout(function): function for function in functions}

    @property
    def offered(self) -> Domain:
        """The domain, less the record layouts that no callable takes."""
        taken = {layout for operation in self.operations for layout in self.variants(operation)}
        return replace(self.domain, records=tuple(x for x in self.domain.records if x in taken))

    def takes(self, case: Case) -> str:
        """Why the implementation cannot run this case, or nothing."""
        try:
            variants = self.variants(case.op)
        except UnavailableError as error:
            return str(error)
        call, domain = case.call, self.domain
        checks: tuple[tuple[bool, str], ...] = (
            (call.records not in variants, f"no {call.records} record layout"),
            (bool(domain.windows) and call.window not in domain.windows, f"no window of {call.window}"),
            (
                bool(domain.head_dims) and (call.key_dim, call.value_dim) not in domain.head_dims,
                f"no head dimensions {call.key_dim} and {call.value_dim}",
            ),
            (
                bool(domain.activations) and call.activation not in domain.activations,
                f"no {call.activation} activations",
            ),
            (bool(domain.states) and call.state not in domain.states, f"no {call.state} state"),
        )
        return next((f"{self.name} has {text}" for failed, text in checks if failed), "")


def record_layout(function: Callable[..., object]) -> str:
    """``row`` or ``slot``, read off a verify callable's signature."""
    names = inspect.signature(function).parameters
    if "records" in names:
        return "row"
    if {"correction_cache", "kg_cache"} <= names.keys():
        return "slot"
    raise UnavailableError(
        f"{getattr(function, '__name__', function)} has neither a parameter 'records' nor "
        "'correction_cache' and 'kg_cache'"
    )
