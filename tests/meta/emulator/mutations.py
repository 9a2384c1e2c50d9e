"""Faults planted in a kernel's PTX: each one statement changed or dropped, named by what and where.

A mutation is found by its pattern in the compiled text, so the list follows the kernel; sites
are numbered in the order of the text. ``sites`` gives every place of every pattern.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

Edit = Callable[[re.Match[str]], str]


@dataclass(frozen=True)
class Pattern:
    """What is looked for and what it becomes. ``most`` limits the sites: unrolled code repeats them."""

    name: str
    find: re.Pattern[str]
    edit: Edit
    most: int = 4


@dataclass(frozen=True)
class Mutation:
    """One edit of a text: ``name`` is the pattern's, ``site`` counts its places, ``line`` is the text's."""

    name: str
    site: int
    line: int
    old: str
    text: str

    @property
    def label(self) -> str:
        """A name for reports."""
        return f"{self.name}#{self.site}"


def _drop(name: str, pattern: str, most: int = 6) -> Pattern:
    return Pattern(name, re.compile(pattern), lambda found: "", most)


def _swap(name: str, pattern: str, to: str | Edit, most: int = 3) -> Pattern:
    edit = (lambda found: found.expand(to)) if isinstance(to, str) else to
    return Pattern(name, re.compile(pattern), edit, most)


def _constant(name: str, of: str, change: Callable[[int], int], most: int = 2) -> Pattern:
    """An integer literal of a statement, changed."""

    def edit(found: re.Match[str]) -> str:
        return f"{found.group(1)}{change(int(found.group(2)))}{found.group(3)}"

    return Pattern(name, re.compile(of), edit, most)


_DESCRIPTOR = r"(or\.b64\s+%\w+, %\w+, )(\d{12,})(;)"
ORDER = (
    _drop("barrier dropped", r"bar\.sync\s+[^;]*;"),
    _drop("warp barrier dropped", r"bar\.warp\.sync\s+-1;"),
    _drop("proxy fence dropped", r"fence\.proxy\.async\.shared::cta;"),
    _drop("tensor fence before dropped", r"tcgen05\.fence::before_thread_sync;"),
    _drop("tensor fence after dropped", r"tcgen05\.fence::after_thread_sync;"),
    _drop("tensor load wait dropped", r"tcgen05\.wait::ld\.sync\.aligned;"),
    _drop("tensor commit dropped", r"tcgen05\.commit\.[^;]*;"),
    _drop("deallocation dropped", r"tcgen05\.dealloc\.[^;]*;"),
    _drop("store wait dropped", r"cp\.async\.bulk\.wait_group(\.read)? 0;"),
    _drop("store commit dropped", r"cp\.async\.bulk\.commit_group;"),
    _drop("arrival dropped", r"mbarrier\.arrive\.shared[^;]*;"),
    _drop("expected bytes dropped", r"mbarrier\.arrive\.expect_tx[^;]*;"),
    _drop("mbarrier not initialised", r"mbarrier\.init[^;]*;", 3),
    _drop("dependency wait dropped", r"griddepcontrol\.wait;"),
    _swap("phase always even", r"(try_wait\.parity[^;]*\], ?)%r\d+", r"\g<1>0"),
    _swap("phase always odd", r"(try_wait\.parity[^;]*\], ?)%r\d+", r"\g<1>1"),
    _swap("wait not repeated", r"(mbarrier\.try_wait[^;]*;[^}]*selp\.u32 %r\d+,1,)0", r"\g<1>1", 4),
    _swap("expected 16 bytes more", r"(expect_tx[^;]*\], )(%r\d+)(;)", lambda m: _sum(m, 16)),
    _swap("expected 16 bytes fewer", r"(expect_tx[^;]*\], )(%r\d+)(;)", lambda m: _sum(m, -16)),
    _swap("one arrival more expected", r"(mbarrier\.init[^;]*\], )(%r\d+)(;)", lambda m: _sum(m, 1)),
    _swap("barrier of fewer threads", r"bar\.sync\s+1, 128;", "bar.sync 1, 96;"),
)  # fmt: skip
"""Barriers, phases, fences, completion."""


def _sum(found: re.Match[str], by: int) -> str:
    """The register of group 2, with something added to it first."""
    head, register, tail = found.groups()
    scratch = f"{{ .reg .b32 changed; add.s32 changed, {register}, {by}; "
    return f"{scratch}{_whole(found, head)}changed{tail} }}"


def _whole(found: re.Match[str], head: str) -> str:
    """The statement's beginning, which a pattern may leave out."""
    start = found.string.rfind("mbarrier", 0, found.start(1))
    return found.string[start : found.start(1)] + head if not head.startswith("mbarrier") else head


PLACES = (
    _constant("row groups closer", _DESCRIPTOR, lambda d: d - (8 << 32)),
    _constant("row groups wider", _DESCRIPTOR, lambda d: d + (64 << 32)),
    _constant("leading offset changed", _DESCRIPTOR, lambda d: d + (1 << 16)),
    _constant("swizzle bits flipped", _DESCRIPTOR, lambda d: d ^ (2 << 61)),
    _constant("descriptor version", _DESCRIPTOR, lambda d: d ^ (1 << 46)),
    _constant("eight columns only", r"(kind::f16 [^;]*, )(134481040)(,)", lambda d: d - (1 << 17), 3),
    _constant("half the rows", r"(kind::f16 [^;]*, )(134481040)(,)", lambda d: d - (4 << 24), 1),
    _swap("always accumulates", r"setp\.ne\.b32 p, (%r\d+), 0;( tcgen05\.mma)", r"setp.eq.b32 p, 0, 0;\2", 1),
    _swap("never accumulates", r"setp\.ne\.b32 p, (%r\d+), 0;( tcgen05\.mma)", r"setp.ne.b32 p, 0, 0;\2", 3),
    _swap("other quarter of tensor memory", r"(tcgen05\.ld[^;]*\[%r\d+)(\])", r"\1+2097152\2"),
    _swap("columns of the next", r"(tcgen05\.ld[^;]*\[%r\d+)(\])", r"\1+16\2"),
    _swap("tickets by two", r"(atom\.[^;]*\], )1;", r"\g<1>2;"),
    _drop("counter not reset", r"st\.relaxed\.gpu\.global\.u32[^;]*;"),
    _swap(
        "tensor copy one box on", r"(cp\.async\.bulk\.tensor[^{]*\{%r\d+, )(%r\d+)(, %r\d+)", r"\1 %r1\3", 2
    ),
    _swap("tensor copy into the next box", r"(cp\.async\.bulk\.tensor[^\[]*\[%r\d+)(\],)", r"\1+128\2", 2),
    _swap("16 bytes fewer stored", r"(bulk_group \[%rd\d+\], \[%r\d+\], )(%r\d+)(;)", lambda m: _store(m), 2),
    _swap(
        "shared word beside", r"(ld\.shared\.b32\s+%r\d+, \[%r\d+)(\+\d+)?(\])", lambda m: _beside(m, 4), 5
    ),
    _swap("shared half beside", r"(st\.shared\.b16\s+\[%r\d+)(\+\d+)?(\])", lambda m: _beside(m, 2), 5),
)
"""Descriptors, tickets, addresses."""


def _store(found: re.Match[str]) -> str:
    head, register, tail = found.groups()
    return f"{head}{register}{tail}".replace(register, "16368" if "32768" in found.string else "16")


def _beside(found: re.Match[str], by: int) -> str:
    head, offset, tail = found.groups()
    return f"{head}+{int(offset or 0) + by}{tail}"


_LIMIT = r"(\s+%p\d+, %r\d+, )(%r\d+|\d+);"
ARITHMETIC = (
    _swap("strictly below becomes below", rf"setp\.lt\.s32{_LIMIT}", r"setp.le.s32\1\2;", 6),
    _swap("below becomes strictly below", rf"setp\.le\.s32{_LIMIT}", r"setp.lt.s32\1\2;", 6),
    _swap("above becomes at least", rf"setp\.gt\.s32{_LIMIT}", r"setp.ge.s32\1\2;", 4),
    _swap("null test takes 0", r"setp\.gt\.s64(\s)", r"setp.ge.s64\1", 2),
    _swap("subtraction as addition", r"sub\.f32(\s)", r"add.f32\1", 4),
    _swap("sign lost", r"neg\.f32(\s+%\w+, %\w+;)", r"mov.b32\1", 3),
    _swap("shuffle distance", r"(shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )16,", r"\g<1>8,", 3),
    _swap("halves exchanged", r"(cvt\.rn\.bf16x2\.f32 %r\d+,)(%r\d+),(%r\d+);", r"\1\3,\2;", 2),
    _swap("truncated, not rounded", r"cvt\.rn\.bf16\.f32(\s+)(%rs\d+), (%r\d+);",
          r"{ .reg .b16 low; mov.b32 {low, \2}, \3; }", 3),
    _swap("exponential of the double", r"ex2\.approx\.ftz\.f32\s+(%r\d+), (%r\d+);",
          r"add.f32 \1, \2, \2; ex2.approx.ftz.f32 \1, \1;", 3),
    _swap("root not taken", r"rsqrt\.approx\.f32\s+(%r\d+), (%r\d+);", r"mov.b32 \1, \2;", 2),
    _swap("product not added", r"fma\.rn\.f32(\s+%r\d+, %r\d+, %r\d+, )%r\d+;",
          r"fma.rn.f32\g<1>0f00000000;", 4),
    _swap("epsilon ten times", r"0f358637BD", "0f3727C5AC", 2),
)  # fmt: skip
"""Masks, signs, rounding, functions."""
PATTERNS = ORDER + PLACES + ARITHMETIC


def sites(text: str) -> Iterator[Mutation]:
    """Every mutation of a kernel's text, spread over the places of each pattern."""
    for pattern in PATTERNS:
        found = list(pattern.find.finditer(text))
        if not found:
            continue
        step = max(1, len(found) // pattern.most)
        for site, match in list(enumerate(found))[::step][: pattern.most]:
            yield Mutation(
                pattern.name,
                site,
                text.count("\n", 0, match.start()) + 1,
                " ".join(match.group(0).split())[:100],
                _edited(text, match, pattern.edit(match)),
            )


def _edited(text: str, found: re.Match[str], new: str) -> str:
    start = found.start()
    if new.startswith("{ .reg .b32 changed;"):  # the whole statement was rebuilt
        start = text.rfind("mbarrier", 0, found.start(1) + len("mbarrier"))
    return text[:start] + new + text[found.end() :]
