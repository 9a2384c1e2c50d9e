"""What is searched: a history of things that one implementation each can be made of."""

from typing import Literal

import msgspec


class Item(msgspec.Struct, frozen=True):
    """A revision, a release, a wheel, or a version of a package.

    ``name`` is what reports call it, ``parents`` are positions in the history, ``about`` is a
    revision's date, author and subject. With a ``package`` (``triton==3.6.0``) the implementation runs
    in an environment that has it.
    """

    name: str
    implementation: str
    parents: tuple[int, ...] = ()
    about: str = ""
    package: str = ""


class History(msgspec.Struct, frozen=True):
    """Items in topological order, parents first: some at the old end, the last at the new one.

    The first is the old end itself; the ``known_old`` - 1 behind it are ancestors of it that
    items have as parents. ``notes`` are for the user, who may ``claim`` what the old end is.
    """

    items: tuple[Item, ...]
    known_old: int = 1
    notes: tuple[str, ...] = ()
    claim: Literal["", "good", "bad"] = ""

    @property
    def parents(self) -> tuple[tuple[int, ...], ...]:
        """Of each item."""
        return tuple(item.parents for item in self.items)


def listed(items: "list[Item]", notes: tuple[str, ...] = ()) -> History:
    """The history of a list: each item has the one before as its parent."""
    chained = [
        msgspec.structs.replace(item, parents=(at - 1,) if at else ()) for at, item in enumerate(items)
    ]
    return History(tuple(chained), 1, notes)
