"""Own CuTe verify kernels on the emulator: what a search over cases does not show."""

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("tvm_ffi", reason="needs the extra kdafuzz[cute]")
pytest.importorskip("cutlass.cute", reason="needs the extra kdafuzz[cute]")

from impl.cute import compile as kernels
from impl.cute.emulator import run, settings
from impl.cute.emulator.compiled import digest, emulated
from impl.cute.emulator.errors import EmulatorError
from impl.cute.emulator.launch import Launch, Report, Schedule
from impl.cute.mma import HALF, ROWS, K, product
from impl.cute.mma_sm90 import Wgmma
from impl.cute.mma_sm100 import Tcgen05

ARCHITECTURES = kernels.ARCHITECTURES
BF16 = torch.bfloat16
SENTINEL = -77.0
FOLDER = Path(kernels.__file__).parent
SOURCES = digest(FOLDER, sorted(FOLDER.glob("*.py")))
SCHEDULES = (Schedule("eager"), Schedule("lazy"), Schedule("priority", 3), Schedule("priority", 4))


@dataclass
class Step:
    """Inputs and outputs of a fused verify; conv rows are dim-first."""

    heads: int
    window: int
    qlens: tuple[int, ...]
    slots: tuple[int, ...]
    f32_taps: bool = False
    token_major: bool = False
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        H, Q, N, S = self.heads, self.window, len(self.qlens), max((0, *self.slots)) + 2
        T, C = sum(self.qlens) + 2, 3 * H * K
        g = torch.Generator().manual_seed(H + 10 * Q + 100 * N)

        def rand(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
            return torch.randn(shape, generator=g).to(dtype)

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        self.tensors = {
            "mixed_qkv": rand(T, C),
            "raw_gate": rand(T, H * K),
            "raw_beta": rand(T, H),
            "A_log": rand(H, dtype=torch.float32),
            "dt_bias": rand(H * K, dtype=torch.float32),
            "state": rand(S, H, K, K),
            "correction": torch.full((N + 1, H, Q, K), SENTINEL),
            "key_gate": torch.full((N + 1, H, Q, 2 * K), SENTINEL, dtype=BF16),
            "out": torch.full((T, H * K), SENTINEL, dtype=BF16),
            "query_start_loc": ints([sum(self.qlens[:i]) for i in range(N + 1)]),
            "state_indices": ints(list(self.slots)),
            "conv_state": rand(S, C, Q + 2),
            "conv_weight": rand(C, 4, dtype=torch.float32 if self.f32_taps else BF16),
            "num_accepted_tokens": ints([1 + i % Q for i in range(N)]),
            "counter": torch.zeros(1, dtype=torch.int32),
        }
        if self.token_major:
            self.tensors["conv_state"] = self.tensors["conv_state"].mT.contiguous()

    def run(
        self, kernel: str, arch: str, ctas: int = 3
    ) -> tuple[dict[str, torch.Tensor], tuple[Report, ...]]:
        """All tensors after a launch on copies of them, conv rows dim-first, and the launch's reports."""
        options = {"f32_taps": self.f32_taps}
        if kernel == "verify":
            options["token_major"] = self.token_major
        function: Any = kernels.function(kernels.variant(kernel, arch, self.window, **options), "cpu")
        after = {name: x.clone() for name, x in self.tensors.items()}
        function(*after.values(), -5.0, ctas)
        if self.token_major:
            after["conv_state"] = after["conv_state"].mT
        return after, function.reports


STEP = Step(2, 3, (3, 2, 0, 1, 3), (4, 0, 2, 1, -1))
"""Live rows, a shorter one, null ones, and an empty one."""


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.fixture(params=ARCHITECTURES)
def arch(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


# The product's layout


@pytest.mark.parametrize("probes", [2, 8, 10, 16])
def test_operands_are_laid_out_without_overlap(arch: str, probes: int) -> None:
    made = product(arch, probes)
    places = {made.a_offset(row, k) for row in range(ROWS) for k in range(K)}
    assert places == set(range(0, made.a_bytes, 2))
    assert made.columns >= probes
    assert made.b_bytes == 2 * made.columns * K * 2
    for row in (0, 5, 127):
        for k in range(0, K, 8):
            start = made.a_offset(row, k)
            assert start % 16 == 0
            assert [made.a_offset(row, k + i) for i in range(8)] == list(range(start, start + 16, 2))


def test_a_half_is_what_a_tensor_copy_with_the_128_byte_swizzle_writes() -> None:
    made = product("sm_90a", 4)
    for row in range(ROWS):
        for k in range(HALF):
            plain = row * 128 + k * 2
            assert made.a_offset(row, k) == plain ^ ((plain >> 7 & 7) << 4)
            assert made.a_offset(row, HALF + k) == ROWS * 128 + made.a_offset(row, k)


def test_architectures_are_told_apart() -> None:
    assert isinstance(product("sm_90a", 2), Wgmma)
    assert isinstance(product("sm_100a", 2), Tcgen05)
    assert isinstance(product("sm_103a", 2), Tcgen05)
    with pytest.raises(ValueError, match="needs tensor cores of sm_90a or sm_10x; found sm_80"):
        product("sm_80", 2)


# The kernels


@pytest.mark.slow
def test_memory_that_is_not_named_stays(arch: str) -> None:
    """Contract 1.4, 1.5, 1.8.5: states, record tails, padding, other slots and columns keep their bytes."""
    for kernel in ("verify", "verify_ws"):
        after, _ = STEP.run(kernel, arch)
        before = STEP.tensors
        written = {"out", "correction", "key_gate", "conv_state"}
        for name in before.keys() - written:
            assert torch.equal(after[name], before[name]), name
        begin = 0
        for row, (qlen, slot) in enumerate(zip(STEP.qlens, STEP.slots, strict=True)):
            tokens = after["out"][begin : begin + qlen]
            begin += qlen
            live = slot > 0
            assert bool((tokens == 0).all()) != live or not qlen
            assert bool((tokens != SENTINEL).all())
            for name in ("correction", "key_gate"):
                record = after[name][row]
                assert bool((record[:, qlen if live else 0 :] == SENTINEL).all()), name
                assert not live or bool((record[:, :qlen] != SENTINEL).all()), name
        assert bool((after["out"][begin:] == SENTINEL).all())
        assert bool((after["correction"][len(STEP.qlens) :] == SENTINEL).all())
        touched = {slot for slot, qlen in zip(STEP.slots, STEP.qlens, strict=True) if slot > 0 and qlen}
        for slot in range(len(before["conv_state"])):
            same = torch.equal(after["conv_state"][slot], before["conv_state"][slot])
            assert same != (slot in touched)
        # Row 3 has one token: columns 0 to 2 of slot 1 roll.
        assert torch.equal(after["conv_state"][1, :, 3:], before["conv_state"][1, :, 3:])
        assert torch.equal(after["conv_state"][1, :, 2], before["mixed_qkv"][5])


@pytest.mark.slow
def test_both_kernels_and_both_layouts_give_the_same_bits(arch: str) -> None:
    for taps in (False, True):
        shape = (2, 3, (3, 2, 0, 1, 3), (4, 0, 2, 1, -1), taps)
        plain, _ = Step(*shape).run("verify", arch)
        special, _ = Step(*shape).run("verify_ws", arch)
        major, _ = Step(*shape, token_major=True).run("verify", arch)
        assert_same(plain, special)
        assert_same(plain, major)
    other, _ = STEP.run("verify", arch)
    assert not torch.equal(other["out"], plain["out"])


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["verify", "verify_ws"])
def test_neither_schedules_nor_the_number_of_ctas_change_a_bit(arch: str, kernel: str) -> None:
    """As many CTAs as items, fewer, more, one; side by side or one after the other."""
    first, _ = STEP.run(kernel, arch)
    assert int(first["counter"]) == 0
    for i, schedule in enumerate(SCHEDULES):
        for ctas in (1, 4, 10, 64)[i % 2 :: 2]:
            with settings.using(schedule=schedule, resident=1 + i):
                again, _ = STEP.run(kernel, arch, ctas)
            assert_same(first, again)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["verify", "verify_ws"])
def test_nothing_is_accessed_before_the_dependency_wait(arch: str, kernel: str) -> None:
    _, reports = STEP.run(kernel, arch)
    assert [dict(report.early) for report in reports] == [{}]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "f32_taps"), [(1, False), (8, True)])
@pytest.mark.parametrize("kernel", ["verify", "verify_ws"])
def test_shared_memory_is_what_the_module_says(
    arch: str, kernel: str, window: int, f32_taps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[Launch] = []

    def record(program: object, launch: Launch, engine: str | None = None) -> Report:
        launches.append(launch)
        return Report(0)

    monkeypatch.setattr(run, "run", record)
    Step(1, window, (1,), (1,), f32_taps).run(kernel, arch)
    options = {"token_major": False} if kernel == "verify" else {}
    wanted = kernels.variant(kernel, arch, window, f32_taps=f32_taps, **options)
    said = import_module(kernels.KERNELS[kernel].module).shared_bytes(wanted)
    assert [launch.shared_bytes for launch in launches] == [said]
    # What CTAs of an SM take together, with a kilobyte each that the system takes: 228 KB at most.
    assert kernels.KERNELS[kernel].ctas_per_sm[window - 1] * (said + 1024) <= 228 * 1024


# Guards of the kernels, each left out


def _nothing(*arguments: object) -> None:
    """In place of a guard."""


GUARDS = [
    ("verify", "impl.cute.mma.fence_async", {"proxy"}),
    ("verify_ws", "impl.cute.mma.fence_async", {"proxy"}),
    ("verify", "impl.cute.verify.mbarrier_wait", {"race", "barrier"}),
    ("verify", "impl.cute.verify.barrier", {"race", "barrier", "tensor-memory"}),
    ("verify_ws", "impl.cute.verify_ws.bulk_wait_read", {"race", "bulk"}),
    ("verify_ws", "impl.cute.verify_ws.mbarrier_arrive", {"deadlock"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "kernel", "where", "kinds"),
    [(arch, *guard) for arch in ARCHITECTURES for guard in GUARDS]
    + [
        ("sm_90a", "verify", "impl.cute.mma_sm90.barrier_warp", {"race"}),
        ("sm_100a", "verify", "impl.cute.window.barrier_warp", {"race"}),
    ],
)
def test_a_guard_left_out_is_found(
    arch: str, kernel: str, where: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some schedule of a few reports an error of that kind, and none another one."""
    monkeypatch.setattr(where, _nothing)
    module = import_module(f"impl.cute.{kernel}")
    options = {"f32_taps": False} | ({"token_major": False} if kernel == "verify" else {})
    wanted = kernels.variant(kernel, arch, STEP.window, **options)
    facts = {"left out": where, "variant": wanted.name, "text": SOURCES}
    function: Any = emulated(
        facts,
        lambda: module.make(wanted, f"--gpu-arch={arch} --enable-tvm-ffi"),
        kernels.VERIFY.arguments,
        kernels.VERIFY.written,
    )
    found = set()
    for schedule in SCHEDULES:
        tensors = [x.clone() for x in STEP.tensors.values()]
        try:
            with settings.using(schedule=schedule):
                function(*tensors, -5.0, 3)
        except EmulatorError as error:
            found.add(error.kind)
    assert found
    assert found <= kinds


def test_a_probe_is_split_into_halves() -> None:
    """What the oracle's bound rests on: high + low keeps 16 bits of a probe."""
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    high = x.to(BF16).float()
    low = (x - high).to(BF16).float()
    assert bool(((x - high - low).abs() <= x.abs() * 2.0**-17).all())
    assert not bool(((x - high).abs() <= x.abs() * 2.0**-17).all())
