"""vLLM's shipped CuTe kernels on a GPU: compiled by the DSL, or from a folder of ``kdafuzz aot``.

The commit runs on SM90 and SM10x GPUs; the fused verify needs SM10x and the DSL. The emulator's side is
``impl.vllm.cute``.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from impl.contract import Implementation, UnavailableError
from impl.cute import aot
from impl.cute.compile import architecture
from impl.cute.emulator.compiled import digest
from impl.vllm.cute import on_cute
from impl.vllm.load import AbsentError, LoadedVllm, load
from impl.vllm.source import SourceError, resolve, split_flavour

_HOST = "vllm.models.kimi_k3.nvidia.recoverssm.kernels"
_FOLDER = "vllm/models/kimi_k3/nvidia"
KERNEL = "vllm commit"
"""What a manifest calls the shipped commit."""


def implementation(text: str) -> Implementation:
    """The commit and, on SM10x, the fused verify of ``vllm..:cute``; ``UnavailableError`` in one line."""
    try:
        loaded = load(resolve(split_flavour(text)[0]))
        module, context = host_module(text), loaded.commit_context()
    except (AbsentError, SourceError) as error:
        raise UnavailableError(f"{text}: {error}") from None
    _serve_from_libraries(text, loaded, module)
    operations: dict[str, Callable[..., object]] = {"commit": on_cute(context, module)}
    absent = {"fused_verify": "vLLM's fused verify needs an SM10x GPU and nvidia-cutlass-dsl"}
    if architecture(torch.device("cuda")).startswith("sm_10") and _has_dsl():
        operations["fused_verify"] = module.CuteRecoverSSMVerify
    return Implementation(
        name=text,
        version=loaded.source.version,
        operations=operations,
        arithmetic="factored-fp32",
        devices=("cuda",),
        absent=absent,
        set_conv_state_dim_first=loaded.set_conv_state_dim_first,
    )


def host_module(text: str) -> ModuleType:
    """The host side of a source's CuTe kernels, as whoever made an implementation of it left it."""
    return load(resolve(split_flavour(text)[0])).module(_HOST)


def _serve_from_libraries(text: str, loaded: LoadedVllm, module: ModuleType) -> None:
    """Have the module find its compiled commit in a library where there is one."""
    compile_commit, source = _own_compiler(module), _source(loaded)

    @cache
    def found(heads: int, window: int, arch: str, dtype: torch.dtype, align: bool) -> Callable[..., None]:
        name = _name(source, arch, heads, window, align)
        library = aot.loaded(name)
        if library is not None:
            return library
        if not _has_dsl():
            raise UnavailableError(
                f"no library holds {name}; install kdafuzz[cute], or point ${aot.FOLDER_VARIABLE} at a "
                f"folder of kdafuzz aot --impl {text} --kernel commit --heads {heads}"
            )
        compiled: Callable[..., None] = compile_commit(heads, window, arch, dtype, align)
        return compiled

    substitutes = {"_compile_commit": found, "_architecture": architecture}
    for name, substitute in substitutes.items():
        setattr(module, name, substitute)


def commits(
    text: str, arches: Sequence[str], heads: Sequence[int], windows: Sequence[int]
) -> Iterator[aot.Foreign]:
    """The shipped commit's variants, for ``impl.cute.aot.build``; ``UnavailableError`` if there is none."""
    try:
        loaded = load(resolve(split_flavour(text)[0]))
        compile_commit = _own_compiler(loaded.cute())
    except (AbsentError, SourceError) as error:
        raise UnavailableError(f"{text}: {error}") from None
    source = _source(loaded)
    for arch in arches:
        for h in heads:
            for window in windows:
                for align in (False, True):
                    yield _foreign(compile_commit, source, arch, h, window, align)


def _foreign(
    compile_commit: Callable[..., Any], source: str, arch: str, heads: int, window: int, align: bool
) -> aot.Foreign:
    facts = {"kernel": KERNEL, "source": source, "arch": arch, "window": window}
    return aot.Foreign(
        _name(source, arch, heads, window, align),
        {**facts, "options": {"heads": heads, "align": align}},
        lambda: compile_commit(heads, window, arch, torch.float32, align),
    )


def _name(source: str, arch: str, heads: int, window: int, align: bool) -> str:
    """The function's name in libraries; it names the source, so that another source's is never found."""
    return f"vllm_commit_{source[:12]}_{arch}_h{heads}_q{window}" + ("_align" if align else "")


def _source(loaded: LoadedVllm) -> str:
    folder = loaded.source.root / Path(_FOLDER)
    return digest(folder, sorted(folder.rglob("*.py")))


def _own_compiler(module: ModuleType) -> Callable[..., Any]:
    """The module's own ``_compile_commit``, whatever stands in its place by now."""
    kept: Callable[..., Any] = module.__dict__.setdefault(
        "_kdafuzz_own", (module._compile_verify, module._compile_commit)
    )[1]
    return kept


def _has_dsl() -> bool:
    return importlib.util.find_spec("cutlass") is not None
