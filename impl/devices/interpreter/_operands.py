"""What operands become, where that is known: as in ``_speed``, no arithmetic is touched.

Upstream brings every pair to one type and one shape in a dozen steps. Two tensors that have both
already stay as they are, two types meet in the same one each time, and a number next to a tensor
becomes the same constant. Types are told apart as objects: their comparison is slow.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

_HALVES = (tl.float16, tl.bfloat16)
_OTHERS = (
    *(tl.float32, tl.float64, tl.int1),
    *(tl.int8, tl.int16, tl.int32, tl.int64, tl.uint8, tl.uint16, tl.uint32, tl.uint64),
)
_SELF = frozenset(map(id, (*_HALVES, *_OTHERS)))
"""Types of which two meet in the same one."""
_SELF_DIVIDED = frozenset(map(id, _OTHERS))
"""Those of which two do for / and % too: halves are divided as fp32."""
_OFFSETS = frozenset(map(id, (tl.int32, tl.int64)))
_NUMBERS = (int, float, bool)
_UNWRAPPED = (tl.tensor, *_NUMBERS, type(None), str)
_UNSAID = ((), (None,))
_MOST_CONSTANTS = 20_000

_Pair = tuple[tl.tensor, tl.tensor]
_Flags = tuple[bool, bool, bool, bool]


def make_unwrapping(inner: Callable) -> Callable:
    """Upstream asks four times whether a value is or holds a constexpr; most are nothing that could."""

    def unwrap(value: Any) -> Any:
        return value if type(value) in _UNWRAPPED else inner(value)

    return unwrap


_BLOCKS: dict[tuple[int, int], tl.block_type] = {}


def _block(element: tl.dtype, shape: Any) -> tl.block_type:
    """The type of blocks of a shape that some have already; one object for each."""
    key = (id(element), id(shape))
    known = _BLOCKS.get(key)
    if known is None or known.shape is not shape or known.element_ty is not element:
        known = tl.block_type(element, shape)
        if id(element) in _SELF:  # others come and go
            _BLOCKS[key] = known
    return known


def make_broadcast(inner: Callable) -> Callable:
    """Two blocks of one shape, and two scalars, stay as they are, and a scalar becomes a block at once.

    Upstream compares extents one by one.
    """

    def filled(self: Any, value: tl.tensor, like: tl.block_type) -> tl.tensor:
        kind = _block(value.type.scalar, like.shape)
        return tl.tensor(self.builder.create_splat(kind, value.handle), kind)

    def broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> _Pair:
        one, other = lhs.type, rhs.type
        if type(one) is tl.block_type:
            if type(other) is not tl.block_type:
                return lhs, filled(self, rhs, one)
            if one.shape is other.shape:
                return lhs, rhs
        elif type(other) is tl.block_type:
            return filled(self, lhs, other), rhs
        else:
            return lhs, rhs
        fitted: _Pair = inner(self, lhs, rhs)
        return fitted

    return broadcast


def _conversions() -> dict[tuple[int, int], tuple[str, tuple[bool, ...]]]:
    """What upstream's ``cast`` calls for frequent pairs of types, and with what behind the type."""
    table: dict[tuple[int, int], tuple[str, tuple[bool, ...]]] = {
        (id(tl.int1), id(tl.int32)): ("create_int_cast", (False,)),
        (id(tl.int32), id(tl.int64)): ("create_int_cast", (True,)),
        (id(tl.int64), id(tl.int32)): ("create_int_cast", (True,)),
        (id(tl.int32), id(tl.float32)): ("create_si_to_fp", ()),
    }
    for half in _HALVES:
        table[id(half), id(tl.float32)] = ("create_fp_ext", ())
        table[id(tl.float32), id(half)] = ("create_fp_trunc", ())
    return table


def make_cast(inner: Callable) -> Callable:
    """Upstream's conversion of a tensor, told what to call where the two types say it."""
    table = _conversions()

    def cast(self: Any, value: tl.tensor, kind: tl.dtype, *rounding: Any, **named: Any) -> tl.tensor:
        here, there = value.type, kind.scalar
        if here.scalar is there:
            return value
        known = table.get((id(here.scalar), id(there)))
        if known is None or named or rounding not in _UNSAID:
            converted: tl.tensor = inner(self, value, kind, *rounding, **named)
            return converted
        target = _block(there, here.shape) if type(here) is tl.block_type else there
        method, more = known
        return tl.tensor(getattr(self.builder, method)(value.handle, target, *more), target)

    return cast


class _Operands:
    """Upstream's check of a binary operation's operands, and what it said so far."""

    def __init__(self, inner: Callable) -> None:
        self._inner = inner
        self._constants: dict[tuple[Any, ...], tuple[Any, tl.tensor]] = {}
        self._meetings: dict[tuple[int, int, _Flags], tuple[tl.dtype, tl.dtype]] = {}

    def of(self, semantic: Any, lhs: Any, rhs: Any, flags: _Flags) -> _Pair:
        """The operands as the operation takes them; ``flags`` are upstream's, in its order."""
        if type(lhs) is tl.tensor:
            if type(rhs) is tl.tensor:
                return self._tensors(semantic, lhs, rhs, flags)
            if type(rhs) in _NUMBERS and id(lhs.type.scalar) in _SELF:
                return self._beside(semantic, lhs, rhs, flags, left=True)
        elif type(rhs) is tl.tensor and type(lhs) in _NUMBERS and id(rhs.type.scalar) in _SELF:
            return self._beside(semantic, lhs, rhs, flags, left=False)
        return self._asked(semantic, lhs, rhs, flags)

    def _asked(self, semantic: Any, lhs: Any, rhs: Any, flags: _Flags) -> _Pair:
        answer: _Pair = self._inner(semantic, lhs, rhs, *flags)
        return answer

    def _tensors(self, semantic: Any, lhs: tl.tensor, rhs: tl.tensor, flags: _Flags) -> _Pair:
        left, right = lhs.type.scalar, rhs.type.scalar
        pointer, _, _, divided = flags
        same = left is right and id(left) in (_SELF_DIVIDED if divided else _SELF)
        if not same and not (pointer and type(left) is tl.pointer_type and id(right) in _OFFSETS):
            if id(left) not in _SELF or id(right) not in _SELF:
                return self._asked(semantic, lhs, rhs, flags)
            key = (id(left), id(right), flags)
            kinds = self._meetings.get(key)
            if kinds is None:
                found = self._asked(semantic, lhs, rhs, flags)
                self._meetings[key] = (found[0].type.scalar, found[1].type.scalar)
                return found
            lhs, rhs = semantic.cast(lhs, kinds[0]), semantic.cast(rhs, kinds[1])
        pair: _Pair = semantic.broadcast_impl_value(lhs, rhs)
        return pair

    def _beside(self, semantic: Any, lhs: Any, rhs: Any, flags: _Flags, *, left: bool) -> _Pair:
        """A tensor and a number, which is a constant of the tensor's type if that may stay."""
        tensor, number = (lhs, rhs) if left else (rhs, lhs)
        kind = tensor.type
        shape = kind.shape if type(kind) is tl.block_type else None
        # Of a zero the sign is lost upstream too; what is not a number is never found again.
        key = (type(number), number, id(kind.scalar), id(shape), left, flags)
        held, constant = self._constants.get(key, (None, None))
        if constant is None or held is not shape:
            found = self._asked(semantic, lhs, rhs, flags)
            same, constant = found if left else (found[1], found[0])
            if same is tensor and number == number:
                if len(self._constants) >= _MOST_CONSTANTS:
                    self._constants.clear()
                constant.handle.data.flags.writeable = False
                self._constants[key] = (shape, constant)
            return found
        return (lhs, constant) if left else (constant, rhs)


def make_checking(inner: Callable) -> Callable:
    """Upstream's check of operands, with the frequent cases before it."""
    operands = _Operands(inner)

    def checking(
        self: Any,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> _Pair:
        return operands.of(self, lhs, rhs, (allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod))

    return checking
