"""What a process of the suite does before its work: as little as it can."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ci.gpus import visible

REPOSITORY = Path(__file__).resolve().parents[2]
ASKED = (
    "import {module}, gc, json; print(json.dumps([gc.isenabled(), gc.get_freeze_count(), gc.get_stats()]))"
)
LOADED = 100_000
"""Objects that torch makes when it is loaded, at the least."""


@pytest.mark.parametrize("module", ["ci.cli", "ci.worker"])
def test_what_is_loaded_is_not_searched_for_garbage(module: str) -> None:
    """Neither while it is loaded nor later; what the process makes then is."""
    command = [sys.executable, "-c", ASKED.format(module=module)]
    collecting, frozen, stats = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert collecting
    assert frozen > LOADED
    assert stats[0]["collections"] < 100
    assert stats[2]["collections"] < 3


def test_nor_is_it_in_a_run_of_pytest() -> None:
    """Hypothesis collects before every run; the tests themselves are frozen too."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > LOADED
    assert not any(found is sys.modules[__name__].__dict__ for found in gc.get_objects())


def test_asking_for_gpus_does_not_load_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not wanted')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(REPOSITORY))))
    visible()
