"""Warpgroup products (wgmma), with a Hopper GPU's arithmetic.

Measured on an H200 for one step of K = 16, and equal to it bit for bit: the 16 exact products and
the accumulator are aligned to the largest exponent (of a product: the sum of its operands'
exponents, even if the product is twice that; a subnormal operand's is -126), each cut toward zero at
25 fraction bits, added exactly, and the sum is cut toward zero to fp32.
"""

import numpy as np

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.isa import LANES, Op
from impl.cute.emulator.reference import matrices
from impl.cute.emulator.reference.arithmetic import F4, F8, canonical
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.shared import Origin
from impl.cute.emulator.reference.warp import Warp

U4, U8 = np.uint32, np.uint64
IN_FLIGHT = 0xFFFFFFFF
FRACTION_BITS = 25
_NO_EXPONENT = -10000
"""Below every exponent: that of zero."""
_LEAST = -126
"""The exponent of subnormal numbers."""


def _exponent(x: np.ndarray) -> np.ndarray:
    """floor(log2 |x|)."""
    return np.where(x == 0, _NO_EXPONENT, np.frexp(x)[1] - 1)


def step(accumulator: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """One K step: accumulator f4 [M, N], a f8 [M, 16], b f8 [N, 16] of bf16 values; f4 [M, N]."""
    c, products = accumulator.astype(F8), a[:, None, :] * b[None, :, :]
    of_a, of_b = np.maximum(_exponent(a), _LEAST)[:, None, :], np.maximum(_exponent(b), _LEAST)[None, :, :]
    exponents = np.where(products == 0, _NO_EXPONENT, of_a + of_b)
    largest = np.maximum(exponents.max(-1), _exponent(c))
    largest = np.where(largest == _NO_EXPONENT, 0, largest)
    up = FRACTION_BITS - largest
    total = np.trunc(np.ldexp(products, up[..., None])).sum(-1) + np.trunc(np.ldexp(c, up))
    return canonical(_cut(np.ldexp(total, -up)) + F4(0))  # + 0: no result is -0


def _cut(x: np.ndarray) -> np.ndarray:
    """Double to fp32 toward zero, except that what is too large becomes infinite."""
    last_place = np.maximum(_exponent(x), _LEAST) - 23
    result: np.ndarray = np.ldexp(np.trunc(np.ldexp(x, -last_place)), last_place)
    return result.astype(F4)


def _accumulator_places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row within the warp's 16 and column of register i of lane l, both [n / 2, 32]."""
    i, lane = np.arange(n // 2)[:, None], np.arange(LANES)[None, :]
    return lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)


def _uniform(warp: Warp, register: int) -> int:
    values = warp.read(register, U8)
    if (values != values[0]).any():
        raise EmulatorError("descriptor", "wgmma descriptors that differ between lanes")
    return int(values[0])


class Product:
    """A product that is issued and not done: where its accumulators come from, and what they become.

    ``inputs`` maps each accumulator register to the values it held at the issue, f4 [32], or to the
    latest product still waiting that writes it. ``results`` is filled when the product is done.
    """

    def __init__(self, warp: Warp, registers: list[int]) -> None:
        waiting = {r: product for product in warp.waiting_products for r in product.inputs}
        self.inputs: dict[int, Product | np.ndarray] = {
            r: waiting[r] if r in waiting else warp.read(r, F4).copy() for r in registers
        }
        self.results: dict[int, np.ndarray] = {}
        for register in registers:
            warp.write(register, np.full(LANES, IN_FLIGHT, U4), np.ones(LANES, bool))
        warp.waiting_products.append(self)

    def before(self) -> list[np.ndarray]:
        """The accumulators that the product adds to."""
        return [x.results[r] if isinstance(x, Product) else x for r, x in self.inputs.items()]

    def done(self, warp: Warp, values: np.ndarray) -> None:
        """Keep the results, and put them into registers that no later product is about to write."""
        warp.waiting_products.remove(self)
        self.results = dict(zip(self.inputs, values, strict=True))
        later = {r for product in warp.waiting_products for r in product.inputs}
        for register, value in self.results.items():
            if register not in later:
                warp.write(register, value.view(U4), np.ones(LANES, bool))


def _operands(warp: Warp, a: int, b: int, n: int) -> list[np.ndarray]:
    """Addresses of the elements of the warp's 16 rows of A and of all rows of B."""
    rows = (16 * (warp.index % 4) + np.arange(16), np.arange(n))
    places = []
    for register, those in zip((a, b), rows, strict=True):
        descriptor = _uniform(warp, register)
        place = matrices.element_addresses(descriptor, matrices.hopper_mode(descriptor), those)
        matrices.check_operand(warp.cta.shared, place, "wgmma operand")
        places.append(place)
    return places


def _mma(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """The warp's 16 rows of D = A B^T or D + A B^T; D's registers hold poison until they are done."""
    if not mask.all():
        raise EmulatorError("divergence", "wgmma by fewer than 32 lanes")
    if not warp.product_fence:
        raise EmulatorError("wgmma", "no wgmma.fence since the warp's start or its last wgmma.wait_group")
    a, b, predicate, *accumulators = ins.operands
    shared, clocks, n = warp.cta.shared, warp.cta.clocks, ins.imm
    places = _operands(warp, a, b, n)
    add = bool(warp.read(predicate, np.uint8)[0])
    product = Product(warp, accumulators)
    entity = clocks.products(warp.index)
    clock = clocks.tick(entity)
    origin = Origin(entity, clock, clocks.snapshot(warp.index), ins.line)
    row, column = _accumulator_places(n)

    def effect() -> None:
        for place in places:
            shared.async_read(origin, place.ravel(), 2, "wgmma")
        total = np.zeros((16, n), F4)
        if add:
            total[row, column] = product.before()
        total = step(total, *(matrices.operand(shared, place) for place in places))
        product.done(warp, total[row, column])

    warp.products.add(warp.cta.queues.issue("tc", warp.index, ins, effect, clock))


def _fence(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.product_fence = True


def _commit(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.products.commit()


def _wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """The products of all but the newest groups are done now, and their reads known to be over."""
    warp.product_fence = False
    for operation in warp.products.take(ins.imm):
        warp.cta.queues.do(operation)
        warp.cta.clocks.learn(warp.index, warp.cta.clocks.products(warp.index), operation.clock)


HANDLERS = {
    Op.WG_FENCE: _fence,
    Op.WG_MMA: _mma,
    Op.WG_COMMIT: _commit,
    Op.WG_WAIT: _wait,
}
