"""The emulator's approximate functions: the tables, the three modes, and how far they may be off."""

import hashlib
import lzma
from pathlib import Path

import mpmath
import numpy as np
import pytest

from impl.cute.emulator import mufu
from impl.cute.emulator.launch import Functions
from impl.cute.emulator.reference.functions import STEPS, ExactHopper, Perturbed, Rounded, chosen
from impl.cute.emulator.reference.splitmix import GOLDEN, Generator, finalise

INF, NAN, SIGN = 0x7F800000, 0x7FFFFFFF, 0x80000000
ONE, SMALLEST_NORMAL, LARGEST, SUBNORMAL = 0x3F800000, 0x00800000, 0x7F7FFFFF, 0x00000001
ARGUMENTS = {"ex2": 1, "rsqrt": 1, "rcp": 1, "div_approx": 2, "div_full": 2}


def floats(*bits: int) -> np.ndarray:
    """Fp32 numbers of those bits."""
    return np.array(bits, np.uint32).view(np.float32)


def call(functions: Rounded | ExactHopper, name: str, *arguments: np.ndarray) -> np.ndarray:
    """The bits of a function's results."""
    with np.errstate(all="ignore"):
        result: np.ndarray = getattr(functions, name)(*arguments).view(np.uint32)
    return result


def drawn(name: str, count: int, seed: int) -> tuple[np.ndarray, ...]:
    """Arguments over the range of results that are normal numbers."""
    random = np.random.default_rng(seed)
    if name == "ex2":
        return (random.uniform(-126, 128, count).astype(np.float32),)
    if name == "rsqrt":
        return (random.integers(1, INF, count, np.uint32).view(np.float32),)
    exponents = random.uniform(-60, 60, (ARGUMENTS[name], count))
    return tuple((np.exp2(row) * random.choice([-1, 1], count)).astype(np.float32) for row in exponents)


# the tables


@pytest.mark.parametrize(
    ("name", "entries", "digest"),
    [
        ("ex2", 2**23, "4230b4a27ebed3eb6df3051cb604d77651b2b1e2f46d55b4f4045e7d7e48c224"),
        ("rsq", 2**24, "218fc04d271773269367dedf4cff9ff719081b1218c3d67d248d8d6126040246"),
        ("rcp", 2**23, "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"),
    ],
)
def test_the_file_holds_the_measured_tables(name: str, entries: int, digest: str) -> None:
    table = getattr(mufu.tables(), name)
    assert (len(table), table.dtype) == (entries, np.dtype(np.uint32))
    assert hashlib.sha256(table.tobytes()).hexdigest() == digest
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 0


def test_the_tables_are_monotone_and_within_the_measured_errors() -> None:
    table = mufu.tables()
    assert np.all(np.diff(table.ex2.astype(np.int64)) >= 0)
    assert np.all(np.diff(table.rsq.astype(np.int64)) <= 0)
    assert np.all(np.diff(table.rcp.astype(np.int64)) <= 0)
    m = 1 + np.arange(2**23) / 2**23
    cases = (
        (table.ex2 | np.uint32(ONE), np.exp2(m - 1), 1.3903),
        (table.rsq, 1 / np.sqrt(np.concatenate([m, 2 * m])), 1.5145),
        (table.rcp, 1 / m, 0.9749),
    )
    for bits, exact, bound in cases:
        ulp = np.exp2(np.floor(np.log2(exact)) - 23)
        off = np.abs(bits.view(np.float32) - exact) / ulp
        assert bound - 1e-3 < off.max() <= bound


def test_a_table_with_jumps_survives_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = np.array([7, 6, 6, 300, 299, 0, 128, 0, 2**30, 2**30 - 129], np.uint32)
    raw = b"".join(mufu.encode(name, jumps + i) for i, name in enumerate(("ex2", "rsq", "rcp")))
    monkeypatch.setattr(mufu, "FILE", tmp_path / "tables.xz")
    mufu.FILE.write_bytes(lzma.compress(raw))
    read = mufu.tables.__wrapped__()
    for i, table in enumerate(read):
        assert np.array_equal(table, jumps + i)


# special values, in every mode

SPECIAL = [
    ("ex2", (0x00000000,), ONE),
    ("ex2", (SIGN,), ONE),
    ("ex2", (SUBNORMAL,), ONE),
    ("ex2", (ONE,), 0x40000000),
    ("ex2", (0xC2FC0000,), SMALLEST_NORMAL),  # -126
    ("ex2", (0xC2FC0001,), 0),
    ("ex2", (0xC3160000,), 0),  # -150
    ("ex2", (0xFF7FFFFF,), 0),
    ("ex2", (0x43000000,), INF),  # 128
    ("ex2", (LARGEST,), INF),
    ("ex2", (INF,), INF),
    ("ex2", (INF | SIGN,), 0),
    ("ex2", (0x7FC00001,), NAN),
    ("ex2", (0xFFFFFFFF,), NAN),
    ("rsqrt", (0x00000000,), INF),
    ("rsqrt", (SIGN,), INF | SIGN),
    ("rsqrt", (ONE,), ONE),
    ("rsqrt", (0x40800000,), 0x3F000000),
    ("rsqrt", (0x00000200,), 0x62800000),  # 2^-140 to 2^70
    ("rsqrt", (ONE | SIGN,), NAN),
    ("rsqrt", (SUBNORMAL | SIGN,), NAN),
    ("rsqrt", (INF,), 0),
    ("rsqrt", (INF | SIGN,), NAN),
    ("rsqrt", (0x7F800001,), NAN),
    ("rcp", (0x00000000,), INF),
    ("rcp", (SIGN,), INF | SIGN),
    ("rcp", (SUBNORMAL,), INF),
    ("rcp", (SUBNORMAL | SIGN,), INF | SIGN),
    ("rcp", (ONE | SIGN,), ONE | SIGN),
    ("rcp", (LARGEST,), 0),
    ("rcp", (LARGEST | SIGN,), SIGN),
    ("rcp", (INF | SIGN,), SIGN),
    ("rcp", (0xFFC00000,), NAN),
    ("div_approx", (ONE, 0), INF),
    ("div_approx", (0, 0), NAN),
    ("div_approx", (SUBNORMAL, ONE), 0),
    ("div_approx", (ONE, SUBNORMAL | SIGN), INF | SIGN),
    ("div_approx", (SMALLEST_NORMAL, 0x40000000), 0),
    ("div_approx", (INF, INF), NAN),
    ("div_approx", (ONE | SIGN, INF), SIGN),
    ("div_approx", (0x7FC00001, ONE), NAN),
    ("div_full", (ONE, 0), INF),
    ("div_full", (0, SIGN), NAN),
    ("div_full", (SUBNORMAL, ONE), SUBNORMAL),
    ("div_full", (SUBNORMAL, SUBNORMAL), ONE),
    ("div_full", (0x7F000000, 0x7F000000), ONE),
    ("div_full", (SMALLEST_NORMAL, 0x40000000), 0x00400000),
    ("div_full", (INF, INF | SIGN), NAN),
    ("div_full", (ONE, 0xFFFFFFFF), NAN),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), SPECIAL)
def test_special_values(name: str, arguments: tuple[int, ...], expected: int) -> None:
    operands = [floats(x) for x in arguments]
    for functions in (Rounded(), ExactHopper()):
        assert call(functions, name, *operands)[0] == expected, type(functions).__name__
    moved = int(call(Perturbed(3), name, *operands)[0])
    normal = 1 <= expected >> 23 & 255 <= 254
    assert abs(moved - expected) <= (STEPS[name] if normal else 0)


# rounded


def _exact(name: str, *arguments: float) -> mpmath.mpf:
    if name == "ex2":
        return mpmath.power(2, arguments[0])
    if name == "rsqrt":
        return 1 / mpmath.sqrt(arguments[0])
    return 1 / mpmath.mpf(arguments[0]) if name == "rcp" else mpmath.mpf(arguments[0]) / arguments[1]


@pytest.mark.parametrize("name", ARGUMENTS)
def test_rounded_is_the_nearest_fp32(name: str) -> None:
    arguments = drawn(name, 1500, seed=1)
    found = call(Rounded(), name, *arguments)
    with mpmath.workprec(200):
        for i, bits in enumerate(found.tolist()):
            exact = _exact(name, *(float(x[i]) for x in arguments))
            errors = [abs(mpmath.mpf(float(floats(bits + d)[0])) - exact) for d in (-1, 0, 1)]
            assert errors[1] == min(errors), [float(x[i]).hex() for x in arguments]


# exact-sm90


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("ex2", [(0x422A12D3, 0x54B75737), (0xC2841391, 0x1E794ECC), (0xBCE1E986, 0x3F7B272B)]),
        ("rsqrt", [(0x41051AD7, 0x3EB183A0), (0x07956B8F, 0x5B6CF0EA), (0x7E800001, 0x1FFFFFFE)]),
        ("rcp", [(0x3DD9538A, 0x4116C723), (0x1DBC8721, 0x612DCF54), (0xBF65A75B, 0xBF8EAF34)]),
        ("div_approx", [(0xBD14114B, 0x42ED09E6, 0xB99FE970), (0x41F5CC0D, 0xFF7FFFFF, 0x80000000)]),
        ("div_full", [(0xBD14114B, 0x42ED09E6, 0xB99FE970), (0xCC0534B4, 0xB73862E3, 0x5438F111)]),
    ],
)
def test_exact_gives_what_an_h200_gave_where_rounding_would_not(
    name: str, pairs: list[tuple[int, ...]]
) -> None:
    for *arguments, measured in pairs:
        operands = [floats(x) for x in arguments]
        assert call(ExactHopper(), name, *operands)[0] == measured
        assert call(Rounded(), name, *operands)[0] != measured


@pytest.mark.parametrize("name", ARGUMENTS)
def test_exact_is_within_its_steps_of_rounded(name: str) -> None:
    arguments = drawn(name, 200_000, seed=2)
    exact, rounded = (call(f, name, *arguments).astype(np.int64) for f in (ExactHopper(), Rounded()))
    assert 0 < np.abs(exact - rounded).max() <= STEPS[name]


def test_ex2_of_a_negative_argument_reads_the_ones_complement() -> None:
    # -2^-23 - 2^-24 truncates to one unit; its complement is index 2^23 - 2, the negation would be 2^23 - 1.
    at = call(ExactHopper(), "ex2", np.array([-1.5 * 2.0**-23], np.float32))[0]
    assert at == mufu.tables().ex2[2**23 - 2] | 0x3F000000


# perturbed


@pytest.mark.parametrize("name", ARGUMENTS)
def test_perturbed_moves_by_every_step_up_to_its_bound(name: str) -> None:
    arguments = drawn(name, 20_000, seed=4)
    rounded = call(Rounded(), name, *arguments).astype(np.int64)
    moved = call(Perturbed(5), name, *arguments).astype(np.int64) - rounded
    values, counts = np.unique(moved, return_counts=True)
    assert values.tolist() == list(range(-STEPS[name], STEPS[name] + 1))
    assert counts.min() > 0.8 * counts.mean()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_perturbed_depends_on_operands_and_seed_alone(name: str) -> None:
    arguments = drawn(name, 1000, seed=6)
    first, again, other = (call(Perturbed(seed), name, *arguments) for seed in (7, 7, 8))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.array_equal(call(Perturbed(7), name, *(x[::-1].copy() for x in arguments)), first[::-1])


def test_perturbed_never_leaves_the_normal_numbers() -> None:
    edges = floats(*[SMALLEST_NORMAL, LARGEST] * 200)
    for seed in range(20):
        bits = call(Perturbed(seed), "div_full", edges, np.full_like(edges, 1))
        assert set(bits.tolist()) <= {SMALLEST_NORMAL + i for i in range(3)} | {LARGEST - i for i in range(3)}


def test_the_hash_is_one_draw_of_the_generator() -> None:
    x, b, seed = floats(0x40490FDB), floats(0x402DF854), 11
    key = 0x40490FDB ^ 0x402DF854 << 32 ^ (seed * GOLDEN) % 2**64
    offset = Generator(key).next() % 5 - 2
    rounded = call(Rounded(), "div_full", x, b)[0]
    assert call(Perturbed(seed), "div_full", x, b)[0] == int(rounded) + offset


def test_the_generator_is_splitmix64() -> None:
    random = Generator(1234567)  # the sequence of the published implementation
    assert [random.next() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]
    drawn_below = [Generator(i).below(7) for i in range(200)]
    assert set(drawn_below) == set(range(7))
    assert int(finalise(np.array([GOLDEN], np.uint64))[0]) == Generator(0).next()


# the choice


@pytest.mark.parametrize(
    ("mode", "kind"), [("exact-sm90", ExactHopper), ("rounded", Rounded), ("perturbed", Perturbed)]
)
def test_the_launch_chooses_the_mode(mode: Functions, kind: type) -> None:
    assert type(chosen(mode, seed=0)) is kind
