"""The workflow files are sound, and what they run exists and takes the options that they give.

GitHub's is checked by actionlint and by GitHub's schema, vLLM's test area by Buildkite's schema
after what vLLM's generator takes out of it. Each check is shown to find a planted fault.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
import pytest

from ci.cli import cli
from impl.vllm.cache import NEEDED_FOLDERS

yaml = pytest.importorskip("ruamel.yaml", reason="needs ruamel.yaml; found none (pip install -e '.[lint]')")

REPOSITORY = Path(__file__).resolve().parents[2]
GITHUB = REPOSITORY / ".github/workflows/kdafuzz.yml"
BUILDKITE = REPOSITORY / "ci/workflows/buildkite.yaml"
SCRIPTS = {"ci/fuzz": "kdafuzz", "ci/test": "pytest", "ci/test-gpu": "pytest"}
"""What the arguments of a script go to."""


def read(path: Path) -> Any:
    return yaml.YAML(typ="safe", pure=True).load(path)


def jobs() -> dict[str, Any]:
    return dict(read(GITHUB)["jobs"])


# Linters


def actionlint(path: Path, folder: Path) -> str:
    """What actionlint says of a workflow; nothing if it is sound."""
    found = shutil.which("actionlint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip("needs actionlint; found none (pip install -e '.[lint]')")
    config = ("-config-file", REPOSITORY / ".github/actionlint.yaml", "-shellcheck", "", "-pyflakes", "")
    # It knows the inputs of actions by their version, not by a digest.
    by_version = folder / "by-version.yml"
    by_version.write_text(re.sub(r"@[0-9a-f]{40} # (v\d+)\S*", r"@\1", path.read_text()))
    return "".join(_said([found, "-no-color", *map(str, config), str(each)]) for each in (path, by_version))


def schema(name: str, path: Path) -> str:
    """What is against a schema; nothing if nothing is."""
    pytest.importorskip(
        "check_jsonschema", reason="needs check-jsonschema; found none (pip install -e '.[lint]')"
    )
    return _said([sys.executable, "-m", "check_jsonschema", "--builtin-schema", name, str(path)])


def _said(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert bool(done.returncode) == ("ok -- validation done" not in done.stdout and bool(done.stdout)), done
    return done.stdout + done.stderr if done.returncode else ""


def test_github_workflow_is_sound(tmp_path: Path) -> None:
    assert actionlint(GITHUB, tmp_path) == ""
    assert schema("vendor.github-workflows", GITHUB) == ""


@pytest.mark.parametrize(
    ("sound", "fault", "told"),
    [
        ("github.event_name", "github.event_nam", 'property "event_nam" is not defined'),
        ("runs-on: [self-hosted, gpu]", "runs-on: [self-hosted, tpu]", 'label "tpu" is unknown'),
        ("include-hidden-files", "include-hiden-files", 'input "include-hiden-files" is not defined'),
        ('cron: "23 2 * * *"', 'cron: "99 2 * * *"', "invalid CRON format"),
    ],
)
def test_actionlint_finds(tmp_path: Path, sound: str, fault: str, told: str) -> None:
    assert told in actionlint(_planted(GITHUB, tmp_path / "planted.yml", sound, fault), tmp_path)


def test_the_schemas_find(tmp_path: Path) -> None:
    fault = _planted(GITHUB, tmp_path / "planted.yml", "timeout-minutes: 60", "timeout-minute: 60")
    assert "timeout-minute" in schema("vendor.github-workflows", fault)
    step = "timeout_in_minutes: 60"
    fault = buildkite_alone(
        _planted(BUILDKITE, tmp_path / "planted.yaml", step, "timeout_in_minutes: long"), tmp_path
    )
    assert "timeout_in_minutes" in schema("vendor.buildkite", fault)


def _planted(sound: Path, path: Path, part: str, fault: str) -> Path:
    text = sound.read_text()
    assert part in text
    path.write_text(text.replace(part, fault))
    return path


# GitHub


def test_permissions_and_concurrency() -> None:
    whole = read(GITHUB)
    assert whole["permissions"] == {"contents": "read"}
    assert whole["concurrency"]["group"]
    assert whole["on"].keys() >= {"push", "pull_request", "schedule"}
    for name, job in jobs().items():
        assert "permissions" not in job, name
        assert job["timeout-minutes"] <= 180, name


def test_actions_are_pinned() -> None:
    """By digest, with the version in a comment; and no step leaves credentials in the work tree."""
    text = GITHUB.read_text()
    used = re.findall(r"uses: (.*)", text)
    assert len(used) == text.count("uses:") > 4
    assert not [
        line for line in used if not re.fullmatch(r"actions/[a-z/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)
    ]
    checkouts = [step for step in steps() if "checkout@" in step.get("uses", "")]
    assert len(checkouts) == len(jobs())
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_machines_of_ours_run_nothing_from_forks() -> None:
    """Nor do they wait for a machine that nobody has."""
    own = {name: job for name, job in jobs().items() if "self-hosted" in job["runs-on"]}
    assert set(own) == {"gpu", "nightly-gpu"}
    for name, job in own.items():
        assert "gpu" in job["runs-on"]
        assert job["env"]["KDAFUZZ_REQUIRE_GPU"] == "1"
        assert int(job["env"]["KDAFUZZ_MIN_EXAMPLES"]) > 0
        parts = job["if"].split(" && ")
        assert "vars.KDAFUZZ_GPU == '1'" in parts
        proposed = "github.event_name != 'pull_request'"
        mine = "github.event.pull_request.head.repo.full_name == github.repository"
        allowed = f"({proposed} || {mine})" if name == "gpu" else "github.event_name == 'schedule'"
        assert allowed in parts


def test_what_a_failed_run_found_is_kept() -> None:
    """Reports, failing cases and the database of the nights, also where a step failed before."""
    for name, job in jobs().items():
        last = job["steps"][-1]
        assert last["uses"].startswith("actions/upload-artifact@")
        assert last["with"] == {"name": name, "path": ".kdafuzz/", "include-hidden-files": True}
        kept = [last]
        commands = [step["run"] for step in job["steps"] if "run" in step]
        assert any("--junitxml .kdafuzz/" in command for command in commands)
        if name.startswith("nightly"):
            restore, save = (
                step for step in job["steps"] if step.get("uses", "").startswith("actions/cache/")
            )
            assert restore["uses"].startswith("actions/cache/restore@")
            assert save["uses"].startswith("actions/cache/save@")
            assert restore["with"]["path"] == save["with"]["path"] == job["env"]["KDAFUZZ_DATABASE"]
            assert restore["with"]["key"] == save["with"]["key"]
            assert restore["with"]["key"].startswith(restore["with"]["restore-keys"])
            assert all("--hypothesis-profile nightly" in command for command in commands)
            kept.append(save)
        assert all(step["if"] == "${{ !cancelled() }}" for step in kept)


def steps() -> list[dict[str, Any]]:
    return [step for job in jobs().values() for step in job["steps"]]


# Buildkite


class Step(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A step of a test area, as far as ours has what vLLM's generator knows."""

    label: str
    key: str
    device: Literal["h200_35gb", "b200-k8s"]
    timeout_in_minutes: int
    commands: list[str]
    source_file_dependencies: list[str]
    mount_buildkite_agent: bool = False


class Area(msgspec.Struct, forbid_unknown_fields=True):
    """A test area of vLLM's pipeline."""

    group: str
    depends_on: list[str]
    steps: list[Step]


def buildkite_alone(path: Path, folder: Path) -> Path:
    """The pipeline without what is vLLM's own."""
    whole = read(path)
    for step in whole["steps"]:
        for name in ("device", "source_file_dependencies", "mount_buildkite_agent"):
            step.pop(name, None)
    written = folder / "pipeline.json"
    written.write_bytes(msgspec.json.encode({"steps": [whole]}))
    return written


def test_buildkite_area_is_sound(tmp_path: Path) -> None:
    area = msgspec.convert(read(BUILDKITE), Area)
    assert BUILDKITE.suffix == ".yaml"  # the generator reads no other
    assert len({step.key for step in area.steps}) == len(area.steps) == 2
    assert schema("vendor.buildkite", buildkite_alone(BUILDKITE, tmp_path)) == ""
    for step in area.steps:
        assert tuple(step.source_file_dependencies) == NEEDED_FOLDERS
        assert any("KDAFUZZ_REQUIRE_GPU=1" in command for command in step.commands)


@pytest.mark.parametrize(
    ("part", "fault"), [("device:", "gpu:"), ("group:", "groups:"), ("h200_35gb", "h200-35gb")]
)
def test_a_fault_in_the_area_is_found(tmp_path: Path, part: str, fault: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(read(_planted(BUILDKITE, tmp_path / "planted.yaml", part, fault)), Area)


# Commands


def commands() -> list[str]:
    """Every command of the workflows, and what the scripts hand over to in the end."""
    given = [step["run"] for step in steps() if "run" in step]
    given += [command for step in read(BUILDKITE)["steps"] for command in step["commands"]]
    for script in SCRIPTS:
        (last,) = re.findall(r'^exec (.*) "\$@"$', (REPOSITORY / script).read_text(), re.MULTILINE)
        given.append(last)
    return given


def problem_of(command: str) -> tuple[str, list[str]]:
    """What is wrong with a command; and the arguments that it gives pytest, which are checked elsewhere."""
    if "\n" in command.strip():
        return "more than one line", []
    given: list[str] = []
    for part in command.split(" && "):
        program, *arguments = shlex.split(part)
        if program in SCRIPTS:
            if not os.access(REPOSITORY / program, os.X_OK):
                return f"{program} is not executable", []
            program, arguments = (
                (program, arguments) if program not in SCRIPTS else _handed(program, arguments)
            )
        if program == "pytest":
            given += arguments
        elif program == "kdafuzz":
            name, *rest = arguments
            try:
                cli.commands[name].make_context(name, rest).close()
            except (KeyError, click.ClickException) as error:
                return f"kdafuzz {name}: {error}", []
        elif program not in ("cd", "export", "git", "pip"):
            return f"no command {program}", []
    return "", given


def _handed(script: str, arguments: list[str]) -> tuple[str, list[str]]:
    target = SCRIPTS[script]
    return target, ["fuzz", *arguments] if target == "kdafuzz" else arguments


def parsed_by_pytest(arguments: list[str], folder: Path) -> str:
    """What pytest says of the options, before it collects a test; nothing if it takes them."""
    some = REPOSITORY / "tests/test_vllm_git.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-n", "0", "-q", "--collect-only", str(some)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.USAGE_ERROR), done
    return done.stderr if done.returncode else ""


def test_commands_exist_and_take_their_options(tmp_path: Path) -> None:
    found = [problem_of(command) for command in commands()]
    assert [problem for problem, _ in found if problem] == []
    given = [argument for _, arguments in found for argument in arguments]
    assert given.count("--hypothesis-profile") == 4
    assert parsed_by_pytest(given, tmp_path) == ""


@pytest.mark.parametrize(
    "command",
    [
        "ci/test\nrm -r .",
        "ci/tset",
        "kdafuzz fuzz --exampels 3",
        "kdafuzz fuzz --examples none",
        "kdafuzz fizz",
        "ci/fuzz --minutes soon",
        "cd x && make",
    ],
)
def test_a_command_that_would_fail_is_found(command: str) -> None:
    assert problem_of(command)[0]


@pytest.mark.parametrize("option", ["--min-exampels=3", "--device=tpu"])
def test_a_wrong_option_of_pytest_is_found(tmp_path: Path, option: str) -> None:
    _, arguments = problem_of(f"ci/test-gpu {option}")
    assert option.split("=")[0] in parsed_by_pytest(arguments, tmp_path)


def test_the_readme_tells_of_them() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for path in (GITHUB, BUILDKITE, *map(REPOSITORY.joinpath, SCRIPTS)):
        assert str(path.relative_to(REPOSITORY)) in text
