"""CuTe kernels compiled ahead of time: libraries that run on a machine without the DSL.

``build`` writes a library a variant and a manifest; ``load`` makes a folder's functions the ones
that ``impl.cute.compile`` gives for a GPU. Loading needs apache-tvm-ffi, and the DSL's
``libcute_dsl_runtime.so``, which $CUTE_DSL_RUNTIME names where the DSL is not installed. The
host code in a library is compiled for the processor of the machine that built it; another one
must have its instructions (AVX, say).
"""

import ctypes
import hashlib
import importlib
import importlib.util
import json
import os
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from impl.contract import UnavailableError
from impl.cute.compile import KERNELS, Variant, make, source_digest

FOLDER_VARIABLE = "KDAFUZZ_CUTE_AOT"
"""Environment variable: a folder of ``build`` that is loaded when a kernel is first wanted on a GPU."""
RUNTIME_VARIABLE = "CUTE_DSL_RUNTIME"
"""Environment variable: the DSL's runtime library."""
MANIFEST = "manifest.json"
_FORMAT = 1
_SECTION = struct.Struct("<IIQQQQIIQQ")
_REGISTERS, _FRAME = 0x2F, 0x11
"""Attributes of a cubin's ``.nv.info``: registers of a thread, and bytes of its local memory."""


@dataclass(frozen=True)
class Foreign:
    """A kernel of other sources, as a library beside ours; ``make`` is one call of ``cute.compile``.

    Its name must change whenever its sources do: that alone keeps a stale one from being found.
    ``facts`` are ``kernel``, ``source``, ``arch``, ``window`` and ``options`` of its entry.
    """

    name: str
    facts: Mapping[str, Any]
    make: Callable[[], Any]


def build(variants: Iterable[Variant | Foreign], folder: Path) -> Iterator[dict[str, Any]]:
    """Compile variants into a folder, yielding each one's entry; the manifest is written at the end.

    What the folder's manifest held before stays in it, but for entries of other sources of ours.

    ``UnavailableError`` without the DSL or a C compiler; ``RuntimeError`` tells what the linker said.
    """
    _require_dsl()
    folder.mkdir(parents=True, exist_ok=True)
    entries = _before(folder)
    for variant in variants:
        entry = _library(variant, folder)
        entries[variant.name] = entry
        yield entry
    text = json.dumps({"format": _FORMAT, "kernels": entries}, indent=1, sort_keys=True)
    (folder / MANIFEST).write_text(text + "\n")


def _before(folder: Path) -> dict[str, dict[str, Any]]:
    """The entries of a folder's manifest that are still good."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        entries: dict[str, dict[str, Any]] = manifest["kernels"] if manifest["format"] == _FORMAT else {}
        return {name: x for name, x in entries.items() if not _stale(x) and (folder / x["library"]).exists()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _stale(entry: dict[str, Any]) -> bool:
    """Whether an entry was made from other sources of ours."""
    return entry["kernel"] in KERNELS and entry["source"] != source_digest(entry["kernel"])


def _require_dsl() -> None:
    if importlib.util.find_spec("cutlass") is None:
        raise UnavailableError("compiling CuTe kernels needs nvidia-cutlass-dsl; install kdafuzz[cute]")


def load(folder: Path) -> tuple[str, ...]:
    """Make a folder's variants available; their names. Libraries are opened when they are asked for.

    ``UnavailableError``: no folder of ``build``, one of other sources, no runtime library, or no
    apache-tvm-ffi.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        form, entries = manifest["format"], manifest["kernels"]
        found = {name: folder / entry["library"] for name, entry in entries.items()}
        stale = [name for name, x in entries.items() if _stale(x)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnavailableError(f"{folder} is no folder of kdafuzz aot ({type(error).__name__})") from None
    if form != _FORMAT:
        raise UnavailableError(f"{folder} has format {form}; this kdafuzz reads {_FORMAT}: build it again")
    if stale:
        raise UnavailableError(f"{folder} was made from other kernel sources ({stale[0]}); build it again")
    _preload()
    _LIBRARIES.update(found)
    return tuple(found)


def loaded(name: str) -> Callable[..., None] | None:
    """The function of that name in the folders loaded, the environment's included; None if no one has it."""
    _load_environment()
    path = _LIBRARIES.get(name)
    if path is None:
        return None
    import tvm_ffi

    function: Callable[..., None] = tvm_ffi.load_module(path).get_function(name)
    return function


def cached(variant: Variant) -> Callable[..., None]:
    """A variant's function from the cache folder, built if need be; many processes may ask at once."""
    from impl.cute.emulator.compiled import _key
    from impl.vllm.cache import Files, materialise

    name = f"{variant.name}.so"

    def files(work: Path) -> Files:
        _link(variant.name, lambda: make(variant), work / name)
        yield name, (work / name).read_bytes()

    facts = {"text": source_digest(variant.kernel), "library": variant.name}
    folder = materialise(f"cute-{_key(facts)}", files)
    _preload()
    import tvm_ffi

    function: Callable[..., None] = tvm_ffi.load_module(folder / name).get_function(variant.name)
    return function


def described(variant: Variant) -> dict[str, Any]:
    """A variant's entry as ``build`` gives it, from the cache folder; compiled if it is not there."""
    from impl.cute.emulator.compiled import _key
    from impl.vllm.cache import Files, materialise

    def files(work: Path) -> Files:
        yield MANIFEST, json.dumps(_library(variant, work)).encode()

    _require_dsl()
    facts = {"text": source_digest(variant.kernel), "entry": variant.name, "format": str(_FORMAT)}
    entry: dict[str, Any] = json.loads((materialise(f"cute-{_key(facts)}", files) / MANIFEST).read_text())
    return entry


_LIBRARIES: dict[str, Path] = {}


@cache
def _load_environment() -> None:
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        load(Path(folder))


@cache
def _preload() -> None:
    """Put the DSL's runtime where the libraries find its symbols."""
    if importlib.util.find_spec("tvm_ffi") is None:
        raise UnavailableError("compiled CuTe kernels need apache-tvm-ffi; install it")
    path = os.environ.get(RUNTIME_VARIABLE) or _installed_runtime()
    if not path:
        raise UnavailableError(
            f"compiled CuTe kernels need the DSL's libcute_dsl_runtime.so; name it in ${RUNTIME_VARIABLE}"
        )
    try:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise UnavailableError(f"cannot load {path}: {error}") from None


def _installed_runtime() -> str:
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(place).glob("*/lib/libcute_dsl_runtime.so"))
        if found:
            return str(found[0])
    return ""


def _library(variant: Variant | Foreign, folder: Path) -> dict[str, Any]:
    library = folder / f"{variant.name}.so"
    if isinstance(variant, Foreign):
        cubin, facts = _link(variant.name, variant.make, library), {**variant.facts, "shared": None}
    else:
        cubin, facts = _link(variant.name, lambda: make(variant), library), _facts(variant)
    return {
        "name": variant.name,
        "library": library.name,
        "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
        **facts,
        "cubin": len(cubin),
        **resources(cubin),
    }


def _facts(variant: Variant) -> dict[str, Any]:
    kernel = KERNELS[variant.kernel]
    shared = getattr(importlib.import_module(kernel.module), "shared_bytes", None)
    return {
        "kernel": variant.kernel,
        "source": source_digest(variant.kernel),
        "arch": variant.arch,
        "window": variant.window,
        "options": dict(variant.options),
        "arguments": list(kernel.arguments),
        "shared": shared(variant) if shared else None,
    }


def _link(name: str, compiling: Callable[[], Any], library: Path) -> bytes:
    """Compile a kernel into a library with a function of that name; its cubin."""
    from impl.cute.emulator.compiled import artifact_kept
    from impl.cute.emulator.host import compiler

    cc = compiler()
    if cc is None:
        raise UnavailableError("linking CuTe kernels needs a C compiler; install cc")
    with tempfile.TemporaryDirectory() as work:
        with artifact_kept("cubin", Path(work)):
            compiled = compiling()
        exported = Path(work) / "kernel.o"
        compiled.export_to_c(str(exported), function_name=name)
        done = subprocess.run(
            [cc, "-shared", "-o", str(library), str(exported)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"cannot link {name}: {done.stderr.strip()[-1000:]}")
        cubin: bytes = compiled.artifacts.CUBIN
    return cubin


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread and bytes of its stack frame, spills included; the most of any kernel within.

    Read from the ELF's ``.nv.info`` section: entries of format, attribute, size and value.
    """
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [_SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    names = sections[names_at][4]
    found = {"registers": 0, "frame": 0}
    for name, _, _, _, offset, length, *_ in sections:
        if cubin[names + name : cubin.index(b"\0", names + name)] != b".nv.info":
            continue
        at = offset
        while at < offset + length:
            form, attribute, value = struct.unpack_from("<BBH", cubin, at)
            at += 4
            if form != 4:  # the value stands in the entry itself
                continue
            key = {_REGISTERS: "registers", _FRAME: "frame"}.get(attribute)
            if key:
                found[key] = max(found[key], struct.unpack_from("<I", cubin, at + 4)[0])
            at += value
    return found
