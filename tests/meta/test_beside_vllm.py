"""Installing this suite beside vLLM 0.33.0 changes nothing of what vLLM wants to be as it is."""

import json
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from impl.vllm import wheels

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
RELEASE = Version("0.33.0")
PINNED = {"torch": "2.14.0", "apache-tvm-ffi": "0.1.11", "nvidia-cutlass-dsl": "4.8.0"}
"""What that release pins of our requirements."""
BESIDE = {**PINNED, "triton": "3.8.0", "numpy": "2.2.6", "msgspec": "0.19.0", "safetensors": "0.6.2"}
"""What stands in an environment with it: torch brings triton, the others are ranges or bare names."""


def asked(*extras: str) -> list[Requirement]:
    """Our requirements, with those of some extras."""
    lists = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return [Requirement(text) for texts in lists for text in texts]


def least(requirement: Requirement) -> str:
    """The oldest version that a range admits."""
    return next(s.version for s in requirement.specifier if s.operator == ">=")


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip without an index."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with vLLM's versions by name, and of the rest of our requirements the oldest ones."""
    folder = tmp_path_factory.mktemp("beside")
    venv.create(folder, with_pip=False)
    (packages,) = folder.glob("lib/python*/site-packages")
    oldest: dict[str, str] = {
        canonicalize_name(r.name): least(r) for r in asked(*PROJECT["optional-dependencies"])
    }
    for name, version in (oldest | BESIDE).items():
        facts = packages / f"{name.replace('-', '_')}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (facts / "INSTALLER").write_text("pip\n")
        (facts / "RECORD").write_text("")
    return folder


def ours(folder: Path, requirements: dict[str, list[str]]) -> Path:
    """A wheel of this project without code: its requirements, by extra."""
    lines = ["Metadata-Version: 2.1", "Name: kdafuzz", "Version: 0.1.0"]
    for extra, texts in requirements.items():
        lines += [f"Provides-Extra: {extra}"] if extra else []
        for text in texts:
            what, _, marker = (part.strip() for part in text.partition(";"))
            conditions = [f"({marker})"] if marker else []
            conditions += [f"extra == '{extra}'"] if extra else []
            lines.append(f"Requires-Dist: {what}" + (f"; {' and '.join(conditions)}" if conditions else ""))
    path, facts = folder / "kdafuzz-0.1.0-py3-none-any.whl", "kdafuzz-0.1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{facts}/METADATA", "\n".join(lines) + "\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{facts}/RECORD", "")
    return path


def installed(environment: Path, wheel: Path, extra: str) -> list[str] | str:
    """What pip would install there of the wheel with an extra, or why it would not."""
    report = wheel.with_name("report.json")
    wanted = f"{wheel}[{extra}]" if extra else str(wheel)
    where = ("--python", str(environment / "bin" / "python"))
    done = pip(*where, "install", "--dry-run", "--no-index", "--quiet", "--report", str(report), wanted)
    if done.returncode:
        return done.stderr
    facts = json.loads(report.read_text())
    return [found["metadata"]["name"] for found in facts["install"]]


@pytest.mark.parametrize("extra", ["", *PROJECT["optional-dependencies"]])
def test_nothing_else_is_installed(beside: Path, tmp_path: Path, extra: str) -> None:
    requirements = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    assert installed(beside, ours(tmp_path, requirements), extra) == ["kdafuzz"]


@pytest.mark.parametrize("text", ["torch>=2.15", "apache-tvm-ffi<0.1.11", "nvidia-cutlass-dsl==4.8.1"])
def test_a_range_without_vllm_s_version_is_seen(beside: Path, tmp_path: Path, text: str) -> None:
    said = installed(beside, ours(tmp_path, {"": [text]}), "")
    assert isinstance(said, str)
    assert said.startswith("ERROR: ")


def test_the_release_pins_these() -> None:
    wheel = wheels.local(RELEASE)
    if wheel is None:
        pytest.skip(f"needs a wheel of vLLM {RELEASE} in KDAFUZZ_WHEELS; found none")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = HeaderParser().parsestr(archive.read(member).decode())
    wanted = {canonicalize_name(r.name): r for r in map(Requirement, facts.get_all("Requires-Dist", []))}
    mine = {canonicalize_name(r.name) for r in asked(*PROJECT["optional-dependencies"])}
    exact = {
        name: s.version for name in mine & wanted.keys() for s in wanted[name].specifier if s.operator == "=="
    }
    assert exact == PINNED
    for name, version in BESIDE.items():
        found = wanted.get(canonicalize_name(name))
        assert found is None or found.specifier.contains(version)
