"""Instructions that order warps, proxies and kernels: barriers, mbarriers, fences."""

import numpy as np

from impl.cute.emulator.isa import Op
from impl.cute.emulator.reference.instruction import Instruction
from impl.cute.emulator.reference.outcome import Outcome
from impl.cute.emulator.reference.warp import Warp

U4, U8 = np.uint32, np.uint64
_BYTES = 8
"""Size and alignment of an mbarrier."""
TIME_OUT = 4


def _barrier_sync(warp: Warp, ins: Instruction, mask: np.ndarray) -> Outcome | None:
    """Arrive once, then wait until the barrier's phase is complete."""
    barriers = warp.cta.barriers
    if warp.barrier is None:
        warp.barrier = barriers.named(ins.imm)
        warp.barrier.arrive(warp.index, barriers.expected(ins.count), wait=True)
        warp.progress = True
    if warp.barrier.holds(warp.index):
        return Outcome.BLOCKED
    warp.barrier = None
    return None


def _barrier_arrive(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    barriers = warp.cta.barriers
    barriers.named(ins.imm).arrive(warp.index, barriers.expected(ins.count), wait=False)


def _init(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    addresses, counts = warp.shared_address(ins.a, ins.imm)[mask], warp.read(ins.b, U4)[mask]
    warp.cta.shared.check_range(addresses, _BYTES, _BYTES, "mbarrier.init")
    for address, count in zip(addresses.tolist(), counts.tolist(), strict=True):
        warp.cta.barriers.init(address, count, warp.index)


def _invalidate(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    for address in warp.shared_address(ins.a, ins.imm)[mask].tolist():
        warp.cta.barriers.invalidate(address)


def _arrive(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    """Lane by lane: expect bytes, pass on what the warp knows, arrive."""
    state = np.zeros(32, U8)
    for lane in np.nonzero(mask)[0]:
        mbarrier = warp.cta.barriers.at(int(warp.shared_address(ins.a, ins.imm)[lane]))
        arrivals = int(warp.read(ins.b, U4)[lane]) if ins.b >= 0 else 1
        expect = int(warp.read(ins.c, U4)[lane]) if ins.c >= 0 else 0
        state[lane] = mbarrier.arrive(warp.cta.clocks.snapshot(warp.index), arrivals, expect)
    warp.write(ins.dst, state, mask)


def _expect(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    sizes = warp.read(ins.c, U4)
    for lane in np.nonzero(mask)[0]:
        warp.cta.barriers.at(int(warp.shared_address(ins.a, ins.imm)[lane])).expect(int(sizes[lane]))


def _completed(warp: Warp, ins: Instruction, mask: np.ndarray) -> np.ndarray:
    """Per lane whether its mbarrier's phase is complete."""
    addresses, parity = warp.shared_address(ins.a, ins.imm), warp.read(ins.b, U4)
    ready = np.zeros(32, bool)
    for lane in np.nonzero(mask)[0]:
        ready[lane] = warp.cta.barriers.at(int(addresses[lane])).ready(int(parity[lane]))
    return ready


def _acquire(warp: Warp, ins: Instruction, lanes: np.ndarray) -> None:
    for address in set(warp.shared_address(ins.a, ins.imm)[lanes].tolist()):
        warp.cta.clocks.acquire(warp.index, warp.cta.barriers.at(address).completed)


def _try_wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> Outcome | None:
    """Wait until the phases of all lanes are complete; sometimes time out instead and return false."""
    ready = bool(_completed(warp, ins, mask)[mask].all())
    if ready:
        _acquire(warp, ins, mask)
    elif not _times_out(warp, ins, mask):
        return Outcome.BLOCKED
    warp.write(ins.dst, np.full(32, ready, np.uint8), mask)
    return None


def _times_out(warp: Warp, ins: Instruction, mask: np.ndarray) -> bool:
    """Whether a wait gives up: in priority mode one attempt in ``TIME_OUT`` does.

    Once for each phase and instruction, so that a kernel which does not repeat the wait is found out.
    """
    random = warp.machine.random
    address = int(warp.shared_address(ins.a, ins.imm)[int(np.argmax(mask))])
    attempt = (ins, address, warp.cta.barriers.at(address).phase)
    if random is None or attempt in warp.timed_out or random.below(TIME_OUT):
        return False
    warp.timed_out.add(attempt)
    return True


def _test_wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> Outcome:
    ready = _completed(warp, ins, mask)
    _acquire(warp, ins, ready)
    warp.write(ins.dst, ready.astype(np.uint8), mask)
    return Outcome.YIELDED if ready[mask].all() else Outcome.POLLED


def _fence_proxy(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.cta.clocks.fence_proxy(warp.index)


def _fence_mbarrier(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.cta.barriers.show(warp.index)


def _dependency_wait(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    warp.cta.clocks.learn(warp.index, warp.cta.clocks.dependency, 1)


def _nothing(warp: Warp, ins: Instruction, mask: np.ndarray) -> None:
    pass


HANDLERS = {
    Op.BAR_SYNC: _barrier_sync,
    Op.BAR_ARRIVE: _barrier_arrive,
    Op.MBAR_INIT: _init,
    Op.MBAR_INVAL: _invalidate,
    Op.MBAR_ARRIVE: _arrive,
    Op.MBAR_EXPECT: _expect,
    Op.MBAR_TRY_WAIT: _try_wait,
    Op.MBAR_TEST_WAIT: _test_wait,
    Op.FENCE_PROXY: _fence_proxy,
    Op.FENCE_MBARRIER: _fence_mbarrier,
    Op.DEPENDENCY_WAIT: _dependency_wait,
    Op.NOP: _nothing,
}
