"""Asynchronous operations of a CTA: issued by a warp, done when the schedule says so."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.reference.instruction import Instruction

Queue = Literal["copy", "tc", "store"]
QUEUES: tuple[Queue, ...] = ("copy", "tc", "store")


@dataclass(eq=False)
class Operation:
    """One operation: what it does, who issued it where, its event and its place in the order of issue."""

    effect: Callable[[], None]
    instruction: Instruction
    warp: int
    queue: Queue
    clock: int
    number: int
    done: bool = False


class Queues:
    """The operations of a CTA that were issued and not done; with ``eager`` there never are any."""

    def __init__(self, cta: tuple[int, int, int], *, eager: bool) -> None:
        self._cta, self._eager = cta, eager
        self._waiting: dict[Queue, deque[Operation]] = {name: deque() for name in QUEUES}
        self._issued = 0

    def issue(
        self, queue: Queue, warp: int, instruction: Instruction, effect: Callable[[], None], clock: int = 0
    ) -> Operation:
        """Add an operation; eager ones are done at once."""
        self._issued += 1
        operation = Operation(effect, instruction, warp, queue, clock, self._issued)
        self._waiting[queue].append(operation)
        if self._eager:
            self.do(operation)
        return operation

    def do(self, operation: Operation) -> None:
        """Do an operation now, unless it is done; its errors are those of the instruction that issued it."""
        if operation.done:
            return
        operation.done = True
        self._waiting[operation.queue].remove(operation)
        try:
            operation.effect()
        except EmulatorError as error:
            raise operation.instruction.located(error, self._cta, operation.warp) from None

    def length(self, queue: Queue) -> int:
        """Operations waiting in a queue."""
        return len(self._waiting[queue])

    def do_one(self, queue: Queue, index: int = 0) -> None:
        """Do the operation at that place of a queue."""
        self.do(self._waiting[queue][index])

    def do_oldest(self) -> bool:
        """Do the oldest operation of the first queue that has one; False if none has."""
        for queue in QUEUES:
            if self._waiting[queue]:
                self.do_one(queue)
                return True
        return False


class Groups:
    """Commit groups: operations since the last commit, and the groups not waited for."""

    def __init__(self) -> None:
        self._open: list[Operation] = []
        self._committed: deque[list[Operation]] = deque()

    def add(self, operation: Operation) -> None:
        """The operation belongs to the next group to be committed."""
        self._open.append(operation)

    def commit(self) -> None:
        """Close a group (an empty one counts)."""
        self._committed.append(self._open)
        self._open = []

    def take(self, pending: int) -> list[Operation]:
        """The operations of all but the newest ``pending`` groups, which are no longer kept."""
        taken: list[Operation] = []
        while len(self._committed) > pending:
            taken += self._committed.popleft()
        return taken

    def left(self) -> list[Operation]:
        """Operations that nothing has waited for."""
        return [operation for group in self._committed for operation in group] + self._open
