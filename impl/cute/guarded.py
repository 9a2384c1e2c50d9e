"""Memory accesses that only some threads make, as predicated instructions instead of branches.

Each happens where ``index < bound`` (32-bit, signed); a load that does not happen gives 0.
"""

from typing import Any

from cutlass import Float32, Int32, Int64, Uint16

from impl.cute.device import asm

_GUARD = "{{ .reg .pred p; setp.lt.s32 p, ${0}, ${1}; "
_LETTER = {Float32: "f", Uint16: "h"}


def _bits(kind: Any) -> str:
    return "b16" if kind is Uint16 else "b32"


def load_global_if(at: Int64, index: Any, bound: Any, kind: Any = Uint16) -> Any:
    """One value of type ``kind`` (16 or 32 bits) at a global address."""
    letter, bits = _LETTER.get(kind, "r"), _bits(kind)
    code = _GUARD.format(2, 3) + f"mov.{bits} $0, 0; @p ld.global.{bits} $0, [$1]; }}"
    return asm(code, f"=&{letter},l,r,r", (at, Int32(index), Int32(bound)), (kind,))


def store_global_if(at: Int64, value: Any, index: Any, bound: Any) -> None:
    """One value of 16 or 32 bits at a global address."""
    kind = type(value)
    code = _GUARD.format(2, 3) + f"@p st.global.{_bits(kind)} [$0], $1; }}"
    asm(code, f"l,{_LETTER.get(kind, 'r')},r,r", (at, value, Int32(index), Int32(bound)))


def store_shared_if(at: Int32, value: Any, index: Any, bound: Any) -> None:
    """One value of 16 or 32 bits at a shared address."""
    kind = type(value)
    code = _GUARD.format(2, 3) + f"@p st.shared.{_bits(kind)} [$0], $1; }}"
    asm(code, f"r,{_LETTER.get(kind, 'r')},r,r", (at, value, Int32(index), Int32(bound)))


def take_ticket_if(counter: Int64, index: Any, bound: Any) -> Int32:
    """Count a global counter up by one; what it held."""
    code = _GUARD.format(2, 3) + "mov.b32 $0, 0; @p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; }"
    return asm(code, "=&r,l,r,r", (counter, Int32(index), Int32(bound)), (Int32,))


def load_shared_if(at: Int32, index: Any, bound: Any, kind: Any = Uint16) -> Any:
    """One value of type ``kind`` (16 or 32 bits) at a shared address."""
    letter, bits = _LETTER.get(kind, "r"), _bits(kind)
    code = _GUARD.format(2, 3) + f"mov.{bits} $0, 0; @p ld.shared.{bits} $0, [$1]; }}"
    return asm(code, f"=&{letter},r,r,r", (at, Int32(index), Int32(bound)), (kind,))
