"""What the README shows works as it stands."""

import re
from pathlib import Path

import pytest

from ci.executor import Executor
from tests.meta.commands import plug_in
from tests.meta.test_executor import RIGHT

README = Path(__file__).parents[2] / "README.md"
MY_PACKAGE = """
from impl.contract import Records
from zoo_outside import compute


def kda_verify(correction, key_gate, **arguments):
    return compute(records=Records(correction, key_gate), **arguments)
"""


def test_the_plug_in_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(# my_kernels.py.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 10
    plug_in(tmp_path)
    (tmp_path / "my_kernels.py").write_text(code[1])
    (tmp_path / "my_package.py").write_text(MY_PACKAGE)
    monkeypatch.chdir(tmp_path)
    with Executor("my_kernels:factory", "cpu") as executor:
        assert executor.check(RIGHT).ok
