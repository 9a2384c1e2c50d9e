"""Dumps of real calls: what a live layer passes to an operation, as a case with its values.

``dumping`` wraps the function that the layer calls; ``dump`` writes one call. The file is a sidecar
(``oracle.captured``) that holds its case too, so ``kdafuzz minimize FILE`` and ``replay FILE`` take it
as they take any. Of pools only what the rows read is copied: a dump of a large cache is small.
Everything imported here is among vLLM's own requirements.
"""

import contextlib
import functools
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from oracle.calls import AnyCall
from oracle.captured import (
    MARK,
    SUFFIX,
    Captured,
    Sidecar,
    canonical,
    cells_of,
    decode,
    drawable,
    fine,
    key_of,
)
from oracle.case import MAX_BYTES, Case
from oracle.codec import SCHEMA, CaseFile, dumps, loads
from oracle.layout import GROUND, Layout, TensorSpec
from oracle.passed import Passed
from oracle.readers import Arguments, passed

CASE = "case"
"""The metadata's key under which a dump holds its case."""


def dump(
    path: str | Path, operation: str, arguments: Arguments, *, rows: Iterable[int] | None = None
) -> None:
    """Write the call of ``operation`` with these arguments of its public signature, before it is made.

    Any of the tensors may be missing: their values are then drawn when the case is built. ``rows``
    keeps only those rows of the batch. ``ValueError`` in one sentence for what is no call of the operation.
    """
    case, sidecar = captured(operation, arguments, rows)
    entry = CaseFile(kdafuzz=SCHEMA, case=case, found=_found())
    _write(Path(path), sidecar.data({CASE: dumps(entry).decode()}))


def dumping(
    operation: str,
    function: Callable[..., Any],
    folder: str | Path,
    *,
    calls: int = 1,
    when: Callable[[Mapping[str, Any]], bool] = lambda arguments: True,
) -> Callable[..., Any]:
    """``function`` as it was, but its first ``calls`` calls that ``when`` wants leave dumps in ``folder``.

    A call while a CUDA graph is captured has no values yet and is left out. What cannot be dumped is said
    on standard error, and the call is made all the same.
    """
    numbers = iter(range(calls))
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = _flat(signature.bind(*args, **kwargs))
            wanted = not _capturing() and when(arguments)
            number = next(numbers, None) if wanted else None
            if number is not None:
                path = Path(folder) / f"{operation}-{os.getpid()}-{number}{SUFFIX}"
                dump(path, operation, arguments)
                print(f"kdafuzz: dumped {path}", file=sys.stderr)
        except Exception as error:  # whatever it is, the condition's too, the model goes on
            print(f"kdafuzz: not dumped: {error}", file=sys.stderr)
        return function(*args, **kwargs)

    return call


def _flat(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Arguments by name, those that a signature only gathers (``**kwargs``) too."""
    arguments = dict(bound.arguments)
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _found() -> dict[str, str]:
    """Where a dump is from, for people."""
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = [f"torch {torch.__version__}"]
    with contextlib.suppress(Exception):  # whatever is called vllm here
        versions.append(f"vllm {sys.modules['vllm'].__version__}")
    return {"captured": ", ".join([where, *versions])}


def captured(operation: str, arguments: Arguments, rows: Iterable[int] | None = None) -> tuple[Case, Sidecar]:
    """The call with these arguments as a case, and the values it names; ``ValueError`` if it is none."""
    call, found = passed(operation, arguments)
    specs = call.tensors()
    given = {name: found.tensors[name] for name in specs if name in found.tensors}
    for name, tensor in given.items():
        _check_shape(specs[name], tensor)
    chosen = list(range(call.rows)) if rows is None else _chosen(rows, call.rows)
    blocks: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if drawable(specs[name]):
            blocks |= _blocks(call, found, specs[name], tensor, chosen)
    heads = tuple(range(getattr(call, "heads", 0)))
    sidecar = Sidecar(blocks, heads)
    kept = call.only(chosen) if rows is not None else call
    tables = tuple(dict.fromkeys(specs[key.partition("/")[0]].table for key in blocks))
    use = (
        Captured(sidecar.digest, tables, heads, tuple(range(getattr(call, "layers", 0)))) if tables else None
    )
    return _placed(kept, use, given), sidecar


def _chosen(rows: Iterable[int], count: int) -> list[int]:
    chosen = sorted(set(rows))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < count:
        raise ValueError(f"rows must be among 0 to {count - 1}; found {chosen}")
    return chosen


def _check_shape(spec: TensorSpec, tensor: torch.Tensor) -> None:
    """The call's own shape; only a pool may be larger, for its slots were numbered anew."""
    if spec.index:
        return
    skip = 1 if spec.axes[0] == "slot" or spec.axes[:2] == ("row", "head") else 0
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.shape[skip:] != spec.shape[skip:] or dtype != spec.dtype:
        wanted = f"{spec.dtype} [{', '.join(spec.axes)}] of {list(spec.shape)}"
        raise ValueError(f"{spec.name} must be {wanted}; found {dtype} {list(tensor.shape)}")


def _blocks(
    call: AnyCall, found: Passed, spec: TensorSpec, tensor: torch.Tensor, rows: list[int]
) -> dict[str, torch.Tensor]:
    """The blocks that these rows read of a tensor, in the form of the file."""
    result = {}
    for row in rows if spec.role != "parameter" else [0]:
        cells = cells_of(call, spec, row) if call.rows or spec.role == "parameter" else None
        if cells is None:
            continue
        block = tensor
        if spec.role == "token":
            block = tensor[call.token_place(row)]
        elif spec.role == "slot":
            block = _read_cells(call, found, spec, tensor, row)[cells]
        result[key_of(spec.name, spec, row)] = canonical(fine(call, spec, cells), block)
    return result


def _read_cells(
    call: AnyCall, found: Passed, spec: TensorSpec, tensor: torch.Tensor, row: int
) -> torch.Tensor:
    """The slot or record row that a row reads; where it reads several parts, zeros between them."""
    entries = [(index, cells) for other, index, cells in call.blocks(spec.name) if other == row]
    index = entries[0][0]
    by_row = spec.axes[0] == "row" and getattr(call, "records", "") == "row"
    whole = tensor[index if by_row else found.slots[index]]
    if len(entries) == 1:
        return whole
    parts = torch.zeros_like(whole)
    for _, cells in entries:
        parts[cells] = whole[cells]
    return parts


def _placed(call: AnyCall, use: Captured | None, given: Mapping[str, torch.Tensor]) -> Case:
    """The case, its tensors lying as they did: alignment and strides, as far as a case can say them.

    Where a pool's slots lie so far apart that the case were too large, the pools are dense.
    """
    specs, layouts = call.tensors(), {}
    for name, tensor in given.items():
        if name in specs and (layout := _layout(specs[name], tensor)) != Layout():
            layouts[name] = layout
    near = {name: layout for name, layout in layouts.items() if specs[name].role != "slot"}
    for attempt in (layouts, near):
        try:
            return Case(call=call, layouts=attempt, captured=use)
        except ValueError as error:
            if "bytes; the limit" not in str(error):
                raise
    raise ValueError(f"the call needs more than {MAX_BYTES} bytes even where its pools are dense; give rows")


def _layout(spec: TensorSpec, tensor: torch.Tensor) -> Layout:
    """Offset and gaps by the rule of ``oracle.layout``; dense where elements overlap."""
    offset = tensor.data_ptr() % GROUND // spec.itemsize if tensor.numel() else 0
    dims, steps = tensor.dim(), tuple(tensor.stride())
    order = list(range(dims))
    free = {"any": dims, "inner": dims - 1, "leading": 1, "dense": 0}[spec.strided]
    if spec.strided == "any":
        order.sort(key=lambda d: (-steps[d], spec.shape[d] == 1, d))
    gaps, span = [0] * dims, 1
    for dim in reversed(order):
        size, step = spec.shape[dim], steps[dim]
        if size == 1 and (step < span or dim >= free):
            step = span  # nothing steps over a single element
        if step < span:
            return Layout(offset=offset)
        gaps[dim] = step - span
        span += step * (size - 1) if size else 0
    return Layout(
        offset=offset,
        gaps=tuple(gaps) if any(gaps) else (),
        order=tuple(order) if order != list(range(dims)) else (),
    )


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_dump(
    tensors: dict[str, torch.Tensor], about: Mapping[str, str], name: str
) -> tuple[CaseFile, Sidecar]:
    """The case of a safetensors file and its values; ``ValueError`` where there is none.

    A file without a case must hold the arguments of a call by their names (a context's by layer:
    ``state.0``), and in its metadata ``operation`` and the scalars, as JSON.
    """
    if MARK in about:
        if CASE not in about:
            raise ValueError(f"{name}: holds captured values without a case; name the .json file beside it")
        return loads(about[CASE].encode(), name), decode(tensors, about, name)
    if "operation" not in about:
        raise ValueError(f"{name}: its metadata do not name an operation; oracle.dump writes such files")
    objects = ("operation", "self", "records")
    scalars = {key: _scalar(text) for key, text in about.items() if key not in objects}
    case, sidecar = captured(about["operation"], {**scalars, **tensors})
    return CaseFile(kdafuzz=SCHEMA, case=case), sidecar


def _scalar(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text
