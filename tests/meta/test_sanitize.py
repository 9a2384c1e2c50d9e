"""Sanitizer logs are understood as NVIDIA's manual shows them, and its memory is laid out for the tools.

The reports below are those of the Compute Sanitizer manual (2025 and 2026), and of public issues where
a comment says so.
"""

import importlib.metadata
import os
import subprocess
import sys
import threading
import time
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from ci import sanitize
from ci.sanitize import TOOLS, Log, Report, believed, judged, parse, sanitizer, set_aside
from impl.arena import Arena, plan
from impl.contract import UnavailableError
from impl.devices.base import Reserved, Segment
from impl.devices.cuda import ExactMemory
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.judge import Problem, Verdict
from oracle.layout import Layout, Page
from oracle.values import build

MEMCHECK = """\
========= COMPUTE-SANITIZER
Mallocing memory
========= Invalid __global__ write of size 4 bytes
=========     at unaligned_kernel()+0x50
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x710fdca00001 is misaligned
=========     and is inside the nearest allocation at 0x710fdca00000 of size 4 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: run_unaligned() [0xacd4] in memcheck_demo
=========         Host Frame: main [0xae61] in memcheck_demo
=========
Running unaligned_kernel: no error
========= Invalid __global__ write of size 4 bytes
=========     at out_of_bounds_function()+0xb0 in memcheck_demo.cu:39
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x87654320 is out of bounds
=========     and is 137,179,965,340,896 bytes before the nearest allocation at 0x7cc43a800000 of size 4 bytes
=========         Device Frame: out_of_bounds_kernel()+0x30 in memcheck_demo.cu:44
=========
Running out_of_bounds_kernel: no error
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = """\
========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in block_error.cu:41
=========     and Read access at sumKernel(int *, int *)+0x100 in block_error.cu:51 [508 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
HAZARD = """\
========= ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :
=========     Write Thread (0,0,0) at WAW()+0x2f0 in raceWAW.cu:20
=========     Write Thread (1,0,0) at WAW()+0x2f0 in raceWAW.cu:20
=========     Current Value : 1, Incoming Value : 2
=========
"""
INITCHECK = """\
========= COMPUTE-SANITIZER
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorAdd(int *)+0x70 in memset_error.cu:41
=========     by thread (31,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000fc
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at vectorAdd(int *)+0x70 in memset_error.cu:41
=========     by thread (30,0,0) in block (1,0,0)
=========     Address 0x7f3c7ec000f8
=========
========= ERROR SUMMARY: 2 errors
"""
SYNCCHECK = """\
========= Barrier error detected. Divergent thread(s) in block.
=========     at [clone myKernel(int *, int *)] outlineSync()+0x11f0 in test.cu:42
=========     by thread (32,0,0) in block (0,0,0)
=========         Device Frame: myKernel(int *, int *)+0xe40 in test.cu:60
=========
"""
WARNING = (
    "========= Warning: Detected overflow of tracked cuda::barrier structures. Results might be incorrect. "
    "Try using --num-cuda-barriers to fix the issue\n"
)
INTERNAL = (
    "========= Internal Sanitizer Error: The Sanitizer encountered an error while launching kernel_name and "
    "didn't track the launch. Errors might go undetected. (Unable to allocate enough memory to perform the "
    "requested operation)\n"
)
ENDING = """\
========= COMPUTE-SANITIZER
========= Error: process didn't terminate successfully
=========     The application may have hit an error when dereferencing Unified Memory from the host.
========= Target application terminated before first instrumented API call
========= Tracking kernels launched by child processes requires the --target-processes all option.
"""
KERNEL = "kernel_cutlass_kernel_implcutecommitCommit_object_at__tensorptri64gmemo1_0"
BULK = f"""\
========= Error: Race reported between Write access at {KERNEL}+0x430
=========     and Read access at {KERNEL}+0x770 [248 hazards]
=========     and Read access at {KERNEL}+0x7a0 [248 hazards]
=========
"""
"""The shape that was measured for bulk copies, in a kernel of the DSL."""


def of(text: str) -> list[Report]:
    return parse(text.splitlines())


def test_what_the_manual_shows() -> None:
    found = [(r.head, r.kernel) for text in (MEMCHECK, RACECHECK, HAZARD, SYNCCHECK) for r in of(text)]
    assert found == [
        ("Invalid __global__ write of size 4 bytes", "unaligned_kernel"),
        ("Invalid __global__ write of size 4 bytes", "out_of_bounds_kernel"),
        (
            "Error: Race reported between Write access at sumKernel(int *, int *)+0x90 in block_error.cu:41",
            "sumKernel",
        ),
        ("ERROR: Potential WAW hazard detected at __shared__ 0x0 in block (0,0,0) :", "WAW"),
        ("Barrier error detected. Divergent thread(s) in block.", "myKernel"),
    ]


def test_a_description_says_what_where_and_who() -> None:
    first, second = of(MEMCHECK)
    assert first.describe() == (
        "Invalid __global__ write of size 4 bytes; at unaligned_kernel()+0x50; by thread (0,0,0) in block "
        "(0,0,0); Address 0x710fdca00001 is misaligned; and is inside the nearest allocation at "
        "0x710fdca00000 of size 4 bytes [kernel unaligned_kernel]"
    )
    assert "out_of_bounds_function()+0xb0 in memcheck_demo.cu:39" in second.describe()
    assert "[kernel out_of_bounds_kernel]" in second.describe()
    (race,) = of(RACECHECK)
    assert race.places == (
        ("Write", "sumKernel(int *, int *)+0x90 in block_error.cu:41"),
        ("Read", "sumKernel(int *, int *)+0x100 in block_error.cu:51"),
    )


def test_what_is_no_report() -> None:
    """How the program ends is the suite's to tell; its own output is none of the log's."""
    assert of(ENDING) == []
    assert of("Invalid __global__ write of size 4 bytes\n") == []


def test_what_is_not_known_is_a_report() -> None:
    """A message of a later version is not lost."""
    text = (
        "========= Tensor Memory column 32 being accessed by instruction tcgen05.ld is not allocated. "
        "Columns allocated are: 0-31.\n"
        "=========     at $__internal_8_$__cuda_sm10x_guardrail+0x1250 in TcmmaGuardrails.cu:99\n"
        "=========     by thread (0,0,0) in block (0,0,0)\n"
    )
    (report,) = of(text)
    assert believed(report)
    assert not report.failure


def test_what_the_tool_says_of_itself() -> None:
    assert [report.failure for report in of(WARNING + INTERNAL + SYNCCHECK)] == [True, True, False]


def test_a_verdict_names_the_tool_first() -> None:
    raised = Problem("raised", text="RuntimeError: CUDA error: unspecified launch failure")
    verdict = judged(Verdict(0.5, {"out": 0.5}, (raised,)), "initcheck", of(INITCHECK))
    assert [p.kind for p in verdict.problems] == ["sanitizer", "raised"]
    assert (verdict.ok, verdict.ratio, verdict.stage) == (False, inf, "sanitizer")
    text = verdict.problems[0].describe()
    assert text.startswith("sanitizer: initcheck: Uninitialized __global__ memory read of size 4 bytes; at ")
    assert "by thread (31,0,0) in block (1,0,0)" in text
    assert text.endswith("[kernel vectorAdd]; 2 such reports")
    clean = Verdict(0.5, {"out": 0.5})
    assert judged(clean, "initcheck", []) is clean


def test_different_faults_are_different_problems() -> None:
    assert len(judged(Verdict(), "memcheck", of(MEMCHECK)).problems) == 2


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", False),
        ("Read access", "Write access", True),
        ("between Write access", "between Read access", True),
        ("and Read access at {KERNEL}+0x7a0", "and Write access at {KERNEL}+0x7a0", True),
        ("{KERNEL}", "_verify_kernel", True),
        ("Race reported between", "Unheard-of race between", True),
    ],
    ids=[
        "bulk copy",
        "writes race",
        "read first",
        "one write more",
        "no bulk copies in Triton",
        "other report",
    ],
)
def test_one_shape_of_race_is_set_aside(old: str, new: str, fault: bool) -> None:
    text = BULK.replace(old.format(KERNEL=KERNEL), new.format(KERNEL=KERNEL)) if old else BULK
    (report,) = of(text)
    assert believed(report) == fault
    assert set_aside([report]) == (not fault)
    assert judged(Verdict(), "racecheck", [report]).ok != fault


def test_a_race_without_partners_is_a_fault() -> None:
    assert believed(of(BULK.splitlines()[0])[0])


def test_other_tools_are_believed_of_the_same_kernels() -> None:
    text = MEMCHECK.replace("unaligned_kernel()", KERNEL)
    assert all(believed(report) for report in of(text))


def test_a_log_is_read_as_it_grows(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    assert log.reports() == []
    log.path.write_text(MEMCHECK)
    assert len(log.reports()) == 2
    assert log.reports() == []
    with log.path.open("a") as file:
        file.write(RACECHECK)
    assert [report.kernel for report in log.reports()] == ["sumKernel"]


def test_a_report_is_not_cut(tmp_path: Path) -> None:
    """Its lines come one by one, some of them in two pieces, and later than the question."""
    log = Log(tmp_path / "log")

    def write() -> None:
        time.sleep(0.1)
        with log.path.open("w", buffering=1) as file:
            for line in (INITCHECK + SYNCCHECK).splitlines(keepends=True):
                middle = len(line) // 2
                for piece in (line[:middle], line[middle:]):
                    file.write(piece)
                    file.flush()
                    time.sleep(0.005)

    writer = threading.Thread(target=write)
    writer.start()
    found = log.reports(patience=30.0)
    writer.join()
    assert found == of(INITCHECK + SYNCCHECK)
    assert log.reports() == []


def test_half_a_line_waits_for_the_other_half(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.path.write_text(SYNCCHECK + "========= Invalid __glo")
    assert len(log.reports()) == 1
    with log.path.open("a") as file:
        file.write("bal__ write of size 4 bytes\n=========\n")
    assert [report.head for report in log.reports()] == ["Invalid __global__ write of size 4 bytes"]


HELP = (
    "Usage\n  --tool arg (=memcheck)  The tool.\n  --log-file arg\n  -h [ --help ] x\n  --print-limit arg\n"
)


def program(folder: Path, text: str = HELP) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "compute-sanitizer"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compute-sanitizer but what a test makes."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:/usr/bin:/bin")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    places = sanitize._places
    here = lambda: (x for x in places() if not x.is_relative_to("/usr/local"))  # noqa: E731
    monkeypatch.setattr(sanitize, "_places", lambda: [*here(), tmp_path / "none" / "compute-sanitizer"])


@pytest.mark.usefixtures("nowhere")
def test_where_the_program_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        UnavailableError, match=r"needs compute-sanitizer .* found none on PATH, in CUDA_HOME"
    ):
        sanitizer("memcheck")
    for folder in ("toolkit/bin", "other/compute-sanitizer", "path"):
        made = program(tmp_path / folder)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / folder.partition("/")[0]))
        assert sanitizer("memcheck").program == made


@pytest.mark.usefixtures("nowhere")
def test_a_package_holds_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = program(tmp_path / "site" / "nvidia" / "cu13" / "compute-sanitizer")
    entry = importlib.metadata.PackagePath("nvidia/cu13/compute-sanitizer/compute-sanitizer")
    entry.dist = importlib.metadata.PathDistribution(tmp_path / "site" / "x.dist-info")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [entry])
    assert sanitizer("racecheck").program == made


@pytest.mark.usefixtures("nowhere")
def test_a_tool_and_a_program_that_are_not_known(tmp_path: Path) -> None:
    with pytest.raises(
        UnavailableError, match="unknown sanitizer tool 'valgrind'; it must be one of memcheck"
    ):
        sanitizer("valgrind")
    program(tmp_path / "path", "nothing of use\n")
    with pytest.raises(UnavailableError, match="is not a compute-sanitizer that this suite knows"):
        sanitizer("memcheck")
    (tmp_path / "path" / "compute-sanitizer").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UnavailableError, match="--help failed"):
        sanitizer("memcheck")


@pytest.mark.usefixtures("nowhere")
def test_a_command_has_the_options_that_the_version_knows(tmp_path: Path) -> None:
    made = program(tmp_path / "path")
    command = sanitizer("memcheck").command(Path("/tmp/50%/log"))
    options = ["--tool", "memcheck", "--log-file", "/tmp/50%%/log", "--print-limit", "0"]
    assert command == [str(made), *options]


def test_a_real_program_knows_all_options() -> None:
    """Without a GPU it still says what its options are."""
    for tool in TOOLS:
        try:
            found = sanitizer(tool)
        except UnavailableError as error:
            pytest.skip(f"needs compute-sanitizer; found none: {error}")
        asked = {"tool", "log-file"} | sanitize._OPTIONS.keys() | sanitize._MORE[tool].keys()
        assert asked <= found.known, f"{found.program} lacks {asked - found.known}"


def test_children_allocate_every_tensor_by_itself() -> None:
    made = sanitize.Sanitizer("initcheck", Path("x"), frozenset())
    assert made.environment() == {"KDAFUZZ_SANITIZE": "initcheck", "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


# ---- Memory for the tools.

CALL = Verify(
    heads=2,
    key_dim=3,
    value_dim=5,
    window=2,
    pool=3,
    qlens=(2, 1),
    slots=(2, 1),
    ids=(0, 1),
    capacity=2,
    activation="bfloat16",
    out="bfloat16",
    records="slot",
)
PAGED = Case(
    call=CALL,
    layouts={"out": Layout(offset=3, gaps=(5, 0, 0))},
    pages=(Page(members=("state", "correction"), gaps=(0, 4), tail=8),),
)


class Exact:
    """A device with such memory, on the CPU; its allocations hold a pattern."""

    name = "exact"
    last: ExactMemory

    def memory(self, segments: list[Segment]) -> ExactMemory:
        """New memory."""
        self.last = ExactMemory(segments, "cpu")
        for part in self.last._parts:
            part.fill_(0x5A)
        return self.last

    def synchronize(self) -> None:
        """Nothing to wait for."""


@pytest.mark.parametrize("case", [Case(call=CALL), PAGED], ids=["dense", "paged"])
def test_only_outputs_stay_undefined(case: Case) -> None:
    device = Exact()
    arena = Arena(case, build(case), device)  # type: ignore[arg-type]
    assert isinstance(device.last, Reserved)
    views = arena.views()
    for name in ("out", "correction", "key_gate"):
        assert (views[name].contiguous().view(torch.uint8) == 0x5A).all(), name
    for name, tensor in build(case).tensors.items():
        filled = build(case).filled[name]
        same = views[name][filled].contiguous().view(torch.uint8) == tensor[filled].contiguous().view(
            torch.uint8
        )
        assert same.all(), name
    # Between tensors lies poison, and what is found is what the comparison starts from.
    arena.finish()
    for segment, part in zip(plan(case).segments, device.last._parts, strict=True):
        here = slice(segment.start, segment.start + segment.size)
        assert (arena.before[here] == part.numpy()).all()
    assert (arena.after == arena.before)[: plan(case).segments[0].size].all()
    count = sum(int((part == 0x5A).sum()) for part in device.last._parts)
    outputs = sum(
        views[name].numel() * views[name].element_size() for name in ("out", "correction", "key_gate")
    )
    assert outputs <= count < outputs + 64


def test_the_bytes_of_a_call_are_compared_all_the_same() -> None:
    device = Exact()
    arena = Arena(PAGED, build(PAGED), device)  # type: ignore[arg-type]
    arena.views()["out"][0, 0, 0] = 1.0
    device.last._parts[0][0] ^= 1
    arena.finish()
    before, after = arena.dense(arena.before), arena.dense(arena.after)
    assert (before["out"] != after["out"]).sum() == 1
    assert len(arena.strays()) == 1


def test_restored_memory_is_all_defined() -> None:
    """Only a new allocation is undefined."""
    device = Exact()
    arena = Arena(PAGED, build(PAGED), device)  # type: ignore[arg-type]
    arena.views()["out"].fill_(1.0)
    arena.restore()
    arena.finish()
    assert arena.strays() == ()
    assert arena.difference(arena.before) == ""


def test_memory_without_undefined_bytes(tmp_path: Path) -> None:
    image = np.arange(64, dtype=np.uint8)
    memory = ExactMemory([Segment(0, 16), Segment(32, 16)], "cpu")
    memory.upload(image)
    read = np.zeros(64, np.uint8)
    memory.download(read)
    assert (read[:16] == image[:16]).all()
    assert (read[32:48] == image[32:48]).all()
    assert not read[16:32].any()
    assert memory.view(1, 4, 2, torch.int32).view(torch.uint8).tolist() == list(range(36, 44))


# ---- On a GPU.

PLANTED = """
import sys, torch, triton, triton.language as tl
from impl.devices.base import Segment
from impl.devices.cuda import CudaDevice

@triton.jit
def planted(source, target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(target + at, tl.load(source + at))

device = CudaDevice()
memory = device.memory([Segment(0, 512), Segment(4096, 4096)])
small, large = (memory.view(i, 0, n, torch.float32) for i, n in ((0, 128), (1, 1024)))
if sys.argv[1] == "memcheck":
    large.zero_()
try:
    planted[(1,)](*((small, large) if sys.argv[1] == "memcheck" else (large, small)), BLOCK=int(sys.argv[2]))
    torch.cuda.synchronize()
except Exception as error:
    print("raised", type(error).__name__)
print("done", flush=True)
sys.stdin.readline()
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tool", "block", "head"),
    [
        ("memcheck", 256, "Invalid __global__ read"),
        ("memcheck", 128, ""),
        ("initcheck", 128, "Uninitialized __global__ memory read"),
    ],
)
def test_a_planted_fault_is_reported_before_the_process_ends(
    tmp_path: Path, tool: str, block: int, head: str
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU; found none")
    try:
        found = sanitizer(tool)
    except UnavailableError as error:
        pytest.skip(f"needs compute-sanitizer; found none: {error}")
    (tmp_path / "planted.py").write_text(PLANTED)
    log = Log(tmp_path / "log")
    path = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [*found.command(log.path), sys.executable, str(tmp_path / "planted.py"), tool, str(block)],
        env={**os.environ, **found.environment(), "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    said = [child.stdout.readline()]
    while said[-1] and "done" not in said[-1]:
        said += [child.stdout.readline()]
    early = log.reports(patience=2.0)
    child.communicate("\n", timeout=60)
    late = log.reports()
    whole = log.path.read_text() if log.path.exists() else "no log"
    context = f"said {said}, early {len(early)}, late {len(late)}; log:\n{whole[-3000:]}"
    assert "done\n" in said, context
    if not head:
        assert not early + late, context
        return
    assert early, f"reports come only at the end: {context}"
    assert early[0].head.startswith(head), context
    assert early[0].kernel == "planted", context
    text = judged(Verdict(), tool, early).problems[0].text
    assert "by thread (" in text, context
