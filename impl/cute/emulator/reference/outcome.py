"""How an instruction or a step of a warp ended, beyond having been executed."""

from enum import Enum, auto


class Outcome(Enum):
    """``BLOCKED``: nothing was executed. ``YIELDED``: let others move; ``POLLED``: and it found nothing."""

    BLOCKED = auto()
    YIELDED = auto()
    POLLED = auto()
