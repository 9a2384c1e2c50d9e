"""Tensor maps: what the 128 bytes mean that a host writes for a tensor copy.

Read off the maps that the DSL's host code and the driver write, and checked against a Hopper
GPU's copies. Only what those maps use is known; the rest is refused.
"""

from dataclasses import dataclass

import numpy as np

from impl.cute.emulator.errors import EmulatorError

BYTES = 128
TENSOR_MAP = np.dtype(
    [
        ("parameter", "i4"),  # offset of the map in the parameter block
        ("rank", "i4"),
        ("element_bytes", "i4"),
        ("swizzle", "i4"),
        ("fill", "i4"),
        ("valid", "i4"),
        ("base", "u8"),
        ("dims", "i8", 5),
        ("strides", "i8", 5),
        ("box", "i8", 5),
    ],
    align=True,
)
"""A decoded map as the native engine takes it; ``valid`` 0: not a map that is understood."""
_ELEMENT_BYTES = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 10: 2}
"""Data type code to bytes: u8, u16, u32, s32, u64, s64, f16, f32, bf16."""


@dataclass(frozen=True)
class TensorMap:
    """A tensor of up to five dimensions, fastest first, and the box that one copy moves.

    ``swizzle``: 0 none, 1, 2, 3 for 32, 64, 128 bytes. ``strides`` are bytes, the first of them
    the element's. ``fill`` is the 16-bit pattern of elements outside the tensor.
    """

    base: int
    element_bytes: int
    swizzle: int
    fill: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def record(self, parameter: int) -> np.ndarray:
        """The map as one ``TENSOR_MAP``, for the parameter at that offset."""
        result = np.zeros((), TENSOR_MAP)
        result["parameter"], result["valid"] = parameter, 1
        result["rank"], result["element_bytes"] = len(self.dims), self.element_bytes
        result["swizzle"], result["fill"], result["base"] = self.swizzle, self.fill, self.base
        for name in ("dims", "strides", "box"):
            values = getattr(self, name)
            result[name][: len(values)] = values
        return result


def decode(raw: bytes) -> TensorMap:
    """Read a map; ``EmulatorError`` of kind tensor-map if it is none that is understood."""
    words = [int(word) for word in np.frombuffer(raw[:BYTES], np.uint32)]
    flags = words[2]
    rank, code = (flags >> 4 & 7) + 1, flags >> 7 & 15
    if code not in _ELEMENT_BYTES or rank > 5:
        raise EmulatorError("tensor-map", f"data type code {code}, rank {rank} in a tensor map")
    width = _ELEMENT_BYTES[code]
    high = words[7]
    strides = [(words[3 + i] | (high >> 4 * i & 15) << 32) * 16 for i in range(4)]
    box = [words[13] >> 24, *(words[14] >> 8 * i & 255 for i in range(4))]
    return TensorMap(
        base=words[0] | words[1] << 32,
        element_bytes=width,
        swizzle=flags >> 13 & 3,
        fill=0x7FF7 if flags >> 15 & 1 else 0,
        dims=tuple(word + 1 for word in words[8 : 8 + rank]),
        strides=(width, *strides[: rank - 1]),
        box=tuple(size + 1 for size in box[:rank]),
    )
