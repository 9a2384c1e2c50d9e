"""Faults planted in the PTX of this project's CuTe kernels: the emulator and the oracle find them.

``python -m tests.meta.emulator.planted_report IMPLEMENTATION`` plants every one of them, in
shipped kernels too; here it is every third.
"""

import pytest

from impl.cute.emulator.compiled import why_absent
from tests.meta.emulator.mutations import sites
from tests.meta.emulator.planted import Subject
from tests.meta.emulator.planted_report import SUBJECTS

EVERY = 3
EXPLAINED = {
    "leading offset changed": "a swizzled operand has no leading offset: the field is not read",
    "barrier dropped": "the barriers of the items, or of the pages, order the same accesses",
    "tensor fence before dropped": "no warp touches tensor memory before it, or another fence follows",
    "tensor fence after dropped": "nothing touches tensor memory between it and the next",
    "proxy fence dropped": "it follows the mbarriers' initialisation, which has a fence of its own",
    "warp barrier dropped": "the same lane goes on, or the accesses before and after it are of one lane",
    "strictly below becomes below": "the tested number is never equal to the limit there",
    "below becomes strictly below": "the tested number is never equal to the limit there",
    "above becomes at least": "the tested number is never equal to the limit there",
    "truncated, not rounded": "the low half of a probe: its last bit is below the bound of the split",
}
"""Mutations of these kinds may leave a kernel as right as it was, at some of their places."""
MOST_EXPLAINED = 0.2
"""Share of a kernel's mutations that may go unnoticed so."""


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "path"), SUBJECTS)
def test_planted_faults_are_found(operation: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_absent():
        pytest.skip(f"needs compiled CuTe kernels; {why}")
    monkeypatch.setenv("KDAFUZZ_CUTE_ARCH", "sm_100a")
    subject = Subject("cute", operation, path)
    text = max(subject.texts, key=len)
    planted = list(sites(text))[::EVERY]
    missed = [m for m in planted if subject.find(text, m) is None]
    unexplained = [f"{m.label} at line {m.line}: {m.old}" for m in missed if m.name not in EXPLAINED]
    assert not unexplained
    assert len(missed) <= MOST_EXPLAINED * len(planted), [m.label for m in missed]
