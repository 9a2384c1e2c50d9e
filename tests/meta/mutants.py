"""Case files spoiled in every way that a disk, an editor, a merge or an attacker might.

A mutant is made from the corpus and a number: structural ones change the JSON tree and are
written again, byte-level ones change the bytes. Most lose their checksum, for with it hardly
any gets past the comparison of values, and what comes after that is to be reached too.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oracle.values import REGIMES
from tests.meta.wild_json import Pairs, Place, Raw, places, text


@dataclass(frozen=True)
class Mutant:
    """The bytes of a case file, and what was done to it."""

    name: str
    kinds: tuple[str, ...]
    data: bytes


Change = Callable[[random.Random, dict[str, Any]], None]

NUMBERS: tuple[Any, ...] = (
    *(-(2**63), -65537, -101, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 63, 64, 65, 128, 4096, 4097),
    *(65535, 65536, 2**31 - 1, 2**31, 2**53, 2**63, 2**64, 10**40, 0.1, 1.5, -5.5, 1e300, 2.0),
    *map(Raw, ("NaN", "-Infinity", "1e999", "-0", "-0.0", "1e-400", "9" * 5000, "01", "0x10", "1e2", "+1")),
)
OTHERS: tuple[Any, ...] = (None, True, False, 0, -1, 1.5, "", "x", [], {}, [[]], [None], {"a": 1}, [1, 2, 3])
TEXTS: tuple[Any, ...] = (
    *("../../escaped", "/tmp/kdafuzz-escaped", "a/b", "a\\b", "..", "", " ", "-", "--impl", "a\nb", "a\r\nb"),
    *("\x1b[2J\x1b]0;title\x07", "[/red][bold]", "nul\0", "\u202etxt", "\u2028", "🎈" * 40, "x" * 100_000),
    *map(Raw, ('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\\x"', "'x'", '"')),
    *("nan", "huge", "normal", "zero", "specials", "extreme", "bfloat16", "float16", "float32", "float64"),
    *("row", "slot", "int64", "varlen", "batch", "single", "above", "below", "none", "prefill", "finish"),
    *("triton", "vllm:/", "vllm:\0", "module:factory", "os:getcwd", "cpu", "cuda", "no device"),
)
DIMENSIONS = (
    *("heads", "key_dim", "value_dim", "pool", "window", "channels", "state_len", "capacity", "most_tokens"),
    *("chunk", "layers", "width", "block_size", "part_dim", "tail", "gap"),
)
LARGE = (1, 2, 8, 64, 129, 256, 1000, 1024, 4096, 16384, 65535, 65536, 65537, 2**31, 10**12)
OPERATIONS = (
    "verify",
    "conv_update",
    "conv_prefill",
    "packed_conv",
    "commit",
    "fused_verify",
    "serve",
    "fold",
)
RELATIONS = ("repeat", "graph", "other_poison", "split", "unpacked", "nothing")


def _pick(rng: random.Random, tree: dict[str, Any], *kinds: type) -> Place:
    found = [(n, k) for n, k in places(tree) if not kinds or isinstance(n[k], kinds)]
    inside = [(n, k) for n, k in found if n is not tree]
    return rng.choice(inside or found or [(tree, next(iter(tree), "kdafuzz"))])


def _of_call(rng: random.Random, tree: dict[str, Any], *kinds: type) -> Place:
    call = _call(tree)
    found = [(call, key) for key in call if not kinds or isinstance(call[key], kinds)]
    return rng.choice(found) if found else _pick(rng, tree)


def _call(tree: dict[str, Any]) -> dict[str, Any]:
    case = tree.get("case")
    call = case.get("call") if isinstance(case, dict) else None
    return call if isinstance(call, dict) else {}


def _case(tree: dict[str, Any]) -> dict[str, Any]:
    case = tree.get("case")
    return case if isinstance(case, dict) else {}


def _other_type(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree)
    node[key] = rng.choice(OTHERS)


def _number(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree, int, float)
    node[key] = rng.choice(NUMBERS)


def _nudge(rng: random.Random, tree: dict[str, Any]) -> None:
    """A near value, so that the file often stays a case."""
    node, key = _pick(rng, tree, int, float)
    old = node[key]
    if isinstance(old, bool):
        node[key] = not old
    elif isinstance(old, int | float):
        node[key] = rng.choice((old + 1, old - 1, old * 2, old // 2, 0, 1))


def _nest(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree)
    depth = rng.choice((2, 30, 1000, 20_000))
    left, right = rng.choice((("[", "]"), ('{"a":', "}"), ('{"call":', "}")))
    node[key] = Raw(left * depth + "1" + right * (depth if rng.random() < 0.7 else 0))


def _unknown(rng: random.Random, tree: dict[str, Any]) -> None:
    inside = [tree, *(n[k] for n, k in places(tree) if isinstance(n[k], dict))]
    rng.choice(inside)[rng.choice(("extra", "", "op", "kind", "../x", "call", "window"))] = rng.choice(OTHERS)


def _missing(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree) if rng.random() < 0.5 else _of_call(rng, tree)
    if key in node or isinstance(node, list):
        del node[key]


def _twice(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree, dict)
    if not isinstance(node[key], dict) or not node[key]:
        return
    pairs = Pairs(node[key].items())
    name, old = rng.choice(pairs)
    pairs.insert(rng.randrange(len(pairs) + 1), (name, rng.choice((old, *OTHERS[:6]))))
    node[key] = pairs


def _lengths(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _of_call(rng, tree, list) if rng.random() < 0.7 else _pick(rng, tree, list)
    old = node[key]
    if isinstance(old, list) and not isinstance(old, Pairs):
        few = old[: rng.randrange(len(old) + 1)]
        node[key] = rng.choice((few, old[::-1], old + old[-1:], [*old, 0], old * 2, old * 300, []))


def _enormous(rng: random.Random, tree: dict[str, Any]) -> None:
    call = _call(tree)
    for name in rng.sample([n for n in DIMENSIONS if n in call] or ["heads"], 1):
        call[name] = rng.choice(LARGE)
    for name in DIMENSIONS:
        if name in call and rng.random() < 0.2:
            call[name] = rng.choice(LARGE)
    if rng.random() < 0.3 and isinstance(call.get("qlens"), list) and call["qlens"]:
        call["qlens"][rng.randrange(len(call["qlens"]))] = rng.choice(LARGE)


def _memory(rng: random.Random, tree: dict[str, Any]) -> None:
    """Layouts and pages of any shape, for tensors that the call may have."""
    sizes = (0, 0, 1, 3, 16, 48, 2**20, 2**30, 2**62, -1)

    def some(most: int) -> list[int]:
        return [rng.choice(sizes) for _ in range(rng.randrange(most))]

    names = ["q", "k", "v", "state", "x", "conv_state", "weight", "state.0", "key_gate", "mixed_qkv", "../x"]
    if rng.random() < 0.7:
        layout = {
            "offset": rng.choice(sizes),
            "gaps": some(5),
            "fence": rng.choice(("none", "above", "below")),
        }
        if rng.random() < 0.3:
            layout["order"] = rng.choice(([0], [1, 0], [0, 1, 2], [2, 1, 0], [0, 0], [3, 2, 1, 0]))
        old = _case(tree).get("layouts")
        _case(tree)["layouts"] = {**(old if isinstance(old, dict) else {}), rng.choice(names): layout}
    else:
        page = {"members": rng.sample(names, rng.randrange(4)), "gaps": some(4), "tail": rng.choice(sizes)}
        _case(tree)["pages"] = [page] * rng.choice((1, 1, 2, 1000))


def _name(rng: random.Random, tree: dict[str, Any]) -> None:
    node, key = _pick(rng, tree, str)
    if isinstance(node, dict) and rng.random() < 0.2:
        node[rng.choice(TEXTS)] = node.pop(key, 0)
    else:
        node[key] = rng.choice(TEXTS)


def _operation(rng: random.Random, tree: dict[str, Any]) -> None:
    _call(tree)["op"] = rng.choice(OPERATIONS)


def _regime(rng: random.Random, tree: dict[str, Any]) -> None:
    table = rng.choice([*REGIMES, "state_indices", "out", "../x"])
    words = [word for regimes in REGIMES.values() for word in regimes]
    own = list(REGIMES.get(table, ()))
    old = _case(tree).get("regimes")
    chosen = rng.choice(own) if own and rng.random() < 0.7 else rng.choice([*words, *TEXTS])
    _case(tree)["regimes"] = {**(old if isinstance(old, dict) else {}), table: chosen}


def _relation(rng: random.Random, tree: dict[str, Any]) -> None:
    qlens = _call(tree).get("qlens")
    rows = len(qlens) if isinstance(qlens, list) else 2
    pool = _call(tree).get("pool")
    slots = list(range(pool if isinstance(pool, int) and 0 < pool < 100 else 3))
    shuffled = [0, *rng.sample(slots[1:], len(slots) - 1)]
    count = rng.choice((0, 1, 2, 7, 65536, 65537, -1))
    _case(tree)["relation"] = rng.choice(
        (
            {"kind": rng.choice(RELATIONS)},
            {"kind": "prefix", "cut": count},
            {"kind": "hostile", "row": rng.choice((0, 1, rows)), "token": count},
            {"kind": "permute", "order": rng.sample(range(rows), rows)},
            {"kind": "permute", "order": [count] * rows},
            {"kind": "rename", "names": rng.choice((shuffled, slots, slots[::-1], [0] * len(slots)))},
            {"kind": "relayout", "layouts": {"state": {"offset": 16}}, "pages": rng.choice(([], [{}], None))},
            {"kind": "relayout", "layouts": {"q": {"gaps": [count, 0, 0]}, "v": {"offset": 1}}},
        )
    )


def _envelope(rng: random.Random, tree: dict[str, Any]) -> None:
    value = rng.choice((*TEXTS, *OTHERS, *NUMBERS))
    if rng.random() < 0.4:
        tree["found"] = {rng.choice(("implementation", "device", "problem", "../x")): value}
    else:
        tree[rng.choice(("kdafuzz", "checksum", "why", "found", "case"))] = value


def _seed(rng: random.Random, tree: dict[str, Any]) -> None:
    _case(tree)["seed"] = rng.choice((0, 1, rng.randrange(2**53), 2**53 - 1, 2**53, -1))
    _case(tree)["poison"] = rng.choice(("nan", "huge", "huge", "none"))


def _rows(rng: random.Random, tree: dict[str, Any]) -> None:
    """Other rows in every list that has one entry a row, so that the batch often stays one."""
    call = _call(tree)
    qlens = call.get("qlens")
    if not isinstance(qlens, list) or not qlens:
        return
    count = len(qlens)
    order = rng.choice((rng.sample(range(count), count), list(range(rng.randrange(count)))))
    for name, entries in call.items():
        if isinstance(entries, list) and not isinstance(entries, Pairs) and len(entries) == count:
            call[name] = [entries[i] for i in order]


CHANGES: dict[str, Change] = {
    "other type": _other_type,
    "number": _number,
    "near number": _nudge,
    "deep nesting": _nest,
    "unknown field": _unknown,
    "missing field": _missing,
    "key twice": _twice,
    "list length": _lengths,
    "enormous": _enormous,
    "memory": _memory,
    "text": _name,
    "operation": _operation,
    "regime": _regime,
    "relation": _relation,
    "envelope": _envelope,
    "seed": _seed,
    "rows": _rows,
}
OFTEN = ("near number", "enormous", "memory", "regime", "relation", "seed", "rows")
"""What often leaves a case: drawn three times as often as the others."""


def _flipped(rng: random.Random, data: bytes, _: bytes) -> bytes:
    changed = bytearray(data)
    for _flip in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _spliced(rng: random.Random, data: bytes, other: bytes) -> bytes:
    return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]


BYTES: dict[str, Callable[[random.Random, bytes, bytes], bytes]] = {
    "bits flipped": _flipped,
    "truncated": lambda rng, data, _: data[: rng.randrange(len(data))],
    "spliced": _spliced,
    "another part repeated": lambda rng, data, other: data + other,
    "byte order mark": lambda rng, data, _: b"\xef\xbb\xbf" + data,
    "UTF-16": lambda rng, data, _: data.decode().encode("utf-16"),
    "compressed": lambda rng, data, _: gzip.compress(data, mtime=0),
    "empty": lambda rng, data, _: rng.choice((b"", b"\n", b"\0", b"null", b"{}", b"[]")),
    "noise": lambda rng, data, _: rng.randbytes(rng.randrange(1, 400)),
    "line ends": lambda rng, data, _: data.replace(b"\n", b"\r\n"),
    "zeros inside": lambda rng, data, _: data.replace(b" ", b"\0", rng.randrange(1, 5)),
    "long": lambda rng, data, _: data + b" " * rng.choice((1 << 19, 1 << 20, 1 << 21)),
}


def mutants(corpus: Path, count: int, seed: int) -> Iterator[Mutant]:
    """``count`` mutants of the cases in ``corpus``: the same ones for the same seed."""
    files = [path.read_bytes() for path in sorted(corpus.rglob("*.json"))]
    for index in range(count):
        rng = random.Random(f"{seed} {index}")
        name = f"{index:06d}-{rng.randrange(16**8):08x}.json"
        data, other = rng.choice(files), rng.choice(files)
        if rng.random() < 0.15:
            kind = rng.choice(list(BYTES))
            yield Mutant(name, (kind,), BYTES[kind](rng, data, other))
            continue
        tree = json.loads(data)
        kinds = tuple(rng.choice((*CHANGES, *OFTEN, *OFTEN)) for _ in range(rng.choice((1, 1, 1, 2, 3))))
        for kind in kinds:
            CHANGES[kind](rng, tree)
        if rng.random() < 0.8 and "checksum" in tree:
            del tree["checksum"]
        yield Mutant(name, kinds, text(tree).encode("utf-8", "surrogatepass"))
