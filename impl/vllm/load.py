"""Loads the KDA kernel modules of a vLLM source, and nothing else of vLLM.

`load(resolve("vllm@0.33.0")).verify()` is the shipped function. Modules load when first asked for, in well
under a second; sources of several versions live side by side in one process.
"""

import hashlib
import importlib
import importlib.util
import inspect
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from impl.vllm.imports import PrivateRoot, mount, unmount
from impl.vllm.source import Source, SourceError

__all__ = ["AbsentError", "LoadedVllm", "RecordLayout", "load"]

_RECOVERSSM = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
_CONV = "vllm.model_executor.layers.mamba.ops.causal_conv1d"
_PACKED_CONV = "vllm.models.kimi_k3.nvidia.ops.kda_conv"
_CUTE = "vllm.models.kimi_k3.nvidia.recoverssm.kernels"
_CUTE_INSTALL = 'install the CuTe DSL: pip install "kdafuzz[cute]"'

RecordLayout = Literal["row", "slot"]


class AbsentError(LookupError):
    """A module, function or dependency that this vLLM or this machine lacks; the message is one sentence."""


class LoadedVllm:
    """The kernel modules of one source, loaded as they are asked for.

    Under TRITON_INTERPRET=1 (as it stands when `load` is called) the Triton kernels are interpreted ones.
    """

    def __init__(self, source: Source, root: PrivateRoot) -> None:
        self.source = source
        self._root = root
        self._gone = False

    def __repr__(self) -> str:
        return f"LoadedVllm({self.source.label}, {self.source.root})"

    def module(self, dotted: str) -> ModuleType:
        """Return the module that vLLM calls `dotted` ("vllm.a.b").

        Raises AbsentError if the source has no such module or something it imports is missing, SourceError
        if its code is broken (as in a bad revision).
        """
        if self._gone:
            raise SourceError(f"{self.source.label} was unloaded; load it again")
        private = self._root.private(dotted)
        try:
            return importlib.import_module(private)
        except ImportError as error:
            raise AbsentError(self._explain(dotted, error)) from error
        except Exception as error:
            raise SourceError(
                f"cannot load {dotted} of {self.source.label}: {type(error).__name__}: {error}"
            ) from error

    def attribute(self, dotted: str, name: str) -> Any:
        """Return the attribute `name` of a module; raise AbsentError if the module or it is not there."""
        module = self.module(dotted)
        try:
            return getattr(module, name)
        except AttributeError:
            where = _file_of(dotted)
            raise AbsentError(f"absent in {self.source.label}: no {name} in {where}") from None

    def verify(self) -> Callable[..., Any]:
        """Return the function `kda_recoverssm_verify`."""
        function: Callable[..., Any] = self.attribute(_RECOVERSSM, "kda_recoverssm_verify")
        return function

    def record_layout(self) -> RecordLayout:
        """Tell the record layout by verify's signature: "row" (per batch row) or "slot" (per state slot)."""
        names = inspect.signature(self.verify()).parameters
        if "records" in names:
            return "row"
        if "correction_cache" in names and "kg_cache" in names:
            return "slot"
        raise AbsentError(f"absent in {self.source.label}: no known record layout in {', '.join(names)}")

    def records_class(self) -> type[Any] | None:
        """Return `KDARecoverSSMRecords`, None in the slot layout."""
        return getattr(self.module(_RECOVERSSM), "KDARecoverSSMRecords", None)

    def commit_context(self) -> type[Any]:
        """Return the class `KDARecoverSSMCommitContext`."""
        context: type[Any] = self.attribute(_RECOVERSSM, "KDARecoverSSMCommitContext")
        return context

    def conv(self) -> ModuleType:
        """Return the module with `causal_conv1d_update` and `causal_conv1d_fn`."""
        return self.module(_CONV)

    def conv_function(self, name: str) -> Callable[..., Any]:
        """Return a function of that module."""
        function: Callable[..., Any] = self.attribute(_CONV, name)
        return function

    def packed_conv(self) -> ModuleType:
        """Return the module with `packed_causal_conv1d_fn` and `packed_causal_conv1d_supported`.

        No release up to 0.33.0 has it.
        """
        return self.module(_PACKED_CONV)

    def packed_conv_function(self) -> Callable[..., Any]:
        """Return `packed_causal_conv1d_fn`."""
        function: Callable[..., Any] = self.attribute(_PACKED_CONV, "packed_causal_conv1d_fn")
        return function

    def cute(self) -> ModuleType:
        """Return the module with the host side of the CuTe kernels (from 0.33.0).

        Raises AbsentError if the source has none, or if the CuTe DSL that they compile with is not installed.
        """
        module = self.module(_CUTE)
        if not _has_cutlass():
            raise AbsentError(f"the CuTe kernels of {self.source.label} need cutlass.cute; {_CUTE_INSTALL}")
        return module

    def constants(self) -> dict[str, int]:
        """Return NULL_BLOCK_ID and PAD_SLOT_ID as the source itself has them."""
        utils = self.module("vllm.v1.attention.backends.utils")
        return {name: getattr(utils, name) for name in ("NULL_BLOCK_ID", "PAD_SLOT_ID")}

    def set_conv_state_dim_first(self, flag: bool) -> None:
        """Set what `is_conv_state_dim_first()` answers: True for stored `[S, C, P]`; it is False at first."""
        self._root.layout.dim_first = bool(flag)

    def unload(self) -> None:
        """Drop the modules, for loops over many revisions; functions taken from them can import no more."""
        with _LOCK:
            _LOADED.pop(self._root.name, None)
        self._gone = True
        unmount(self._root)

    def _explain(self, dotted: str, error: ImportError) -> str:
        missing = error.name or ""
        if isinstance(error, ModuleNotFoundError) and missing.partition(".")[0] == self._root.name:
            asked = self._root.public(missing)
            if f"{dotted}.".startswith(f"{asked}."):
                return f"absent in {self.source.label}: no module {_file_of(dotted)}"
            return f"{error} (imported by {dotted})"
        if missing.partition(".")[0] in ("cutlass", "cuda"):
            return f"{dotted} of {self.source.label} needs {missing}; {_CUTE_INSTALL}"
        said = str(error).replace(self._root.name, "vllm")
        return f"cannot load {dotted} of {self.source.label}: {said}"


_LOADED: dict[str, LoadedVllm] = {}
_LOCK = threading.Lock()


def load(source: Source) -> LoadedVllm:
    """Return a source's loaded form: one object for the same files under the same TRITON_INTERPRET.

    Touches no module yet, so it raises nothing; the finders of LoadedVllm do.
    """
    facts = f"{source.identity}\0{source.root}\0{_interpreting()}"
    name = f"kdafuzz_vllm_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"
    with _LOCK:
        if name not in _LOADED:
            root = PrivateRoot(name, source.label, source.root)
            mount(root)
            _LOADED[name] = LoadedVllm(source, root)
        return _LOADED[name]


def _interpreting() -> bool:
    try:
        import triton
    except ImportError:
        return False
    return bool(triton.knobs.runtime.interpret)


def _has_cutlass() -> bool:
    spec = importlib.util.find_spec("cutlass")
    # The package index has an unrelated distribution of that name.
    places = spec.submodule_search_locations if spec else None
    return any((Path(place) / "cute").is_dir() for place in places or ())


def _file_of(dotted: str) -> str:
    return dotted.replace(".", "/") + ".py"
