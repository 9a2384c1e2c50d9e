"""Operators on statements: what is left out, or comes in another order."""

import libcst as cst

from ci.mutants.operator import Place, Proposals, atom, called, operator

_BARRIERS = (
    *("debug_barrier", "barrier", "barrier_warp", "fence_async", "mbarrier_init_fence", "mbarrier_wait"),
    *("mbarrier_arrive", "mbarrier_expect", "bulk_wait_read", "bulk_commit", "wait_for_earlier_kernels"),
    *("start_later_kernels", "publish", "close", "griddepcontrol_wait", "fence_proxy", "sync_threads"),
)


def _only(node: cst.CSTNode) -> cst.BaseSmallStatement | None:
    """The statement of a line that has one."""
    return node.body[0] if isinstance(node, cst.SimpleStatementLine) and len(node.body) == 1 else None


@operator("barrier", 15, 16, 17, does="leave out a barrier, a fence or a wait")
def barrier(node: cst.CSTNode, place: Place) -> Proposals:
    """Calls that only order other accesses."""
    line = _only(node)
    if isinstance(line, cst.Expr) and called(line.value) in _BARRIERS and place.device:
        yield called(line.value), "pass"


@operator("call", 4, 8, 18, does="leave out a store or another call that stands by itself")
def call(node: cst.CSTNode, place: Place) -> Proposals:
    """In kernels; barriers have an operator of their own."""
    line = _only(node)
    if not isinstance(line, cst.Expr) or not place.device:
        return
    if isinstance(line.value, cst.Call) and called(line.value) not in _BARRIERS:
        yield "dropped", "pass"


@operator("early-return", 7, 9, 25, does="go on where a kernel ends early")
def early_return(node: cst.CSTNode, place: Place) -> Proposals:
    """``return`` without a value."""
    line = _only(node)
    if isinstance(line, cst.Return) and line.value is None and place.device:
        yield "dropped", "pass"


@operator("update", 4, 6, 25, does="leave out an update, or assign instead")
def update(node: cst.CSTNode, place: Place) -> Proposals:
    """``x += y`` and its kind."""
    line = _only(node)
    if isinstance(line, cst.AugAssign) and place.device:
        target, value = place.code(line.target), place.code(line.value)
        yield "dropped", "pass"
        sign = place.code(line.operator).strip()
        opposite = {"+=": "-", "-=": "+", "*=": "/"}.get(sign)
        if opposite and not isinstance(line.value, cst.Tuple):
            yield "opposite", f"{target} = {target} {opposite} {atom(value)}"


@operator("order", 4, 6, 15, does="swap two neighbouring statements of which one needs the other")
def order(node: cst.CSTNode, place: Place) -> Proposals:
    """In kernels. The text replaced is the first one's: ``sites`` puts it behind the second."""
    block = place.parent(node)
    if not place.device or not isinstance(node, cst.SimpleStatementLine):
        return
    if not isinstance(block, cst.IndentedBlock):
        return
    lines = list(block.body)
    index = lines.index(node)
    following = lines[index + 1] if index + 1 < len(lines) else None
    if not isinstance(following, cst.SimpleStatementLine):
        return
    one, two = _effects(node, place), _effects(following, place)
    if one is None or two is None:
        return
    # Two stores that nothing comes between may swap: no kernel writes one place twice in a row.
    if one[0] & two[1] or one[1] & two[0] or one[0] & two[0] - {"memory"}:
        yield "swapped", ""


def _effects(line: cst.SimpleStatementLine, place: Place) -> tuple[set[str], set[str]] | None:
    """Names that a line writes and names that it reads; None if it is no line to move."""
    statement = _only(line)
    if isinstance(statement, cst.Assign):
        targets = [each.target for each in statement.targets]
        written = {name for each in targets for name in _names(each)}
        return written, _names(statement.value)
    if isinstance(statement, cst.AugAssign):
        written = _names(statement.target)
        return written, written | _names(statement.value)
    if isinstance(statement, cst.Expr) and isinstance(statement.value, cst.Call):
        name = called(statement.value)
        # A barrier reads and writes whatever is in memory.
        memory = {"memory"}
        written = memory if name in _BARRIERS or "store" in name else set()
        return written, _names(statement.value) | (memory if name in _BARRIERS else set())
    return None


def _names(node: cst.CSTNode) -> set[str]:
    if isinstance(node, cst.Attribute):
        return _names(node.value)
    if isinstance(node, cst.Name):
        return {node.value}
    found: set[str] = {"memory"} if called(node) in ("load", "load_global", "load_shared") else set()
    return found.union(*(_names(child) for child in node.children))
