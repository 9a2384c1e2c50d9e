"""What a commit's plan comes to: counts, where blocks end, and which slots coincide."""

from oracle.calls.commit import Commit
from oracle.plan import RowPlan

Flags = dict[str, bool]


def counts(call: Commit) -> Flags:
    """Accepted counts of live rows, against the row's tokens and the window."""
    pairs = [
        (call.accepted[call.request(row)], call.qlens[row]) for row in range(call.rows) if call.live(row)
    ]
    return {
        "counts: zero": any(a == 0 for a, _ in pairs),
        "counts: negative": any(a < 0 for a, _ in pairs),
        "counts: some of the query": any(0 < a < n for a, n in pairs),
        "counts: all of the query": any(a == n for a, n in pairs),
        "counts: over the query": any(a > n for a, n in pairs),
        "counts: the window": any(a == n == call.window for a, n in pairs),
        "counts: over the window": any(a > call.window for a, _ in pairs),
    }


def blocks(call: Commit) -> Flags:
    """Computed tokens nc, folded ones n and block size B of the rows that fold: edges of each."""
    aligned = call.block_size > 0
    plans = [call.plan(row) for row in range(call.rows)]
    live = [row for row in range(call.rows) if call.live(row) and plans[row].n > 0] if aligned else []
    spots = [_spot(call, row, plans[row]) for row in live]
    ends = [plan for plan in plans if plan.writes_boundary]
    return {
        "mode: plain": not aligned,
        "mode: blocks": aligned,
        "blocks: of one window": call.block_size == call.window,
        "blocks: nothing computed": any(nc == 0 for nc, _, _ in spots),
        "blocks: computed to a block's end": any(nc > 0 and nc % B == 0 for nc, _, B in spots),
        "blocks: computed to one before": any(nc % B == B - 1 for nc, _, B in spots if B > 1),
        "blocks: past the first": any(nc >= B for nc, _, B in spots),
        "blocks: ended one short": any((nc + n) % B == B - 1 for nc, n, B in spots if B > 1),
        "blocks: crossed": any(plan.m < plan.n for plan in ends),
        "blocks: crossed by one": any(plan.m == plan.n - 1 for plan in ends),
        "blocks: crossed after one": any(plan.m == 1 < plan.n for plan in ends),
        "blocks: ended exactly": any(plan.m == plan.n for plan in ends),
        "blocks: final null": any(plans[row].final <= 0 for row in live),
        "blocks: boundary null": any(_boundary_is_null(call, row, plans[row]) for row in live),
        "blocks: ended, next null": any(_next_is_null(call, row) for row in live),
        "blocks: clamped": any(_clamped(call, row) for row in live),
    }


def slots(call: Commit) -> Flags:
    """Source, boundary and final slot of the rows that write."""
    plans = [(call.slots[row], call.plan(row)) for row in range(call.rows)]
    writing = [(slot, plan) for slot, plan in plans if plan.writes]
    ends = [(slot, plan) for slot, plan in writing if plan.writes_boundary]
    return {
        "slots: source is final": any(slot == plan.final for slot, plan in writing),
        "slots: source is final, several tokens": any(
            slot == plan.final and plan.n > 1 for slot, plan in writing
        ),
        "slots: source is not final": any(slot != plan.final for slot, plan in writing),
        "slots: source is boundary": any(slot == plan.boundary for slot, plan in ends),
        "slots: source is boundary alone": any(slot == plan.boundary != plan.final for slot, plan in ends),
        "slots: source is final, with a boundary": any(
            slot == plan.final != plan.boundary for slot, plan in ends
        ),
        "slots: boundary is final": any(plan.boundary == plan.final for _, plan in ends),
        "slots: boundary is final, source is not": any(
            slot != plan.boundary == plan.final for slot, plan in ends
        ),
        "slots: all one": any(slot == plan.boundary == plan.final for slot, plan in ends),
        "slots: all differ": any(len({slot, plan.final, plan.boundary}) == 3 for slot, plan in ends),
    }


def _spot(call: Commit, row: int, plan: RowPlan) -> tuple[int, int, int]:
    return call.computed[call.request(row)], plan.n, call.block_size


def _boundary_is_null(call: Commit, row: int, plan: RowPlan) -> bool:
    """Whether a block fills up that has no slot, while the last token's has one."""
    nc, n, size = _spot(call, row, plan)
    return nc + n >= (nc // size + 1) * size and plan.boundary <= 0 < plan.final


def _next_is_null(call: Commit, row: int) -> bool:
    """Whether the commit ends exactly on a block boundary and the next block is not allocated."""
    r, plan = call.request(row), call.plan(row)
    column = (call.computed[r] + plan.n) // call.block_size
    exactly = (call.computed[r] + plan.n) % call.block_size == 0
    return exactly and (column >= len(call.table[r]) or call.table[r][column] <= 0)


def _clamped(call: Commit, row: int) -> bool:
    r, n = call.request(row), call.plan(row).n
    return (call.computed[r] + n - 1) // call.block_size >= len(call.table[r])
