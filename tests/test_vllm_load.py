"""Loading kernel modules: made-up trees, and the real releases where their wheels are at hand."""

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from impl.vllm import cache, wheels
from impl.vllm.imports import rename_imports
from impl.vllm.load import AbsentError, LoadedVllm, load
from impl.vllm.source import Source, SourceError, resolve
from tests.fake_vllm import CUTE, KERNELS, SHARED, UTILS, tree_files, write_tree

REPOSITORY = Path(__file__).resolve().parents[1]
RELEASES = {"0.29.0": "slot", "0.30.0": "slot", "0.31.0": "slot", "0.32.0": "slot", "0.33.0": "row"}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KDAFUZZ_WHEELS", raising=False)


@pytest.fixture
def opened() -> Iterator[Callable[[Source], LoadedVllm]]:
    """Load sources that are unloaded after the test."""
    seen: list[LoadedVllm] = []

    def opener(source: Source) -> LoadedVllm:
        seen.append(load(source))
        return seen[-1]

    yield opener
    for loaded in seen:
        loaded.unload()


@pytest.fixture
def no_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(version: Version, folder: Path) -> Path:
        raise AssertionError(f"a test asked the package index for {version}")

    monkeypatch.setattr(wheels, "download", refuse)


# Loading


def test_absent_modules_and_names(tmp_path: Path, opened: Callable[[Source], LoadedVllm]) -> None:
    loaded = opened(resolve(f"vllm:{write_tree(tmp_path, tree_files())}"))
    packed = r"^absent in vllm@0\.30\.1: no module vllm/models/kimi_k3/nvidia/ops/kda_conv\.py$"
    with pytest.raises(AbsentError, match=packed):
        loaded.packed_conv()
    with pytest.raises(AbsentError, match=r"no module vllm/models/kimi_k3/nvidia/recoverssm/kernels\.py"):
        loaded.cute()
    with pytest.raises(
        AbsentError, match=r"^absent in vllm@0\.30\.1: no causal_conv1d_fn in vllm/.*conv1d\.py$"
    ):
        loaded.attribute("vllm.model_executor.layers.mamba.ops.causal_conv1d", "causal_conv1d_fn")


def test_what_an_import_lacks_is_named(tmp_path: Path, opened: Callable[[Source], LoadedVllm]) -> None:
    imports = {
        "from vllm.models.kimi_k3.nvidia.ops.gone import x\n": r"no module .*ops/gone\.py \(imported by vllm",
        "from vllm.config import x\n": r"no module vllm/config\.py \(imported by vllm",
        "from vllm.outside import x\n": "vllm.outside .* has no stand-in",
        "from vllm.platforms import gone\n": "cannot import name 'gone' from 'vllm.platforms'",
        "import cutlass_that_is_not_there\n": "No module named 'cutlass_that_is_not_there'",
    }
    for index, (line, sentence) in enumerate(imports.items()):
        files = tree_files() | {KERNELS: line, "vllm/outside.py": "x = 1\n"}
        loaded = opened(resolve(f"vllm:{write_tree(tmp_path / str(index), files)}"))
        with pytest.raises(AbsentError, match=sentence):
            loaded.verify()


def test_broken_code_is_a_source_error(tmp_path: Path, opened: Callable[[Source], LoadedVllm]) -> None:
    for index, text in enumerate(("def (\n", "1 / 0\n")):
        loaded = opened(resolve(f"vllm:{write_tree(tmp_path / str(index), tree_files() | {KERNELS: text})}"))
        with pytest.raises(SourceError, match=r"cannot load .*(SyntaxError|ZeroDivisionError)"):
            loaded.verify()


def test_cute_needs_the_dsl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: Callable[[Source], LoadedVllm]
) -> None:
    loaded = opened(resolve(f"vllm:{write_tree(tmp_path, tree_files() | {CUTE: 'K = 128'})}"))
    # An unrelated package of that name does not count.
    write_tree(tmp_path / "site", {"cutlass/__init__.py": ""})
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *(p for p in sys.path if "cutlass" not in p)])
    monkeypatch.delitem(sys.modules, "cutlass", raising=False)
    with pytest.raises(AbsentError, match=r"need cutlass\.cute; install the CuTe DSL: pip install"):
        loaded.cute()
    write_tree(tmp_path / "site", {"cutlass/cute/__init__.py": ""})
    assert loaded.cute().K == 128


def test_kernels_kept_in_a_shared_module_are_found(
    tmp_path: Path, opened: Callable[[Source], LoadedVllm]
) -> None:
    shared = tree_files()
    imports = "from vllm.model_executor.layers.mamba.ops.recoverssm import KDARecoverSSMCommitContext\n"
    shared[SHARED] = "class KDARecoverSSMCommitContext:\n    pass\n"
    shared[KERNELS] = shared[KERNELS].split("class")[0] + imports
    loaded = opened(resolve(f"vllm:{write_tree(tmp_path, shared)}"))
    assert loaded.commit_context().__module__.endswith(".mamba.ops.recoverssm")


def test_load_is_remembered_until_unloaded(tmp_path: Path) -> None:
    source = resolve(f"vllm:{write_tree(tmp_path, tree_files())}")
    first = load(source)
    assert load(source) is first
    name = first.conv().__name__
    assert name in sys.modules
    first.unload()
    assert name not in sys.modules
    with pytest.raises(SourceError, match="was unloaded"):
        first.conv()
    again = load(source)
    assert again is not first
    assert again.record_layout() == "slot"
    again.unload()


def test_stand_ins_answer_for_this_machine(tmp_path: Path, opened: Callable[[Source], LoadedVllm]) -> None:
    loaded = opened(resolve(f"vllm:{write_tree(tmp_path, tree_files())}"))
    platform = loaded.module("vllm.platforms").current_platform
    # True would swap the Triton convolutions for vLLM's CPU ones.
    assert platform.is_cpu() is False
    assert platform.is_cuda() == platform.has_device_capability((7, 0))
    assert platform.is_device_capability_family(100) in (False, platform.has_device_capability(100))
    with pytest.raises(AttributeError, match="has no is_moon"):
        platform.is_moon()
    utils = loaded.module("vllm.model_executor.layers.mamba.mamba_utils")
    loaded.set_conv_state_dim_first(True)
    assert (utils.is_conv_state_dim_first(), utils.get_conv_state_layout()) == (True, "DS")


def test_constants_fall_back_to_the_contract(tmp_path: Path, opened: Callable[[Source], LoadedVllm]) -> None:
    files = tree_files()
    del files[UTILS]
    loaded = opened(resolve(f"vllm:{write_tree(tmp_path, files)}"))
    assert loaded.constants() == {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import vllm", "import P, P as vllm"),
        ("import vllm.a.b as c, os", "import P.a.b as c, os"),
        ("import vllm.a", "import P.a, P as vllm"),
        ("from vllm import a", "from P import a"),
        (
            "é = 1; from   vllm.a import (\n  b,\n)\nx = 'vllm.a'",
            "é = 1; from   P.a import (\n  b,\n)\nx = 'vllm.a'",
        ),
        ("from \\\n vllm.a import b", "from \\\n P.a import b"),
        ("from .vllm import a\nfrom vllm_other import b\nimport vllmx", None),
        (
            "def f():\n    if 1:\n        from vllm.a import b",
            "def f():\n    if 1:\n        from P.a import b",
        ),
    ],
)
def test_renaming(before: str, after: str | None) -> None:
    renamed = rename_imports(before, "P")
    assert renamed == (before if after is None else after)
    assert renamed.count("\n") == before.count("\n")
    ast.parse(renamed)


# Real releases


@pytest.fixture(scope="session")
def real_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("releases")


USER_CACHE = os.environ.get("KDAFUZZ_CACHE")
USER_WHEELS = os.environ.get("KDAFUZZ_WHEELS")


def real(version: str, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """Resolve a release from the user's cache or wheels; skip if neither has it, and never download."""
    if USER_CACHE is None:
        monkeypatch.delenv("KDAFUZZ_CACHE", raising=False)
    else:
        monkeypatch.setenv("KDAFUZZ_CACHE", USER_CACHE)
    if not cache.cached(f"release-{version}"):
        if USER_WHEELS:
            monkeypatch.setenv("KDAFUZZ_WHEELS", USER_WHEELS)
        if not wheels.local(Version(version)):
            pytest.skip(f"needs a vLLM wheel of {version} (KDAFUZZ_WHEELS or the cache); found none")
        monkeypatch.setenv("KDAFUZZ_CACHE", str(real_cache))
    return resolve(f"vllm@{version}")


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("version", RELEASES)
def test_a_release_loads(version: str, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(real(version, real_cache, monkeypatch))
    assert loaded.record_layout() == RELEASES[version]
    assert (loaded.records_class() is None) == (RELEASES[version] == "slot")
    assert callable(loaded.commit_context().create)
    assert callable(loaded.conv().causal_conv1d_update)
    assert loaded.constants() == {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1}
    with pytest.raises(AbsentError, match=r"kda_conv\.py"):
        loaded.packed_conv()
    if RELEASES[version] == "slot":
        with pytest.raises(AbsentError, match=r"recoverssm/kernels\.py"):
            loaded.cute()
    assert "vllm" not in sys.modules


RUN = """
import importlib.util, sys, time
import torch
from impl.vllm.load import load
from impl.vllm.source import resolve

torch.manual_seed(0)
H, K, Q, T = 2, 16, 3, 4
mode, *texts = sys.argv[1:]
loaded = [load(resolve(text)) for text in texts]
start = time.perf_counter()
for each in loaded:
    each.verify(), each.conv()
print("seconds", (time.perf_counter() - start) / len(loaded))
for each in loaded:
    kernel = each.module("vllm.models.kimi_k3.nvidia.ops.recoverssm")._kda_recoverssm_verify_kernel
    if mode == "compiled":
        print(each.source.version, each.record_layout(), kernel.cache_key)
        continue
    q, k, v, g = (torch.randn(1, T, H, K, generator=torch.Generator().manual_seed(s)) for s in range(4))
    beta, A_log, dt_bias = torch.zeros(1, T, H), torch.zeros(H), torch.zeros(H * K)
    state = torch.full((3, H, K, K), 0.5)
    qsl, slots = torch.tensor([0, 3, 4], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32)
    rows = 2 if each.record_layout() == "row" else 3
    correction, kg = torch.zeros(rows, H, Q, K), torch.zeros(rows, H, Q, 2 * K)
    records = [each.records_class()(correction, kg)] if each.records_class() else [correction, kg]
    out = each.verify()(q, k, v, g, beta, A_log, dt_bias, -5.0, state, *records, qsl, slots, Q)
    print(each.source.version, each.record_layout(), repr(out.sum().item()), bool((out[0, 3] == 0).all()))
assert "vllm" not in sys.modules
"""


@pytest.mark.usefixtures("no_pip")
@pytest.mark.parametrize("mode", ["interpreted", "compiled"])
def test_releases_run_side_by_side(mode: str, real_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [real(version, real_cache, monkeypatch).root for version in RELEASES]
    monkeypatch.setenv("TRITON_INTERPRET", "1" if mode == "interpreted" else "0")
    command = [sys.executable, "-c", RUN, mode, *(f"vllm:{root}" for root in roots)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *lines = [line.split() for line in done.stdout.splitlines()]
    # The promise is a second; half a minute allows for a loaded machine.
    assert float(first[1]) < 30
    assert {version: layout for version, layout, *_ in lines} == RELEASES
    if mode == "interpreted":
        assert len({line[2] for line in lines}) == 1
        assert all(line[3] == "True" for line in lines)
    else:
        keys = {line[0]: line[2] for line in lines}
        assert keys["0.29.0"] == keys["0.31.0"]
        assert keys["0.32.0"] != keys["0.33.0"]
