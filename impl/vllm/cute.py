"""vLLM's shipped CuTe kernels, executed by the emulator behind their own host code.

The modules are the source's own. Replaced is only what asks for a GPU (architecture, number of
CTAs) and what the two compiling functions return: the same compiled kernel, emulated.
"""

import importlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from impl.contract import Implementation, UnavailableError
from impl.cute.compile import asked_architecture
from impl.cute.domains import ADDRESSED, domains
from impl.cute.emulator import settings
from impl.cute.emulator.compiled import Emulated, digest, emulated, why_absent
from impl.vllm.load import AbsentError, LoadedVllm
from impl.vllm.source import SourceError
from impl.vllm.standins import module_constants

ARCHITECTURE = "sm_100a"
"""Verify's only one, and commit's unless the environment asks for another."""
PATHS = {True: "warp-specialised", False: "plain"}
"""What verify's two kernels are called in reports, by ``warp_specialized``."""
_FOLDER = "vllm/models/kimi_k3/nvidia"
_VERIFY_NAMES = (
    "mixed_qkv", "raw_gate", "raw_beta", "A_log", "dt_bias", "state", "correction", "key_gate", "out",
    "query_start_loc", "state_indices", "conv_state", "conv_weight", "num_accepted_tokens", "counter",
)  # fmt: skip
_COMMIT_NAMES = (
    "state addresses", "correction addresses", "key_gate addresses", "state strides", "correction strides",
    "key_gate strides", "A_log", "dt_bias", "state_indices", "commit_lens", "final_state_indices",
    "boundary_state_indices", "boundary_recovery_lens",
)  # fmt: skip
_PARAMETERS = ("A_log", "dt_bias", "conv_weight")
_EARLY = {
    False: (*_PARAMETERS, "state", "state_indices"),
    True: (
        *_PARAMETERS,
        "state",
        "state_indices",
        "query_start_loc",
        "num_accepted_tokens",
        "conv_state",
        "counter",
    ),
}
"""What verify's kernels access before their dependency wait, by ``warp_specialized`` (contract, 1.7).

The warp-specialised one takes tickets so early: two launches of one object in a row must not overlap.
"""
DOMAINS = domains((1, 2, 3, 4))
DOMAINS["commit"] = replace(
    DOMAINS["commit"],
    records=("row",),
    dense=("state_indices",),
    aligned=(*ADDRESSED, "state_indices"),
)


def implementation(text: str, loaded: LoadedVllm, fallback: Implementation) -> Implementation:
    """The fused verify and the commit of a loaded vLLM; ``UnavailableError`` if it has no CuTe kernels.

    Serving takes the rest from ``fallback``, the Triton kernels of the same source.
    """
    why = why_absent()
    if why:
        raise UnavailableError(f"{text}: {why}")
    try:
        kernels = _Kernels(loaded)
        context = loaded.commit_context()
    except (AbsentError, SourceError) as error:
        raise UnavailableError(f"{text}: {error}") from None
    return Implementation(
        name=text,
        version=loaded.source.version,
        operations={"fused_verify": kernels.verify, "commit": on_cute(context, kernels.module)},
        arithmetic="factored-fp32",
        devices=("emulator",),
        domains=DOMAINS,
        path=kernels.path,
        set_conv_state_dim_first=loaded.set_conv_state_dim_first,
        fallback=fallback,
    )


class _Kernels:
    """The host module of a source's CuTe kernels, with its kernels emulated."""

    def __init__(self, loaded: LoadedVllm) -> None:
        self.module = loaded.cute()
        self._arch = asked_architecture(ARCHITECTURE)
        self._last = ""
        folder = loaded.source.root / _FOLDER
        self._text = digest(folder, sorted(folder.rglob("*.py")))
        for name in ("verify", "verify_ws"):
            _defer(f"{self.module.__package__}.cutedsl.{name}", folder / f"recoverssm/cutedsl/{name}.py")
        # Several implementations may share the loaded module; the last one made has it.
        own = self.module.__dict__.setdefault(
            "_kdafuzz_own", (self.module._compile_verify, self.module._compile_commit)
        )
        self._compile_verify, self._compile_commit = own
        substitutes = {
            "_architecture": lambda device: self._arch,
            # A constant of the compiled kernel: one number, not one for each schedule.
            "_ctas": lambda device, per_sm: settings.Settings().ctas,
            "_compile_verify": cache(self._emulated_verify),
            "_compile_commit": cache(self._emulated_commit),
        }
        for name, substitute in substitutes.items():
            setattr(self.module, name, substitute)

    @property
    def verify(self) -> type[Any]:
        """The class that callers construct per layer."""
        found: type[Any] = self.module.CuteRecoverSSMVerify
        return found

    def path(self) -> str:
        """The kernel that ran since it was last asked; nothing if none did."""
        last, self._last = self._last, ""
        return last

    def _emulated_verify(
        self,
        heads: int,
        window: int,
        arch: str,
        ctas: int,
        warp_specialized: bool,
        conv_dim_first: bool,
        conv_weight_dtype: torch.dtype,
    ) -> Callable[..., None]:
        given = (heads, window, ARCHITECTURE, ctas, warp_specialized, conv_dim_first, conv_weight_dtype)
        written = ("correction", "key_gate", "out", "conv_state", "counter")
        return self._told(
            PATHS[warp_specialized],
            emulated(
                self._facts("verify", given),
                lambda: self._compile_verify(*given),
                _VERIFY_NAMES,
                written,
                _EARLY[warp_specialized],
            ),
        )

    def _emulated_commit(
        self, heads: int, window: int, arch: str, param_dtype: torch.dtype, align: bool
    ) -> Callable[..., None]:
        given = (heads, window, arch, param_dtype, align)
        return self._told(
            "cute",
            emulated(
                self._facts("commit", given), lambda: self._compile_commit(*given), _COMMIT_NAMES, (), ()
            ),
        )

    def _facts(self, kernel: str, given: tuple[object, ...]) -> dict[str, str]:
        return {"text": self._text, "kernel": kernel, "arguments": repr(given)}

    def _told(self, path: str, function: Emulated) -> Callable[..., None]:
        def call(*arguments: object) -> None:
            self._last = path
            function(*arguments)

        return call


def on_cute(context: type[Any], kernels: ModuleType) -> type[Any]:
    """The commit context with the CuTe kernel as its fold, compiled when the context is made."""

    class Context(context):
        @classmethod
        def create(cls, layers: Any, *, spec_query_len: int, max_num_reqs: int) -> Any:
            made = super().create(
                layers, spec_query_len=spec_query_len, max_num_reqs=max_num_reqs, backend="cute"
            )
            state = made.checkpoints[0]
            for align in (False, True):
                kernels.compile_state_commit(state.shape[1], spec_query_len, state.device, align)
            return made

    Context.__name__ = Context.__qualname__ = context.__name__
    return Context


class _Deferred(ModuleType):
    """A kernel module that is imported, and the DSL with it, when more than its constants is asked for."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(name)
        self._constants = module_constants(path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in self._constants:
            return self._constants[name]
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


def _defer(name: str, path: Path) -> None:
    if name not in sys.modules:
        sys.modules[name] = _Deferred(name, path)
