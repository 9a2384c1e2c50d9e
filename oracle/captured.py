"""Captured values: a sidecar file holds blocks of real inputs, and a case names the part that it uses.

A sidecar is a safetensors file in one canonical form. A row's tokens, its states and its records
are blocks of their own, ``TENSOR/ID``, parameters are ``TENSOR``, and the axes of a block always
come in the same order, mixed ones divided (the channels of a fused projection are part, head and
k): so rows, heads, layers and channels can be left out and what remains is bit for bit as it
was. Its digest is that of its contents. A case has the digest alone; where the file is, a process
is told by ``register``.

What a case reads and the sidecar does not hold, or not all of, is drawn from the seed like any
other value. Numbers pass through float64, which is exact but for the payload of a NaN.
"""

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from oracle.calls.base import Call, Count, Place
from oracle.layout import DTYPES, FLOATS, TensorSpec

Array = npt.NDArray[Any]
Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]

SUFFIX = ".safetensors"
SCHEMA = 1
MAX_BYTES = 1 << 31
"""A larger file is refused: a case has at most 1 GiB of tensors."""
MARK = "kdafuzz"
"""The metadata's key that tells a sidecar from other safetensors files."""
AXES = ("part", "head", "token", "position", "half", "v", "k", "channel", "column", "tap")
"""The order of a block's axes in the file."""


class SidecarError(ValueError):
    """Captured values that cannot be had; one line says why."""


class Captured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a case uses of the sidecar with this digest.

    Values of ``tables`` come from it, by the ids of the case's rows. ``heads`` and ``layers`` are the
    captured ones that the call's are, in order, empty where a call has none; ``key``, ``value`` and
    ``channel`` are the first captured channels that it has.
    """

    digest: Digest
    tables: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=16)]
    heads: tuple[Count, ...] = ()
    layers: tuple[Count, ...] = ()
    key: Count = 0
    value: Count = 0
    channel: Count = 0

    def check(self, call: Call) -> None:
        """Raise ``ValueError`` unless it speaks of the heads, layers and tables of the call."""
        for name, chosen in (("heads", self.heads), ("layers", self.layers)):
            if len(chosen) != getattr(call, name, 0) or len(set(chosen)) != len(chosen):
                raise ValueError(f"captured {name} must name one for each of the call's, all distinct")
        held = {spec.table for spec in call.tensors().values() if drawable(spec)}
        unknown = sorted(set(self.tables) - held)
        if unknown or not self.tables or len(set(self.tables)) != len(self.tables):
            raise ValueError(f"captured tables must be distinct ones of the call; found {self.tables}")

    def head(self, head: int) -> int:
        """The captured head that the call's is."""
        return self.heads[head] if self.heads else head

    def name(self, name: str) -> str:
        """A tensor's name with the captured layer in place of the call's."""
        kind, dot, layer = name.partition(".")
        return f"{kind}.{self.layers[int(layer)]}" if dot else name


def drawable(spec: TensorSpec) -> bool:
    """Whether a tensor's elements are values that a case may have from a sidecar."""
    return spec.role in ("token", "slot", "parameter")


@dataclass(frozen=True)
class Sidecar:
    """Blocks by key, and what their axes begin with: the heads they have, their first channels."""

    blocks: Mapping[str, torch.Tensor]
    heads: tuple[int, ...] = ()
    key: int = 0
    value: int = 0
    channel: int = 0
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        digest = hashlib.blake2b(json.dumps(self.places()).encode(), digest_size=8)
        for name in sorted(self.blocks):
            block = self.blocks[name]
            digest.update(f"{name} {block.dtype} {tuple(block.shape)}\n".encode())
            digest.update(block.flatten().view(torch.uint8).numpy().tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    def places(self) -> dict[str, Any]:
        """What is said of the axes in the file."""
        return {"heads": self.heads, "key": self.key, "value": self.value, "channel": self.channel}

    def data(self, about: Mapping[str, str] | None = None) -> bytes:
        """The file's bytes, with more metadata beside its own."""
        mine = {MARK: str(SCHEMA), "axes": json.dumps(self.places()), "digest": self.digest}
        return bytes(save(dict(self.blocks), {**mine, **(about or {})}))


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and metadata of a safetensors file; ``SidecarError`` where there is none."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise SidecarError(f"{path}: cannot read: it is no regular file")
        if status.st_size > MAX_BYTES:
            raise SidecarError(
                f"{path}: {status.st_size} bytes; captured inputs have at most {MAX_BYTES}: dump fewer rows"
            )
        with safe_open(path, "pt") as file:
            # Copies: a mapped file that somebody cuts short would end the process.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, file.metadata() or {}
    except OSError as error:
        raise SidecarError(f"{path}: cannot read: {error.strerror or error}") from None
    except (SafetensorError, RuntimeError, UnicodeError) as error:
        raise SidecarError(f"{path}: not a safetensors file: {error}") from None


def decode(
    tensors: Mapping[str, torch.Tensor], about: Mapping[str, str], name: str, digest: str = ""
) -> Sidecar:
    """The sidecar with these contents; ``SidecarError`` unless they are one, with this digest if given."""
    if about.get(MARK) != str(SCHEMA):
        raise SidecarError(f"{name}: not a sidecar of captured values that this kdafuzz reads")
    try:
        places = msgspec.json.decode(about.get("axes", ""), type=_Places)
    except (msgspec.DecodeError, RecursionError):
        raise SidecarError(f"{name}: its metadata do not say which heads and channels it holds") from None
    odd = [key for key, block in tensors.items() if str(block.dtype).removeprefix("torch.") not in FLOATS]
    if odd:
        raise SidecarError(f"{name}: {odd[0][:60]!r} has the dtype {tensors[odd[0]].dtype}")
    made = Sidecar(tensors, places.heads, places.key, places.value, places.channel)
    wanted = digest or about.get("digest", "")
    if made.digest != wanted:
        raise SidecarError(f"{name}: holds other values than it should (digest {made.digest}, not {wanted})")
    return made


class _Places(msgspec.Struct, forbid_unknown_fields=True):
    heads: tuple[Count, ...]
    key: Count
    value: Count
    channel: Count


_paths: dict[str, Path] = {}
_held: dict[str, Sidecar] = {}
_MOST_HELD = 2


def register(digest: str, path: Path) -> None:
    """Say where the sidecar with this digest lies, for all later cases of this process."""
    _paths[digest] = path.absolute()


def hold(source: Sidecar, path: Path) -> None:
    """The same of a sidecar that is read or made already."""
    register(source.digest, path)
    _held.pop(source.digest, None)
    _held[source.digest] = source
    while len(_held) > _MOST_HELD:
        _held.pop(next(iter(_held)))


def path_of(digest: str) -> Path:
    """Where it lies; ``SidecarError`` if nobody said."""
    if digest not in _paths:
        raise SidecarError(f"its captured values (digest {digest}) are in a file that is not at hand")
    return _paths[digest]


def sidecar(digest: str) -> Sidecar:
    """The sidecar itself; ``SidecarError`` if it is not at hand or holds something else by now."""
    return _held[digest] if digest in _held else read_sidecar(path_of(digest), digest)


def read_sidecar(path: Path, digest: str) -> Sidecar:
    """Read the sidecar that must have this digest, and register it."""
    source = decode(*read(path), str(path), digest)
    hold(source, path)
    return source


def key_of(name: str, spec: TensorSpec, row: int) -> str:
    """The key of a block: of the row with this id, or of all."""
    return name if spec.role == "parameter" else f"{name}/{row}"


def cells_of(call: Call, spec: TensorSpec, row: int) -> Place | None:
    """Which cells of a row's block are inputs, a slice an axis; ``None`` if the row reads none.

    Without its leading axis where that counts slots; from the first to the last that any of the row's
    entries names. A row's tokens are axis 0 of its block.
    """
    if spec.role == "parameter":
        return tuple(slice(0, n) for n in spec.shape)
    if spec.role == "token":
        inner = spec.shape[2:] if spec.axes[0] == "row" else spec.shape[1:]
        if not (call.qlens[row] and call.reads_tokens(row)):
            return None
        return (slice(0, call.qlens[row]), *(slice(0, n) for n in inner))
    found = [cells for i, _, cells in call.blocks(spec.name) if i == row]
    if not found:
        return None
    sides = []
    for axis, size in enumerate(spec.shape[1:]):
        ranges = [_range(cells, axis, size) for cells in found]
        sides.append(slice(min(r.start for r in ranges), max(r.stop for r in ranges)))
    return tuple(sides)


def _range(cells: Place | None, axis: int, size: int) -> range:
    side = cells[axis] if cells is not None and axis < len(cells) else slice(None)
    assert isinstance(side, slice)
    return range(*side.indices(size))


def fine(call: Call, spec: TensorSpec, cells: Place) -> list[tuple[str, int]]:
    """The axes of these cells of a row's block, as far as they divide, and their sizes."""
    names = spec.axes[len(spec.axes) - len(cells) :]
    if spec.role == "token":
        names = ("token", *names[1:])
    result: list[tuple[str, int]] = []
    for name, side in zip(names, cells, strict=True):
        assert isinstance(side, slice)
        result += call.divided(spec, name, side.stop - side.start)
    return result


def canonical(axes: list[tuple[str, int]], block: torch.Tensor) -> torch.Tensor:
    """A block with its axes divided and in the order of the file, dense, on the CPU."""
    whole = block.reshape([size for _, size in axes])
    return dense(whole.permute(*_order(axes)))


def dense(block: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU with the strides that its shape has by itself, also where a side is 1."""
    return block.cpu().clone(memory_format=torch.contiguous_format)


def _order(axes: list[tuple[str, int]]) -> list[int]:
    return sorted(range(len(axes)), key=lambda i: AXES.index(axes[i][0]))


def take(captured: Captured, call: Call, spec: TensorSpec, row: int) -> tuple[Array, Place] | None:
    """A row's captured elements (of a parameter, all) as float64, and the cells of its block they fill.

    ``None`` where the sidecar does not hold them all; then they are drawn. ``SidecarError`` if there is
    no sidecar.
    """
    if spec.table not in captured.tables:
        return None
    cells = cells_of(call, spec, row)
    if cells is None:
        return None
    block = _part(captured, sidecar(captured.digest), call, spec, row)
    if block is None:
        return None
    axes = fine(call, spec, cells)
    back = np.argsort(_order(axes)).tolist()
    shape = [side.stop - side.start for side in cells if isinstance(side, slice)]
    return block.permute(*back).reshape(shape).to(torch.float64).numpy(), cells


def _part(captured: Captured, source: Sidecar, call: Call, spec: TensorSpec, row: int) -> torch.Tensor | None:
    """What a case uses of one block of a sidecar, in the order of the file."""
    cells = cells_of(call, spec, row)
    block = source.blocks.get(key_of(captured.name(spec.name), spec, call.ids[row] if call.ids else 0))
    if cells is None or block is None or block.dtype != DTYPES[spec.dtype]:
        return None
    axes = fine(call, spec, cells)
    if block.dim() != len(axes):
        return None
    for axis, i in enumerate(_order(axes)):
        name, size = axes[i]
        if name == "head" and captured.heads:
            if not set(captured.heads) <= set(source.heads) or block.shape[axis] != len(source.heads):
                return None
            block = block.index_select(axis, torch.tensor([source.heads.index(h) for h in captured.heads]))
            continue
        first = _first(name, captured) - _first(name, source)
        if first < 0 or first + size > block.shape[axis]:
            return None
        block = block.narrow(axis, first, size)
    return block


def _first(axis: str, held: Captured | Sidecar) -> int:
    return {"k": held.key, "v": held.value, "channel": held.channel}.get(axis, 0)


def slim(captured: Captured, call: Call) -> Sidecar:
    """A sidecar with only what the call uses of this one; the same values by the same names."""
    source = sidecar(captured.digest)
    blocks = {}
    for spec in call.tensors().values():
        if not drawable(spec) or spec.table not in captured.tables:
            continue
        for row in range(call.rows) if spec.role != "parameter" else (0,):
            part = _part(captured, source, call, spec, row)
            if part is not None:
                id_ = call.ids[row] if call.ids else 0
                blocks[key_of(captured.name(spec.name), spec, id_)] = dense(part)
    return Sidecar(blocks, captured.heads, captured.key, captured.value, captured.channel)
