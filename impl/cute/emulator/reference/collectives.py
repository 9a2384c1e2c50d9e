"""Instructions in which the lanes of a warp exchange something."""

import numpy as np

from impl.cute.emulator.isa import LANES, Op
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.warp import Warp

U4 = np.uint32
_LANE = np.arange(LANES)


def _shuffle(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Each lane gets ``a`` of another lane, or its own if there is no such lane; dst2: whether there is."""
    amount = (warp.read(ins.b, U4) & U4(31)).astype(np.int64)
    wanted = {
        Op.SHFL_BFLY: _LANE ^ amount,
        Op.SHFL_IDX: amount,
        Op.SHFL_UP: _LANE - amount,
        Op.SHFL_DOWN: _LANE + amount,
    }[ins.op]
    inside = (wanted >= 0) & (wanted < LANES)
    value = warp.read(ins.a, U4)[np.where(inside, wanted, _LANE)]
    warp.write(ins.dst, value, mask)
    warp.write(ins.dst2, inside.astype(np.uint8), mask)


def _elect(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    lowest = int(np.argmax(mask))
    warp.write(ins.dst, np.full(LANES, lowest, U4), mask)
    warp.write(ins.dst2, np.equal(_LANE, lowest).astype(np.uint8), mask)


def _vote(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    votes = warp.read(ins.a, np.uint8)[mask] != 0
    outcome = votes.any() if ins.op == Op.VOTE_ANY else votes.all()
    warp.write(ins.dst, np.full(LANES, outcome, np.uint8), mask)


def _ballot(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    votes = (warp.read(ins.a, np.uint8) != 0) & mask
    word = np.packbits(votes, bitorder="little").view(U4)
    warp.write(ins.dst, np.repeat(word, LANES), mask)


def _synchronise(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Later accesses of any lane are ordered after earlier ones of all lanes."""
    warp.cta.clocks.tick(warp.index)


HANDLERS = {
    Op.SHFL_BFLY: _shuffle,
    Op.SHFL_IDX: _shuffle,
    Op.SHFL_UP: _shuffle,
    Op.SHFL_DOWN: _shuffle,
    Op.ELECT: _elect,
    Op.VOTE_ANY: _vote,
    Op.VOTE_ALL: _vote,
    Op.BALLOT: _ballot,
    Op.BAR_WARP: _synchronise,
}
