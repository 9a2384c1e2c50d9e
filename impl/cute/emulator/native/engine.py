"""``execute``: run a launch on the native engine."""

import ctypes
import re
import weakref
from typing import Any

import numpy as np

from impl.cute.emulator import mufu
from impl.cute.emulator.errors import KINDS, EmulatorError
from impl.cute.emulator.isa import NONE, SPECIALS, Op
from impl.cute.emulator.launch import Launch, Report
from impl.cute.emulator.native.build import library
from impl.cute.emulator.program import Program
from impl.cute.emulator.tensormap import BYTES, TENSOR_MAP, decode

_MODES = ("eager", "lazy", "priority")
_FUNCTIONS = ("exact-sm90", "rounded", "perturbed")
_OUT_OF_MEMORY = -2
_MAY_LACK_DST = frozenset(
    (
        Op.ATOM_ADD, Op.ATOM_EXCH, Op.ATOM_CAS, Op.SHFL_BFLY, Op.SHFL_IDX, Op.SHFL_UP, Op.SHFL_DOWN,
        Op.ELECT, Op.MBAR_ARRIVE, Op.MBAR_TRY_WAIT, Op.MBAR_TEST_WAIT,
    )
)  # fmt: skip
"""Operations that the engine executes without a destination; all others get one to spoil."""


class _ProgramView(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_void_p),
        ("operands", ctypes.c_void_p),
        ("image", ctypes.c_void_p),
        ("parameters", ctypes.c_void_p),
        ("specials", ctypes.c_void_p),
        ("code_count", ctypes.c_int64),
        ("image_bytes", ctypes.c_int64),
        ("parameter_count", ctypes.c_int64),
        ("param_bytes", ctypes.c_int64),
    )


class _LaunchView(ctypes.Structure):
    _fields_ = (
        ("params", ctypes.c_void_p),
        ("maps", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("writable", ctypes.c_void_p),
        ("early", ctypes.c_void_p),
        ("tables", ctypes.c_void_p * 3),
        ("map_count", ctypes.c_int64),
        ("allocation_count", ctypes.c_int64),
        ("schedule_seed", ctypes.c_uint64),
        ("function_seed", ctypes.c_uint64),
        ("shared_bytes", ctypes.c_int64),
        ("resident", ctypes.c_int64),
        ("max_instructions", ctypes.c_int64),
        ("instructions", ctypes.c_int64),
        ("grid", ctypes.c_int32 * 3),
        ("block", ctypes.c_int32 * 3),
        ("mode", ctypes.c_int32),
        ("functions", ctypes.c_int32),
        ("error_kind", ctypes.c_int32),
        ("error_line", ctypes.c_int32),
        ("error_cta", ctypes.c_int32 * 3),
        ("error_warp", ctypes.c_int32),
        ("error_text", ctypes.c_char * 4096),
    )


class _Prepared:
    """A program's arrays in the engine's form, made once."""

    def __init__(self, program: Program) -> None:
        code = np.ascontiguousarray(program.instructions).copy()
        scratch = -(-program.image.size // 64) * 64
        lacks = (code["dst"] == NONE) & ~np.isin(code["op"], list(_MAY_LACK_DST))
        code["dst"][lacks] = scratch
        specials = [program.specials.get(name, NONE) for name in SPECIALS]
        self.arrays = (
            code,
            np.ascontiguousarray(program.operands, np.int32),
            np.ascontiguousarray(np.pad(program.image, (0, scratch - program.image.size))),
            np.array(program.parameters, np.int32).reshape(-1, 3),
            np.array(specials, np.int32),
        )
        self.view = _ProgramView(
            *(array.ctypes.data for array in self.arrays),
            len(code),
            scratch,
            len(program.parameters),
            program.param_bytes,
        )
        self.entry = library().kdafuzz_emulate
        size = library().kdafuzz_emulator_size
        size.restype = ctypes.c_long
        assert (size(0), size(1)) == (ctypes.sizeof(_ProgramView), ctypes.sizeof(_LaunchView))


_PREPARED: "weakref.WeakKeyDictionary[Program, _Prepared]" = weakref.WeakKeyDictionary()


def execute(program: Program, launch: Launch) -> Report:
    """Execute a launch; ``EmulatorError`` names the PTX line, CTA and warp of the first fault."""
    prepared = _PREPARED.get(program)
    if prepared is None:
        prepared = _PREPARED[program] = _Prepared(program)
    view = _LaunchView(
        allocation_count=len(launch.allocations),
        schedule_seed=launch.schedule.seed & (2**64 - 1),
        function_seed=launch.seed & (2**64 - 1),
        shared_bytes=launch.shared_bytes,
        resident=launch.resident,
        max_instructions=launch.max_instructions,
        grid=launch.grid,
        block=launch.block,
        mode=_MODES.index(launch.schedule.mode),
        functions=_FUNCTIONS.index(launch.functions),
    )
    count = len(launch.allocations)
    starts = (ctypes.c_uint64 * count)(*(a.start for a in launch.allocations))
    sizes = (ctypes.c_uint64 * count)(*(a.size for a in launch.allocations))
    writable = (ctypes.c_uint8 * count)(*(a.writable for a in launch.allocations))
    early = (ctypes.c_int64 * (2 * count))()
    view.params = ctypes.cast(ctypes.c_char_p(launch.params), ctypes.c_void_p)
    view.starts, view.sizes = ctypes.addressof(starts), ctypes.addressof(sizes)
    view.writable, view.early = ctypes.addressof(writable), ctypes.addressof(early)
    maps = _maps(program, launch)
    view.maps, view.map_count = maps.ctypes.data, len(maps)
    if launch.functions == "exact-sm90":
        view.tables = tuple(table.ctypes.data for table in mufu.tables())
    if prepared.entry(ctypes.byref(prepared.view), ctypes.byref(view)):
        raise _error(program, launch, view)
    counts: dict[str, tuple[int, int]] = {}
    for k, allocation in enumerate(launch.allocations):
        reads, writes = early[2 * k], early[2 * k + 1]
        if reads or writes:
            before = counts.get(allocation.name, (0, 0))
            counts[allocation.name] = (before[0] + reads, before[1] + writes)
    return Report(view.instructions, counts)


def _maps(program: Program, launch: Launch) -> np.ndarray:
    """The launch's tensor maps; one that is not understood is marked, for whoever uses it."""
    maps = np.zeros(len(program.tensor_maps), TENSOR_MAP)
    for k, offset in enumerate(program.tensor_maps):
        try:
            maps[k] = decode(launch.params[offset : offset + BYTES]).record(offset)
        except EmulatorError:
            maps[k]["parameter"] = offset
    return maps


def _error(program: Program, launch: Launch, view: Any) -> Exception:
    if view.error_kind == _OUT_OF_MEMORY:
        return MemoryError("the emulator's native engine")
    text = view.error_text.decode(errors="replace")
    text = re.sub(r"\|(\d+)\|", lambda found: launch.allocations[int(found[1])].name, text)
    text = re.sub(r"#(\d+)#", lambda found: f"{found[1]}: {program.source.get(int(found[1]), '')}", text)
    line = view.error_line
    cta = tuple(view.error_cta) if view.error_cta[0] >= 0 else None
    warp = view.error_warp if view.error_warp >= 0 else None
    return EmulatorError(KINDS[view.error_kind], text, line, program.source.get(line, ""), cta, warp)
