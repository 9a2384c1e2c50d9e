"""The CuTe kernels of this project as an implementation: ``--impl cute``."""

from collections.abc import Sequence
from typing import Any, Literal

import torch

from impl.contract import Implementation
from impl.cute.compile import MAX_WINDOW, architecture
from impl.cute.domains import domains
from impl.cute.host import CuteRecoverSSMVerify, compile_state_commit
from impl.triton.commit import KDARecoverSSMCommitContext, set_conv_state_dim_first

_HEADS = (1, 2, 3, 4, 5, 8, 16)


def implementation() -> Implementation:
    """Commit with the CuTe fold, and the fused verify; on a GPU or on the emulator.

    Serving takes the rest from the Triton kernels.
    """
    from impl.registry import resolve

    if not torch.cuda.is_available():
        architecture(torch.device("cpu"))  # refuses an unknown name before any case runs
    path = _Path()
    return Implementation(
        name="cute",
        version="own",
        operations={"commit": path.told_by_commit(), "fused_verify": path.told_by_verify()},
        arithmetic="factored-fp32",
        devices=("emulator", "cuda"),
        domains=domains(_HEADS, MAX_WINDOW),
        path=path.take,
        set_conv_state_dim_first=set_conv_state_dim_first,
        fallback=resolve("triton"),
    )


class _Path:
    """Remembers which kernel ran since it was last asked."""

    def __init__(self) -> None:
        self._last = ""

    def take(self) -> str:
        """The kernel, or nothing if none ran."""
        last, self._last = self._last, ""
        return last

    def told_by_commit(self) -> type[Any]:
        """The commit context with the CuTe fold, compiled when the context is made."""
        path = self

        class Context(KDARecoverSSMCommitContext):
            @classmethod
            def create(
                cls,
                layers: Sequence[Any],
                *,
                spec_query_len: int,
                max_num_reqs: int,
                backend: Literal["cute", "triton"] = "cute",
            ) -> KDARecoverSSMCommitContext:
                made = super().create(
                    layers, spec_query_len=spec_query_len, max_num_reqs=max_num_reqs, backend=backend
                )
                state = made.checkpoints[0]
                for align in (False, True):
                    compile_state_commit(
                        state.shape[1], spec_query_len, state.device, align, by_slot=made.by_slot
                    )
                return made

            def commit(self, *arguments: Any, **named: Any) -> None:
                path._last = "cute"
                super().commit(*arguments, **named)

        Context.__name__ = Context.__qualname__ = KDARecoverSSMCommitContext.__name__
        return Context

    def told_by_verify(self) -> type[Any]:
        """The wrapper of the fused verify."""
        path = self

        class Verify(CuteRecoverSSMVerify):
            def __call__(self, **named: Any) -> bool:
                self.path = ""
                launched = super().__call__(**named)
                path._last = self.path
                return launched

        Verify.__name__ = Verify.__qualname__ = CuteRecoverSSMVerify.__name__
        return Verify
