"""Which functions of a source tree an operation reaches, and which of them run in kernels.

By names: a function reaches what its text names in its own module and in those that it imports
from. That is more than is ever called, never less, but for functions found by a string.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MODULE = "<module>"
"""The function that a module's own constants count as."""
_KERNELS = ("jit", "kernel")


@dataclass(frozen=True)
class Function:
    """A function or method, by file and qualified name; ``kernel`` if its decorators say so."""

    file: str
    name: str
    kernel: bool = False
    uses: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, str]:
        """What names it."""
        return self.file, self.name


@dataclass
class _Module:
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, list[str]] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Local name -> (module, name there; empty for a module)."""


class Tree:
    """The modules of a tree by file, as ``impl/triton/verify.py``."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._modules = {file: _read(file, text) for file, text in texts.items()}

    def functions(self) -> Iterator[Function]:
        """Every function."""
        for module in self._modules.values():
            yield from module.functions.values()

    def reached(self, entries: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
        """Keys of what these functions, methods or classes reach, themselves included."""
        found: set[tuple[str, str]] = set()
        todo = [key for file, name in entries for key in self._named(file, name)]
        while todo:
            key = todo.pop()
            if key in found:
                continue
            found.add(key)
            todo += self._successors(*key)
        return frozenset(found)

    def present(self, entries: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Those of the entries that are there; ``*`` stands for every function of a file."""
        return tuple((file, name) for file, name in entries if self._named(file, name))

    def imported(self, files: Iterable[str]) -> frozenset[str]:
        """The files, and those that they import, and so on."""
        found: set[str] = set()
        todo = [file for file in files if file in self._modules]
        while todo:
            file = todo.pop()
            if file not in found:
                found.add(file)
                for dotted, name in self._modules[file].imports.values():
                    todo += self._files(dotted) + self._files(f"{dotted}.{name}")
        return frozenset(found)

    def device(self) -> frozenset[tuple[str, str]]:
        """Keys of what runs in kernels."""
        return self.reached(each.key for each in self.functions() if each.kernel)

    def _successors(self, file: str, name: str) -> list[tuple[str, str]]:
        module = self._modules[file]
        function = module.functions.get(name)
        if function is None:
            return []
        result = []
        for used in function.uses:
            result += self._named(file, used)
            place, there = module.imports.get(used, ("", ""))
            if place:
                result += self._in_module(place, there, function.uses)
        # A method is found by its last name, in its own module.
        result += [(file, other) for other in module.functions if other.rpartition(".")[2] in function.uses]
        return result

    def _in_module(self, dotted: str, name: str, uses: frozenset[str]) -> list[tuple[str, str]]:
        for file in self._files(dotted):
            if name and not self._files(f"{dotted}.{name}"):
                return [
                    *self._named(file, name),
                    *(
                        (file, each)
                        for each in self._modules[file].functions
                        if self._method(file, each, uses)
                    ),
                ]
        whole = self._files(f"{dotted}.{name}" if name else dotted)
        return [(file, each) for file in whole for each in self._modules[file].functions if each in uses]

    def _method(self, file: str, function: str, uses: frozenset[str]) -> bool:
        owner, _, name = function.rpartition(".")
        return bool(owner) and name in uses

    def _files(self, dotted: str) -> list[str]:
        path = dotted.replace(".", "/") + ".py"
        return [file for file in self._modules if file == path or file.endswith("/" + path)]

    def _named(self, file: str, name: str) -> list[tuple[str, str]]:
        module = self._modules.get(file)
        if module is None:
            return []
        if name == "*":
            return [(file, each) for each in module.functions]
        if name in module.classes:
            return [(file, method) for method in module.classes[name]]
        return [(file, name)] if name in module.functions else []


def _read(file: str, text: str) -> _Module:
    module = _Module()
    package = ".".join(PurePosixPath(file).parent.parts)
    for node in ast.walk(tree := ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*parts, base) if base else parts)
            for alias in node.names:
                module.imports[alias.asname or alias.name] = (base, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                module.imports[alias.asname or alias.name.rpartition(".")[2]] = (alias.name, "")
    for qualified, function in _definitions(tree):
        uses = frozenset(_uses(function))
        module.functions[qualified] = Function(file, qualified, _is_kernel(function), uses)
        owner = qualified.rpartition(".")[0]
        if owner:
            module.classes.setdefault(owner, []).append(qualified)
    return module


def _definitions(node: ast.AST, owner: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods; one within another counts as part of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield owner + child.name, child
        elif isinstance(child, ast.ClassDef):
            yield from _definitions(child, f"{owner}{child.name}.")
        elif isinstance(child, ast.If | ast.Try):
            yield from _definitions(child, owner)


def _uses(function: ast.FunctionDef) -> Iterator[str]:
    for node in (child for part in function.body for child in ast.walk(part)):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr


def _is_kernel(function: ast.FunctionDef) -> bool:
    for node in function.decorator_list:
        called = node.func if isinstance(node, ast.Call) else node
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if name in _KERNELS:
            return True
    return False
