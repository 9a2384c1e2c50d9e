"""Who moves next: the three modes of ``launch.Schedule``.

Warps and queues of the resident CTAs take turns. A CTA whose warps have all exited is finished at
once, and the next one of the grid takes its place.
"""

from collections.abc import Iterator

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.reference.asynchronous import QUEUES, Queue
from impl.cute.emulator.reference.cta import Cta
from impl.cute.emulator.reference.interpreter import step
from impl.cute.emulator.reference.machine import Machine
from impl.cute.emulator.reference.outcome import Outcome
from impl.cute.emulator.reference.splitmix import Generator
from impl.cute.emulator.reference.warp import Warp

STEP_LIMIT, FORGET = 64, 64
"""Priority mode: a step's budget is 1 to STEP_LIMIT; all priorities are drawn anew one turn in FORGET."""
Entity = tuple[Cta, Warp | Queue]


class Residents:
    """The CTAs on the machine, and those of the grid still to come."""

    def __init__(self, machine: Machine) -> None:
        x, y, z = machine.launch.grid
        self._coming: Iterator[Cta] = (Cta(machine, linear) for linear in range(x * y * z))
        self.ctas: list[Cta] = []
        for _ in range(machine.launch.resident):
            self._add(len(self.ctas))

    def _add(self, place: int) -> None:
        cta = next(self._coming, None)
        if cta is not None:
            self.ctas.insert(place, cta)

    def retire(self, cta: Cta) -> None:
        """If the CTA's warps have all exited, finish it and let the next one take its place."""
        if cta.finished:
            cta.finish()
            place = self.ctas.index(cta)
            del self.ctas[place]
            self._add(place)


def run(machine: Machine) -> None:
    """Execute all CTAs of the grid."""
    residents = Residents(machine)
    if machine.random is None:
        _in_rounds(residents)
    else:
        _by_priority(residents, machine.random)


def _in_rounds(residents: Residents) -> None:
    """Eager and lazy: every warp in order as far as it gets; if none gets anywhere, the oldest operation."""
    while residents.ctas:
        moved = useful = False
        for cta in list(residents.ctas):
            for warp in cta.warps:
                turn = _turn(warp)
                moved, useful = moved or turn[0], useful or turn[1]
            residents.retire(cta)
        if not useful and not any(cta.queues.do_oldest() for cta in residents.ctas) and not moved:
            raise _deadlock(residents.ctas)


def _turn(warp: Warp) -> tuple[bool, bool]:
    """A warp moves until it blocks, exits or yields: whether it moved, and not only to poll in vain."""
    moved = False
    while not warp.finished:
        result = step(warp)
        moved = moved or result.moved
        if result.outcome in (Outcome.YIELDED, Outcome.POLLED):
            return True, result.outcome is Outcome.YIELDED
        if not result.moved:
            break
    return moved, moved


def _by_priority(residents: Residents, random: Generator) -> None:
    """Warps and queues have random priorities, forgotten at random; the highest that can move does."""
    priorities: dict[tuple[int, int | str], int] = {}
    while residents.ctas:
        entities = list(_entities(residents.ctas))
        for entity in entities:
            if _key(entity) not in priorities:
                priorities[_key(entity)] = random.next()
        for entity in sorted(entities, key=lambda e: -priorities[_key(e)]):
            if _move(entity, random):
                break
        else:
            raise _deadlock(residents.ctas)
        if random.below(FORGET) == 0:
            priorities.clear()
        residents.retire(entity[0])


def _entities(ctas: list[Cta]) -> Iterator[Entity]:
    """All that could move: unfinished warps, then queues that hold something, CTA by CTA."""
    for cta in ctas:
        yield from ((cta, warp) for warp in cta.warps if not warp.finished)
        yield from ((cta, queue) for queue in QUEUES if cta.queues.length(queue))


def _key(entity: Entity) -> tuple[int, int | str]:
    cta, who = entity
    return cta.linear, who.index if isinstance(who, Warp) else who


def _move(entity: Entity, random: Generator) -> bool:
    """One step of a warp, or one operation of a queue: any copy or store, the oldest of the tensor core."""
    cta, who = entity
    if isinstance(who, Warp):
        return step(who, 1 + random.below(STEP_LIMIT)).moved
    cta.queues.do_one(who, 0 if who == "tc" else random.below(cta.queues.length(who)))
    return True


def _deadlock(ctas: list[Cta]) -> EmulatorError:
    lines = ["nothing can move"]
    for cta in ctas:
        lines += cta.waiting()
    return EmulatorError("deadlock", "\n".join([*lines, ctas[0].barriers.describe()]).rstrip())
