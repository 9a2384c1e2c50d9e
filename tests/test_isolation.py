"""Kernels that break a GPU process: one failure each, of the right kind, and all else runs on."""

import json
from pathlib import Path

import pytest
import torch

from tests.meta.commands import gone, kdafuzz

pytestmark = pytest.mark.gpu

KINDS = {
    "illegal": ("raised", "CUDA error"),
    "asserting": ("raised", "device-side assert"),
    "hang": ("hang", "no result after 10 s"),
    "leak": ("leak", "every call of this case keeps GPU memory"),
    "oom": ("raised", "out of memory"),
    "segfault": ("crash", "SIGSEGV"),
    "abort": ("crash", "SIGABRT"),
}
"""The kind of each one's failure, and what its text says."""


@pytest.mark.parametrize("name", KINDS)
def test_one_failure_and_all_else_runs(name: str, device: str, tmp_path: Path) -> None:
    """Beside it in the same run, on the same GPU, a right implementation judges all of its examples."""
    if device != "cuda" or not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA GPU; found {device}")
    done = kdafuzz(
        *("fuzz", "--impl", f"tests.meta.gpu_faults:{name},triton", "--op", "verify", "--device", "cuda"),
        *("--examples", "40", "--jobs", "2", "--seed", "5", "--palette", "4", "--timeout", "10"),
        *("--shrink-seconds", "0", "--save", "saved", "--json", "told.json"),
        cwd=tmp_path,
        timeout=300.0,
    )
    assert done.code == 1, done.err
    rows = {row["implementation"]: row for row in json.loads((tmp_path / "told.json").read_text())["rows"]}
    broken, right = rows[f"tests.meta.gpu_faults:{name}"], rows["triton"]
    kind, text = KINDS[name]
    assert [failure["flaky"] for failure in broken["failures"]] == [False]
    assert broken["failures"][0]["verdict"][0].startswith(f"{kind}: ")
    assert text in broken["failures"][0]["verdict"][0]
    assert (right["failures"], right["tally"]["examples"]) == ([], 40)
    assert len(list((tmp_path / "saved").rglob("*.json"))) == 1
    assert gone(tmp_path)
