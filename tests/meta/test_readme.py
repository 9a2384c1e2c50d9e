"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ci.executor import Executor
from ci.failures import load
from oracle.values import build
from tests.fake_vllm import write_tree
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


OPS = "vllm/models/kimi_k3/nvidia/ops/recoverssm.py"
FAKE = {
    OPS: "from zoo_outside import compute as kda_recoverssm_verify\n",
    "vllm/models/kimi_k3/nvidia/kda.py": """
import torch
from impl.contract import Records
from vllm.models.kimi_k3.nvidia.ops.recoverssm import kda_recoverssm_verify

def forward():
    torch.manual_seed(3)
    x, slots = torch.randn(4, 2, 64, dtype=torch.bfloat16), torch.tensor([7, 2], dtype=torch.int32)
    q, k, v, g = x.view(1, 4, 2, 64).split(16, -1)
    out = torch.empty(1, 4, 2, 16, dtype=torch.bfloat16)
    state = torch.randn(1000, 2, 16, 16)
    records = Records(torch.empty(8, 2, 3, 16), torch.empty(8, 2, 3, 32, dtype=torch.bfloat16))
    starts = torch.tensor([0, 3, 4], dtype=torch.int32)
    q, k, v, g, beta = (y.contiguous() for y in (q, k, v, g, q[..., 0]))
    bias = torch.zeros(32)
    return kda_recoverssm_verify(
        q, k, v, g, beta, bias[:2], bias, -5.0, state, records, starts, slots, 3, out=out
    )
""",
    "vllm/__init__.py": """
import os
class LLM:
    def __init__(self, model, enforce_eager):
        assert enforce_eager and os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    def generate(self, prompts):
        from vllm.models.kimi_k3.nvidia import kda
        for _ in range(9):
            kda.forward()
""",
}


def test_the_dump_recipe(tmp_path: Path) -> None:
    """As it stands, beside a vLLM with that module and class; it leaves four dumps that are judged right."""
    code = re.search(r"```python\n(# dump_layer.py.*?)```", README.read_text(), re.DOTALL)
    assert code is not None
    assert len([line for line in code[1].splitlines() if line.strip()]) <= 10
    plug_in(tmp_path)
    write_tree(tmp_path, FAKE)
    (tmp_path / "dump_layer.py").write_text(code[1])
    path = os.pathsep.join((str(tmp_path), str(README.parent)))
    done = subprocess.run(
        [sys.executable, "dump_layer.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    dumps = sorted((tmp_path / "dumps").iterdir())
    assert len(dumps) == 4
    assert dumps[0].stat().st_size < 20_000
    case = load(dumps[0]).case
    assert (case.call.rows, case.call.qlens, case.call.slots) == (2, (3, 1), (1, 2))
    assert build(case).tensors["state"].std() > 0.5
    with Executor("triton", "cpu") as executor:
        assert executor.check(case).ok
