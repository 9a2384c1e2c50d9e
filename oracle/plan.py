"""Which slots a commit writes, and how many tokens it folds (contract, section 1.6, Plan)."""

from dataclasses import dataclass

NULL = 0


@dataclass(frozen=True)
class RowPlan:
    """One row's plan: ``n`` tokens into slot ``final``, the first ``m`` of them into ``boundary``."""

    n: int = 0
    final: int = NULL
    boundary: int = NULL
    m: int = 0

    @property
    def writes(self) -> bool:
        """Whether the row writes anything; without a final slot it does not, boundary or no."""
        return self.n > 0 and self.final > NULL

    @property
    def writes_boundary(self) -> bool:
        """Whether the row writes a boundary slot."""
        return self.writes and self.boundary > NULL


def plain(slot: int, qlen: int, window: int, accepted: int) -> RowPlan:
    """The plan without prefix caching: everything accepted goes into the row's own slot.

    n = min(max(accepted, 0), qlen, window); a null slot or n = 0 plans nothing.
    """
    n = min(max(accepted, 0), qlen, window)
    return RowPlan(n, slot) if slot > NULL and n > 0 else RowPlan()


def align(
    slot: int, qlen: int, window: int, accepted: int, computed: int, block_size: int, table: tuple[int, ...]
) -> RowPlan:
    """The plan with blocks of ``block_size`` tokens, ``computed`` tokens lying in them already.

    The final slot is that of the block with the last token; a block that fills up on the way
    gets the state at its end. ``ValueError``: the table has no column for that block.
    """
    n = plain(slot, qlen, window, accepted).n
    if n == 0:
        return RowPlan()
    column = min(max(computed + n - 1, 0) // block_size, len(table) - 1)
    end = (computed // block_size + 1) * block_size
    boundary = NULL
    if computed + n >= end:
        if end // block_size - 1 >= len(table):
            raise ValueError("the block table is too narrow for the block that fills up")
        boundary = table[end // block_size - 1]
    return RowPlan(n, table[column], boundary, end - computed)
