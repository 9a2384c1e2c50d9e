"""A case's call as a caller makes it: the public function is reached with arguments, and calls nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from impl.arena import Arena
from impl.bindings import BINDINGS
from impl.contract import Implementation, Records
from impl.devices.base import Segment
from impl.devices.cpu import PAGE, CpuMemory, _Mapping
from impl.devices.registry import open_device
from oracle.case import Case
from oracle.values import build

Wrap = Callable[[str, Callable[..., Any]], Callable[..., Any]]


class PagedDevice:
    """Memory of whole pages, as the CPU device has it, but without its interpreter."""

    name = "paged"

    def memory(self, segments: Sequence[Segment]) -> CpuMemory:
        """New memory for these segments."""
        return CpuMemory(segments, [_Mapping(-(-s.size // PAGE) * PAGE) for s in segments])

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Done(Exception):  # noqa: N818 (it is no error)
    """The call was reached."""


def call(case: Case, wrap: Wrap) -> None:
    """Make the case's call of ``wrap(operation, function)``, where the function does nothing."""
    open_device("cpu")  # before our kernels' modules, which import Triton
    from impl.triton.commit import set_conv_state_dim_first

    arena = Arena(case, build(case), PagedDevice())  # whose memory goes with it
    views = arena.views()
    plain = Implementation("none", {}, set_conv_state_dim_first=set_conv_state_dim_first)
    try:
        BINDINGS[case.op](case.call, views, _callee(case.op, wrap), plain)()
    except _Done:
        return
    raise AssertionError("the call was not made")


def arguments_of(case: Case) -> dict[str, Any]:
    """What the function of a verify is called with, copies that outlive its memory."""
    seen: dict[str, Any] = {}

    def wrap(operation: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def note(**kwargs: Any) -> Any:
            seen.update({name: _copied(value) for name, value in kwargs.items()})
            return function(**kwargs)

        return note

    call(case, wrap)
    return seen


def _copied(value: Any) -> Any:
    if isinstance(value, Records):
        return Records(value.correction.clone(), value.key_gate.clone())
    return value.clone() if isinstance(value, torch.Tensor) else value


def _callee(operation: str, wrap: Wrap) -> Any:
    def reached(**arguments: Any) -> Any:
        raise _Done

    if operation == "commit":
        from impl.triton.commit import KDARecoverSSMCommitContext

        class Context(KDARecoverSSMCommitContext):
            """A real context whose commit does nothing."""

            def commit(
                self,
                num_accepted_tokens: torch.Tensor,
                state_indices: torch.Tensor,
                query_start_loc: torch.Tensor,
                request_indices: torch.Tensor | None = None,
                block_table: torch.Tensor | None = None,
                num_computed_tokens: torch.Tensor | None = None,
                mamba_block_size: int | None = None,
            ) -> None:
                raise _Done

        Context.commit = wrap(operation, Context.commit)  # type: ignore[method-assign]
        return Context
    if operation == "fused_verify":

        class Wrapper:
            """As much of a fused verify as its caller sees."""

            def __init__(self, **facts: Any) -> None:
                self.__dict__ |= facts

            def compile(self) -> None:
                """Nothing to compile."""

            def __call__(self, **arguments: Any) -> bool:
                raise _Done

        Wrapper.__call__ = wrap(operation, Wrapper.__call__)  # type: ignore[method-assign]
        return Wrapper
    return wrap(operation, reached)
