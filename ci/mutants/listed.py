"""``equivalents.toml``: mutants that no valid call can show, and those beyond what a case can hold.

``[[equivalent]]`` has ``keys`` and ``why``; its mutants are not judged. ``[[beyond]]`` has ``why``,
``caught`` (what finds such faults all the same) and ``keys`` or ``operators``; a mutant of those
operators is judged, and set aside if it survives.
"""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ci.mutants.sites import OPERATORS, Mutant
from impl.contract import UnavailableError, one_line

LIST = Path(__file__).with_name("equivalents.toml")
_TABLES = {"equivalent": {"keys", "why"}, "beyond": {"keys", "operators", "why", "caught"}}


@dataclass(frozen=True)
class Entry:
    """Mutants that are listed, and why; ``caught`` only beyond."""

    kind: str
    why: str
    keys: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    caught: str = ""


@dataclass(frozen=True)
class Listed:
    """The entries of a list."""

    entries: tuple[Entry, ...] = ()

    def of(self, mutant: Mutant) -> Entry | None:
        """The entry that names this mutant by its key."""
        return next((each for each in self.entries if mutant.key in each.keys), None)

    def beyond(self, operator: str) -> Entry | None:
        """The entry that sets survivors of this operator aside."""
        return next((each for each in self.entries if operator in each.operators), None)

    def stale(self, mutants: Iterable[Mutant], modules: Iterable[str]) -> list[str]:
        """Keys of these modules that name no mutant any more."""
        there, modules = {each.key for each in mutants}, set(modules)
        return [
            key
            for each in self.entries
            for key in each.keys
            if key not in there and key.partition(" ")[0] in modules
        ]


def read_listed(path: Path = LIST) -> Listed:
    """The list; ``UnavailableError`` in one line if it is not usable."""
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UnavailableError(f"cannot read {path}: {one_line(error)}") from None
    entries = []
    for kind, given in table.items():
        if kind not in _TABLES or not isinstance(given, list):
            raise UnavailableError(
                f"{path} needs its entries as [[equivalent]] or [[beyond]]; found {kind!r}"
            )
        for number, fields in enumerate(given, 1):
            wrong = _wrong(kind, fields)
            if wrong:
                raise UnavailableError(f"{path}: [[{kind}]] {number} {wrong}")
            keys, operators = tuple(fields.get("keys", ())), tuple(fields.get("operators", ()))
            entries.append(Entry(kind, fields["why"], keys, operators, fields.get("caught", "")))
    _require_once(path, entries)
    return Listed(tuple(entries))


def _wrong(kind: str, fields: dict[str, object]) -> str:
    if unknown := fields.keys() - _TABLES[kind]:
        return f"has an unknown field {min(unknown)!r}"
    for name in ("why", "caught"):
        text = fields.get(name, "" if name == "why" or kind == "beyond" else "-")
        if not isinstance(text, str) or not text.strip():
            return f"needs a text as {name}"
    for name in ("keys", "operators"):
        given = fields.get(name, [])
        if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
            return f"needs a list of texts as {name}"
    if not fields.get("keys") and not fields.get("operators"):
        return "names no mutant"
    operators: Sequence[str] = fields.get("operators", [])  # type: ignore[assignment]
    unknown_operator = next((each for each in operators if each not in OPERATORS), None)
    return f"names no operator: {unknown_operator!r}" if unknown_operator is not None else ""


def _require_once(path: Path, entries: list[Entry]) -> None:
    keys = [key for each in entries for key in each.keys]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise UnavailableError(f"{path} lists {twice!r} twice")
