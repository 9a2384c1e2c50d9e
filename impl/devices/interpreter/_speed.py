"""Cheaper bookkeeping for the interpreter; no arithmetic is touched, results stay bit-identical.

Import only after TRITON_INTERPRET is set: this module imports Triton.
"""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

from ._operands import make_broadcast, make_cast, make_checking, make_unwrapping
from ._patching import Patches


class _LanguagePatch:
    """Upstream's patch of tl and tl.core, worked out once, then put on and taken off by plain setattr.

    Upstream searches both modules anew at each launch and again at each call of a jitted function
    (tl.sum, tl.sigmoid, ...), and leaves tl.core patched after the launch.
    """

    def __init__(self, compute: Callable) -> None:
        self._compute = compute
        self._changes: list[tuple[object, str, object, object]] = []
        self._on = False

    def __call__(self, _function: Any) -> "_LanguagePatch | SimpleNamespace":
        if self._on:
            return SimpleNamespace(restore=lambda: None)
        self._on = True
        if self._changes:
            for owner, name, _, patched in self._changes:
                setattr(owner, name, patched)
        else:
            self._learn()
        return self

    def _learn(self) -> None:
        scope = self._compute(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        first: dict[tuple[int, str], tuple[object, str, object]] = {}
        for owner, name, original in scope._changes:
            first.setdefault((id(owner), name), (owner, name, original))
        self._changes = [
            (o, name, original, _lean(original, vars(o)[name])) for o, name, original in first.values()
        ]

    def restore(self) -> None:
        """Put the language back as it was before the launch."""
        self._on = False
        for owner, name, original, _ in self._changes:
            if original is upstream._MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


_BUILTIN = tl.core.builtin(lambda: None).__code__
"""Of what upstream's decorator makes of a function: it asks for ``_semantic`` and calls the function."""


def _lean(original: Any, patched: Any) -> Any:
    """Upstream's patch of a builtin, without the two calls that only hand ``_semantic`` on."""
    ours = getattr(patched, "__kwdefaults__", None) == {"member": original}
    if not ours or getattr(original, "__code__", None) is not _BUILTIN:
        return patched
    function, semantic = original.__wrapped__, upstream.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _on_host(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type == "cpu"
    # Scalars, dtypes and None need no copy; anything else with memory or members goes upstream's way.
    return value is None or isinstance(value, (int, float, str, tl.dtype))


def _make_tensor_init(inner: Callable) -> Callable:
    # What a tensor derives from its shape alone, by that shape's object (blocks share them, see below);
    # upstream wraps every extent anew each time.
    derived: dict[int, tuple[Any, dict[str, Any]]] = {}

    def init(self: tl.tensor, handle: Any, kind: Any) -> None:
        shape = kind.shape if type(kind) is tl.block_type else None
        held, known = derived.get(id(shape), (None, None))
        if known is not None and held is shape:
            vars(self).update(known, handle=handle, type=kind, dtype=kind.scalar)
            return
        inner(self, handle, kind)
        if vars(self).keys() == {"handle", "type", "dtype", "shape", "numel"}:
            derived[id(shape)] = (shape, {"shape": self.shape, "numel": self.numel})

    return init


def _make_block_init(inner: Callable) -> Callable:
    # Likewise for a block type: everything but the element type itself follows from its name and the shape.
    derived: dict[tuple[Any, ...], dict[str, Any]] = {}
    # Blocks of one shape have it from here, whatever their elements: see make_broadcast.
    shapes: dict[tuple[int, ...], Any] = {}

    def init(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
        key = (element_ty.name, *shape)
        # Extents still wrapped as constexpr go upstream's way.
        plain = all(type(extent) is int for extent in key[1:])
        known = derived.get(key) if plain else None
        if known is not None:
            vars(self).update(known, element_ty=element_ty)
            return
        inner(self, element_ty, shape)
        if plain and vars(self).keys() == {"element_ty", "shape", "numel", "name"}:
            shape = shapes.setdefault(key[1:], self.shape)
            derived[key] = {"shape": shape, "numel": self.numel, "name": self.name}

    return init


def apply(patches: Patches) -> None:
    """Install the speedups.

    The language patch is learned once; host tensors are not copied to the host and back; dtypes, and what
    tensors and block types derive from their shapes, come from tables; what has the shape or the
    type already is neither broadcast nor cast; the int64 shadow arithmetic behind
    overflow assertions is left out unless assertions are on.
    """
    patches.replace(upstream, "_patch_lang", _LanguagePatch(upstream._patch_lang))

    builder = upstream.interpreter_builder
    if not builder.options.debug:
        patches.replace(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    def make_arguments(inner: Callable) -> Callable:
        def init_args(self: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if all(map(_on_host, args)) and all(map(_on_host, kwargs.values())):
                return args, kwargs
            return inner(self, args, kwargs)

        return init_args

    def make_restore(inner: Callable) -> Callable:
        def restore_args(self: Any, args: Any, args_hst: Any, kwargs: Any, kwargs_hst: Any) -> None:
            # The same objects came back from init_args: the kernel wrote the caller's memory itself.
            if args is not args_hst:
                inner(self, args, args_hst, kwargs, kwargs_hst)

        return restore_args

    def make_dtypes(inner: Callable) -> Callable:
        table: dict[str, Any] = {}

        def get_np_dtype(kind: Any) -> Any:
            kind = kind.scalar
            if isinstance(kind, tl.pointer_type):
                return inner(kind)
            if kind.name not in table:
                table[kind.name] = inner(kind)
            return table[kind.name]

        return get_np_dtype

    patches.wrap(upstream.GridExecutor, "_init_args_hst", make_arguments)
    patches.wrap(upstream.GridExecutor, "_restore_args_dev", make_restore)
    patches.wrap(upstream, "_get_np_dtype", make_dtypes)
    patches.wrap(tl.tensor, "__init__", _make_tensor_init)
    patches.wrap(tl.block_type, "__init__", _make_block_init)
    patches.wrap(TritonSemantic, "binary_op_type_checking_impl", make_checking)
    patches.wrap(TritonSemantic, "broadcast_impl_value", make_broadcast)
    patches.wrap(TritonSemantic, "cast", make_cast)
    patches.wrap(tl.core, "_unwrap_if_constexpr", make_unwrapping)
