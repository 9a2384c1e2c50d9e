"""Who has which slot while serving: what an engine's block manager does.

The smallest free slot goes first, so that slots are used again at once. With blocks, a request
has a slot for every block from the one it is in; a boundary that it left behind is kept for
other requests to start from, until its slot is wanted.
"""

from dataclasses import dataclass, field

from oracle.serving import Request


@dataclass
class Running:
    """A request: its slots by block (0: none), those that end with it, and what the model knows of it."""

    table: list[int]
    model: Request
    owned: set[int] = field(default_factory=set)


@dataclass(frozen=True)
class Cached:
    """A block boundary that another request may start from."""

    slot: int
    model: Request


class Slots:
    """The pool's slots; ``block_size`` 0 gives every request one."""

    def __init__(self, pool: int, block_size: int) -> None:
        self.running: dict[int, Running] = {}
        self._cached: list[Cached] = []
        self._free = list(range(1, pool))
        self._block_size = block_size

    def column(self, tokens: int) -> int:
        """The block of a request's last token."""
        return max(tokens - 1, 0) // self._block_size if self._block_size else 0

    def slot(self, request: int, more: int = 0) -> int:
        """The slot of the block that holds the request's last token, ``more`` tokens on."""
        running = self.running[request]
        return running.table[self.column(running.model.tokens + more)]

    def reach(self, running: Running, more: int) -> bool:
        """Have slots for ``more`` tokens, from the block in use on; whether there are enough."""
        tokens = running.model.tokens
        for column in range(self.column(tokens), self.column(tokens + more) + 1):
            running.table += [0] * (column + 1 - len(running.table))
            if running.table[column] == 0:
                running.table[column] = self._take()
                if running.table[column] == 0:
                    return False
                running.owned.add(running.table[column])
        return True

    def release(self, running: Running) -> None:
        """Give back what ends with a request."""
        self._free += sorted(running.owned)

    def finish(self, request: int) -> None:
        """End a request, if it is running."""
        running = self.running.pop(request, None)
        if running is not None:
            self.release(running)

    def cache(self, request: int, slot: int, model: Request) -> None:
        """Keep a boundary that a request has left behind."""
        self.running[request].owned.discard(slot)
        self._cached.append(Cached(slot, model))

    def start_cached(self, request: int, pick: int) -> tuple[int, int]:
        """Start a request from a cached boundary; returns the slots to copy from and to, or zeros."""
        if not self._cached or request in self.running or request < 1:
            return 0, 0
        entry = self._cached[pick % len(self._cached)]
        self._cached.remove(entry)  # so that taking a slot cannot evict it
        slot = self._take()
        self._cached.append(entry)
        if not slot:
            return 0, 0
        table = [0] * self.column(entry.model.tokens) + [slot]
        self.running[request] = Running(table, entry.model, {slot})
        return entry.slot, slot

    def _take(self) -> int:
        """The smallest free slot, at the cost of the oldest cached boundary if there is none; or 0."""
        if not self._free and self._cached:
            self._free.append(self._cached.pop(0).slot)
        if not self._free:
            return 0
        slot = min(self._free)
        self._free.remove(slot)
        return slot
