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

from oracle.calls import CALLS
from oracle.calls.base import PAD_SLOT, Activation, Index, Small, State, Window
from oracle.calls.commit import Commit
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.serve import Serve
from oracle.calls.verify import Verify
from oracle.case import Case, Graph
from oracle.layout import DENSE, placed

OPERATIONS = tuple(CALLS)
"""Operations that a case can describe, as ``--op`` names them."""
SERVING = ("conv_prefill", "conv_update", "verify", "commit")
"""The operations that serving is made of; a fused verify, where one is offered, runs in place of two."""
FUSED = "fused_verify"
"""The operation that convolves and verifies a window in one call."""
BY_RECORDS = "verify"
"""The operation whose callables differ by record layout; a commit context tells it by its layers."""


ALIGNMENT = 16
"""Bytes that vector loads and bulk copies want an address to be a multiple of."""


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
    heads: tuple[Small, ...] = ()
    """Numbers of heads, for kernels that are compiled anew for each."""
    windows: tuple[Window, ...] = ()
    activations: tuple[Activation, ...] = ()
    states: tuple[State, ...] = ()
    index_dtypes: tuple[Index, ...] = ()
    dense: tuple[str, ...] = ()
    """Tensors, otherwise of free strides, that must be contiguous."""
    dense_inside: tuple[str, ...] = ()
    """Tensors of which only the leading stride is free; a layer's number is left out of the name."""
    aligned: tuple[str, ...] = ()
    """Tensors that start on a multiple of ``ALIGNMENT`` bytes, with such a leading stride unless they are
    vectors; likewise."""
    bounded_only: bool = False
    """Whether the gate must have a lower bound."""
    graphs: bool = True
    """Whether a call can be captured in a CUDA graph: it waits for nothing on the host."""
    pad_slots: bool = True
    """Whether a slot of -1 is null; otherwise only slot 0 is."""


@dataclass(frozen=True)
class Implementation:
    """One subject of the suite.

    ``operations`` maps a name of ``OPERATIONS`` to a callable with the public signature (for
    verify perhaps several that differ in record layout; for commit the context's class).
    ``absent`` says why an operation is missing. ``domains`` overrules ``domain`` for single
    operations. ``arithmetic`` names the declared fp32 arithmetic (``oracle.tracked``); ``path``
    is asked after each call which code path it took. ``set_conv_state_dim_first`` settles what
    ``is_conv_state_dim_first()`` answers to the implementation's ``create``. ``fallback`` is what
    a caller runs beside it: in serving, the operations that it does not offer, and what it declines.
    """

    name: str
    operations: Mapping[str, Callable[..., object] | tuple[Callable[..., object], ...]]
    version: str = ""
    arithmetic: str = "any-order-fp32"
    devices: tuple[str, ...] = ("cpu", "cuda")
    domain: Domain = field(default_factory=Domain)
    domains: Mapping[str, Domain] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    path: Callable[[], str] = str
    set_conv_state_dim_first: Callable[[bool], object] = bool
    fallback: "Implementation | None" = None
    _by_records: dict[str, Callable[..., object]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Verify's callables by record layout, once they were asked for: to read a signature takes long."""

    def serving(self) -> "dict[str, Implementation]":
        """Which implementation runs each operation of serving; ``UnavailableError`` if none runs one."""
        parts = {part: self._served_by(part) for part in SERVING}
        return parts | ({FUSED: self} if FUSED in self.operations else {})

    def _served_by(self, part: str) -> "Implementation":
        one = self.fallback if self.fallback and part not in self.operations else self
        one.variants(part)
        return one

    def variants(self, operation: str) -> dict[str, Callable[..., object]]:
        """The operation's callables by record layout ("": any); ``UnavailableError`` if it has none."""
        if operation == "serve":
            return {part: next(iter(one.variants(part).values())) for part, one in self.serving().items()}
        entry = self.operations.get(operation)
        if entry is None:
            why = self.absent.get(operation, f"{self.name} does not offer it")
            raise UnavailableError(f"{operation}: {why}")
        functions = entry if isinstance(entry, tuple) else (entry,)
        if operation != BY_RECORDS:
            return {"": functions[0]}
        if not self._by_records:
            self._by_records.update({record_layout(function): function for function in functions})
        return self._by_records

    def function(self, case: Case) -> Callable[..., object]:
        """The callable for a case that it takes."""
        variants = self.variants(case.op)
        return variants[getattr(case.call, "records", "")] if case.op == BY_RECORDS else variants[""]

    def offered(self, operation: str) -> Domain:
        """The operation's domain, less the record layouts that no callable takes."""
        domain = self.domains.get(operation, self.domain)
        self.variants(operation)
        if operation not in (BY_RECORDS, "serve"):
            return domain
        taken = (self.serving()[BY_RECORDS] if operation == "serve" else self).variants(BY_RECORDS)
        return replace(domain, records=tuple(x for x in domain.records if x in taken))

    @property
    def all_operations(self) -> tuple[str, ...]:
        """Every operation that it offers, serving included if it has the parts."""
        held = self.operations.keys() | (self.fallback.operations.keys() if self.fallback else ())
        return (*self.operations, *(("serve",) if held >= set(SERVING) else ()))

    def takes(self, case: Case) -> str:
        """Why the implementation cannot run this case, or nothing."""
        try:
            domain = self.offered(case.op)
        except UnavailableError as error:
            return str(error)
        text = _outside(case, domain)
        return f"{self.name} {text}" if text else ""


_HEADED = (Verify, Commit, FusedVerify, Serve)


def _outside(case: Case, domain: Domain) -> str:
    """What of a case a domain does not hold, or nothing."""
    call = case.call
    wanted: tuple[tuple[str, tuple[object, ...], object], ...] = (
        ("record layout", domain.records, getattr(call, "records", None)),
        ("window", domain.windows, getattr(call, "window", None)),
        (
            "head dimensions",
            domain.head_dims,
            (call.key_dim, call.value_dim) if isinstance(call, _HEADED) else None,
        ),
        ("head count", domain.heads, getattr(call, "heads", None)),
        ("activations", domain.activations, getattr(call, "activation", None)),
        ("state", domain.states, getattr(call, "state", None)),
    )
    for what, held, value in wanted:
        if held and value is not None and value not in held:
            return f"has no {what} {value}"
    for name in domain.dense:
        if any(case.layouts.get(name, DENSE).gaps):
            return f"takes only a contiguous {name}"
    if domain.bounded_only and getattr(call, "lower_bound", 0.0) is None:
        return "takes only gates with a lower bound"
    text = _outside_memory(case, domain)
    if text:
        return text
    if not domain.graphs and isinstance(case.relation, Graph):
        return "cannot be captured in a graph"
    if not domain.pad_slots and PAD_SLOT in call.slots:
        return f"takes no slot {PAD_SLOT}"
    return ""


def _outside_memory(case: Case, domain: Domain) -> str:
    """What of a case's memory a domain does not hold, or nothing."""
    specs = case.call.tensors()
    for name, layout in case.layouts.items():
        inner_moved = any(layout.gaps[1:]) or layout.order not in ((), tuple(range(len(layout.order))))
        if base_name(name) in domain.dense_inside and inner_moved:
            return f"takes only a {name} that is dense inside"
    for name, spot in placed(specs, case.layouts, case.pages).items() if domain.aligned else ():
        step = spot.strides[0] * specs[name].itemsize if len(spot.strides) > 1 else 0
        if base_name(name) in domain.aligned and (spot.start % ALIGNMENT or step % ALIGNMENT):
            return f"takes only a {name} on multiples of {ALIGNMENT} bytes"
    return ""


def base_name(name: str) -> str:
    """A tensor's name without its layer."""
    return name.partition(".")[0]


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
