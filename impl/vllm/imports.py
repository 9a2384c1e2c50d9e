"""An import system in miniature: vLLM modules under a private root package, one per source.

`vllm.a.b` of a source becomes `<private root>.a.b`: absolute imports of vllm in a module's text are renamed
before it is compiled, in function bodies too, so versions live side by side and a late import finds its own.
Guarantees: no package `__init__` runs; only the needed files of `cache` and the stand-ins can be imported;
lines keep their numbers and the text that ran is what `inspect` shows (Triton and CuTe compile from it).
Not guaranteed: a module named by a string (`importlib.import_module("vllm...")`) is not renamed.
"""

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from impl.vllm.cache import is_needed
from impl.vllm.standins import BUILDERS, ConvStateLayout


class PrivateRoot:
    """One source tree (`folder` holds `vllm/`) mounted as the top-level package `name`."""

    def __init__(self, name: str, label: str, folder: Path) -> None:
        self.name = name
        self.label = label
        self.folder = folder
        self.layout = ConvStateLayout()

    def private(self, dotted: str) -> str:
        """Return the private name of `vllm.a.b`."""
        return self.name + dotted.removeprefix("vllm")

    def public(self, fullname: str) -> str:
        """Return the vLLM name of a private one."""
        return "vllm" + fullname.removeprefix(self.name)

    def spec(self, fullname: str) -> importlib.machinery.ModuleSpec:
        """Say how to import that private name; raise ModuleNotFoundError, naming the file, if absent."""
        dotted = self.public(fullname)
        relative = dotted.replace(".", "/")
        if dotted in BUILDERS:
            return importlib.machinery.ModuleSpec(
                fullname, _StandIn(self, dotted), origin=f"stand-in for {dotted}"
            )
        folder = self.folder / relative
        if folder.is_dir() or any(name.startswith(f"{dotted}.") for name in BUILDERS):
            spec = importlib.machinery.ModuleSpec(fullname, _EmptyPackage(), is_package=True)
            spec.submodule_search_locations = [str(folder)]
            return spec
        path = self.folder / f"{relative}.py"
        if not path.is_file():
            raise ModuleNotFoundError(f"absent in {self.label}: no module {relative}.py", name=fullname)
        if not is_needed(f"{relative}.py"):
            text = f"cannot load {dotted} of {self.label}: it is outside the kernels and has no stand-in"
            raise ModuleNotFoundError(text, name=fullname)
        real = importlib.util.spec_from_file_location(fullname, path, loader=_Renamed(self, path))
        assert real is not None
        return real


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.roots: dict[str, PrivateRoot] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        root = self.roots.get(fullname.partition(".")[0])
        # Raising, not None: the path finder would go on and import the file with imports of the real vllm.
        return root.spec(fullname) if root else None


_FINDER = _Finder()


def mount(root: PrivateRoot) -> None:
    """Make the root importable under its name."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _FINDER.roots[root.name] = root


def unmount(root: PrivateRoot) -> None:
    """Forget the root and its modules; functions taken from them live on, but can import no more."""
    _FINDER.roots.pop(root.name, None)
    for name in [name for name in sys.modules if name == root.name or name.startswith(f"{root.name}.")]:
        del sys.modules[name]


class _EmptyPackage(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(importlib.abc.Loader):
    def __init__(self, root: PrivateRoot, dotted: str) -> None:
        self.root = root
        self.dotted = dotted

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(BUILDERS[self.dotted](self.root.folder, self.root.layout))


class _Renamed(importlib.abc.Loader):
    def __init__(self, root: PrivateRoot, path: Path) -> None:
        self.root = root
        self.path = path

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        text = rename_imports(importlib.util.decode_source(self.path.read_bytes()), self.root.name)
        # The interpreter reads a kernel's source at its first launch, when the tree may hold another text.
        # Without a time, the entry is never checked against the file.
        linecache.cache[str(self.path)] = (len(text), None, text.splitlines(keepends=True), str(self.path))
        exec(compile(text, str(self.path), "exec", dont_inherit=True), module.__dict__)  # noqa: S102 - loading code is the task


def rename_imports(text: str, name: str) -> str:
    """Turn absolute imports of `vllm` in a module text to `name`, line for line.

    `import vllm.x` still binds `vllm` in its scope. Raises SyntaxError as the compiler would.
    """
    data = text.encode()
    starts = [0, *(match.end() for match in re.finditer(b"\n", data))]
    # (offset, old length, new bytes), all in UTF-8 bytes, as the syntax tree counts columns.
    edits: list[tuple[int, int, bytes]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_vllm(node.module):
            head = re.compile(rb"from[\s\\]+").match(data, starts[node.lineno - 1] + node.col_offset)
            assert head is not None
            edits.append((head.end(), len(b"vllm"), name.encode()))
        elif isinstance(node, ast.Import):
            for alias in filter(lambda alias: _is_vllm(alias.name), node.names):
                # Without `as` the statement binds the top package, so bind ours under that name.
                new = alias.name.replace("vllm", name, 1) + ("" if alias.asname else f", {name} as vllm")
                edits.append(
                    (starts[alias.lineno - 1] + alias.col_offset, len(alias.name.encode()), new.encode())
                )
    for offset, length, new_bytes in sorted(edits, reverse=True):
        data = data[:offset] + new_bytes + data[offset + length :]
    return data.decode()


def _is_vllm(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "vllm"
