"""JSON as nobody should write it: parts that stand as they are, keys that come twice."""

import json
from typing import Any


class Raw(str):
    """JSON that is written as it stands, sound or not."""

    __slots__ = ()


class Pairs(list[tuple[Any, Any]]):
    """The members of an object, where a key may come twice."""


Place = tuple[Any, Any]
"""A dictionary or list, and the key of one of its entries."""


def places(node: Any) -> list[Place]:
    """Every entry of every dictionary and list below ``node``."""
    if isinstance(node, dict):
        keys: Any = node.keys()
    elif isinstance(node, list) and not isinstance(node, Pairs):
        keys = range(len(node))
    else:
        return []
    return [found for key in keys for found in ((node, key), *places(node[key]))]


def text(node: Any) -> str:
    """JSON of a tree that may hold raw parts and keys that come twice."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, dict | Pairs):
        pairs = node.items() if isinstance(node, dict) else node
        return "{" + ", ".join(f"{json.dumps(str(key))}: {text(value)}" for key, value in pairs) + "}"
    if isinstance(node, list):
        return "[" + ", ".join(map(text, node)) + "]"
    return json.dumps(node)
