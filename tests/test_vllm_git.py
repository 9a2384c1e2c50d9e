"""Finding a vLLM in a git repository, whose work tree and index stay untouched."""

from pathlib import Path

import pytest

from impl.vllm.load import load
from impl.vllm.source import SourceError, resolve
from tests.fake_vllm import KERNELS, UTILS, git, write_repository, write_tree


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDAFUZZ_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("KDAFUZZ_WHEELS", raising=False)


def test_revisions_of_both_layouts_side_by_side(tmp_path: Path) -> None:
    repo = tmp_path / "re@po"
    first, second = write_repository(repo)
    (repo / KERNELS).write_text("broken in the work tree (\n")
    before = git(repo, "status", "--porcelain", "--branch")
    tagged = resolve(f"vllm:{repo}@v0.30.1")
    named = resolve(f"vllm:{repo}@main")
    assert tagged.version == "0.30.1"
    assert named.version == f"0.30.1+g{second[:9]}"
    assert named.label == f"vllm@{named.version}"
    assert load(tagged).record_layout() == "slot"
    assert load(named).record_layout() == "row"
    assert resolve(f"vllm:{repo}@HEAD@{{0}}").root == named.root
    assert resolve(f"vllm:{repo / 'vllm'}@{first}").root == tagged.root
    assert git(repo, "status", "--porcelain", "--branch") == before


def test_a_revision_without_a_tag_is_its_hash(tmp_path: Path) -> None:
    first, _ = write_repository(tmp_path / "repo")
    git(tmp_path / "repo", "tag", "-d", "v0.30.1")
    assert resolve(f"vllm:{tmp_path / 'repo'}@{first}").version == first[:9]


def test_bare_repositories_and_foreign_git_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_repository(tmp_path / "repo")
    git(tmp_path, "clone", "-q", "--bare", str(tmp_path / "repo"), str(tmp_path / "bare"))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nonsense"))
    assert resolve(f"vllm:{tmp_path / 'bare'}@v0.30.1").version == "0.30.1"


@pytest.mark.parametrize("rev", ["nope", "", "--help", "HEAD:vllm", "v0.30.1^"])
def test_bad_revisions(tmp_path: Path, rev: str) -> None:
    write_repository(tmp_path / "repo")
    with pytest.raises(SourceError, match="revision"):
        resolve(f"vllm:{tmp_path / 'repo'}@{rev}")


def test_not_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (tmp_path / "plain").mkdir()
    with pytest.raises(SourceError, match="not a git repository"):
        resolve(f"vllm:{tmp_path / 'plain'}@HEAD")


def test_a_revision_before_the_kernels(tmp_path: Path) -> None:
    repo = write_tree(tmp_path / "repo", {"vllm/__init__.py": "", UTILS: ""})
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "old")
    git(repo, "tag", "v0.28.1")
    with pytest.raises(SourceError, match=r"^needs vLLM >= 0\.29; found 0\.28\.1$"):
        resolve(f"vllm:{repo}@HEAD")
