"""Where a vLLM comes from: an installed one, a tree, a wheel, a release on the package index, a git revision.

    vllm                the installed one; it is located, not imported
    vllm:PATH           a checkout or an unpacked wheel (a folder with `vllm/` in it), or a packed wheel
    vllm@VERSION        a release: from the cache, a folder of KDAFUZZ_WHEELS, or the package index
    vllm:REPO@REV       a revision of a git repository

Wheels and revisions are unpacked in part (see `cache`); trees are used where they lie. Nothing here runs
vLLM code.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from impl.vllm import cache, git, wheels
from impl.vllm.cache import SourceError

__all__ = ["FIRST_VERSION", "Source", "SourceError", "resolve", "split_flavour"]

FIRST_VERSION = "0.29"
_PACKAGE = "vllm/models/kimi_k3/nvidia"


@dataclass(frozen=True)
class Source:
    """A resolved vLLM.

    `label` names it in reports (`vllm@0.33.0`), `version` is a release, `<release>+g<hash>`, a commit hash or
    `unknown`, `root` is the folder that holds `vllm/`, and `identity` changes whenever the needed files do.
    """

    label: str
    version: str
    root: Path
    identity: str


def split_flavour(text: str) -> tuple[str, str]:
    """Take the trailing `:cute` off an implementation name: (text, "triton" or "cute").

    `vllm:cute` is the installed vLLM's CuTe flavour, never a folder called `cute` (that is `vllm:cute/`).
    """
    head, _, tail = text.rpartition(":")
    return (head, "cute") if tail == "cute" and head else (text, "triton")


def resolve(text: str) -> Source:
    """Find the source that `text` names, in one of the four forms of this module's docstring.

    An existing path wins over the REPO@REV reading. Raises SourceError, with one sentence that says what to
    do, when the form, path, version or revision is wrong, and for a vLLM older than the kernels (0.29).
    """
    if text == "vllm":
        return _installed()
    if text.startswith("vllm@"):
        return _release(text.removeprefix("vllm@"))
    if text.startswith("vllm:") and len(text) > 5:
        rest = text.removeprefix("vllm:")
        try:
            path = Path(rest).expanduser()
            found = path.exists()
        except (OSError, RuntimeError) as error:  # a name too long, a home of nobody
            raise SourceError(f"cannot look for {text!r}: {error}") from None
        return _path(path.absolute()) if found else _revision(rest)
    raise SourceError(f"cannot read {text!r}; write vllm, vllm:PATH, vllm@VERSION or vllm:REPO@REV")


def _installed() -> Source:
    try:
        spec = importlib.util.find_spec("vllm")
    except (ImportError, ValueError):
        spec = None
    places = list(spec.submodule_search_locations or ()) if spec and spec.origin else []
    if not places:
        raise SourceError(
            "vLLM is not installed here; install it, or write vllm:PATH, vllm@VERSION or vllm:REPO@REV"
        )
    root = Path(places[0]).absolute().parent
    try:
        version = importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = _tree_version(root)
    return _source(root, version, _fingerprint(root))


def _path(path: Path) -> Source:
    if path.is_file():
        return _wheel(path)
    if not (path / "vllm").is_dir() and path.name == "vllm" and (path / "models").is_dir():
        path = path.parent
    if not (path / "vllm").is_dir():
        raise SourceError(
            f"{path} is not a vLLM tree: it has no vllm/ folder; name the folder that holds vllm/"
        )
    return _source(path, _tree_version(path), _fingerprint(path), name=f"vllm:{path}")


def _wheel(path: Path) -> Source:
    members = cache.wheel_names(path)
    infos = [
        found
        for member in members
        if (found := re.fullmatch(r"vllm-([^/]+)\.dist-info/METADATA", member.filename))
    ]
    if not infos:
        raise SourceError(f"{path} is not a vLLM wheel: it has no vllm-*.dist-info; name a .whl file of vLLM")
    version = infos[0].group(1)
    # The directory of the archive holds a checksum of every member: identity without unpacking 300 MB.
    needed = sorted((m.filename, m.CRC, m.file_size) for m in members if cache.is_needed(m.filename))
    digest = hashlib.sha256(repr((version, needed)).encode()).hexdigest()[:16]
    key = f"wheel-{version}-{digest}"
    return _source(cache.materialise(key, lambda _: cache.wheel_files(path)), version, key)


def _release(text: str) -> Source:
    try:
        version = Version(text)
    except InvalidVersion as error:
        raise SourceError(f"{text!r} is not a version; write for example vllm@0.33.0") from error
    if _is_old(text):
        raise SourceError(f"needs vLLM >= {FIRST_VERSION}; found {version}")
    key = f"release-{version}"
    wheel = None if cache.cached(key) else wheels.local(version)

    def files(work: Path) -> cache.Files:
        return cache.wheel_files(wheel or wheels.download(version, work))

    return _source(cache.materialise(key, files), str(version), key)


def _revision(text: str) -> Source:
    # Both parts may contain "@" (a folder's name, HEAD@{1}): the longest existing folder is the repository.
    cuts = [at for at, letter in enumerate(text) if letter == "@"]
    repo, rev = next(
        (
            (path, text[at + 1 :])
            for at in reversed(cuts)
            if (path := Path(text[:at] or ".").expanduser()).is_dir()
        ),
        (None, ""),
    )
    if repo is None:
        place = text if not cuts else text[: cuts[-1]]
        raise SourceError(f"there is no {place}; write vllm:PATH or vllm:REPO@REV with a path that exists")
    repo = repo.absolute()
    commit = git.commit_hash(repo, rev)
    version = git.version_of(repo, commit)
    key = f"git-{commit}"
    return _source(cache.materialise(key, lambda _: git.files(repo, commit)), version, key)


def _source(root: Path, version: str, identity: str, name: str = "") -> Source:
    """Make the Source, once it is known that the tree has the kernels.

    What counts is the package, not the number: a development tree may still call itself 0.28 and have them.
    """
    if not (root / _PACKAGE).is_dir():
        lacks = "" if _is_old(version) else f" without {_PACKAGE}"
        raise SourceError(f"needs vLLM >= {FIRST_VERSION}; found {version}{lacks}")
    label = f"vllm@{version}" if version != "unknown" or not name else name
    return Source(label=label, version=version, root=root, identity=identity)


def _is_old(version: str) -> bool:
    # By release number alone: 0.29.0rc1 sorts before 0.29 but has the kernels.
    try:
        return Version(version).release < Version(FIRST_VERSION).release
    except InvalidVersion:
        return False


def _tree_version(root: Path) -> str:
    written = _written_version(root / "vllm" / "_version.py")
    if written:
        return written
    infos = sorted(root.glob("vllm-*.dist-info"))
    if infos:
        return infos[0].name.removeprefix("vllm-").removesuffix(".dist-info")
    # Only a checkout's own repository may date it, not one that happens to lie around the folder.
    if (root / ".git").exists():
        try:
            return git.version_of(root, git.commit_hash(root, "HEAD"))
        except SourceError:
            pass
    return "unknown"


def _written_version(path: Path) -> str | None:
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            if names & {"__version__", "version"} and isinstance(node.value.value, str):
                return node.value.value
    return None


def _fingerprint(root: Path) -> str:
    """Names, sizes and times of the needed files in a tree that may change under us."""
    total = hashlib.sha256(str(root).encode())
    paths = [root / name for name in cache.NEEDED_FILES]
    for folder in cache.NEEDED_FOLDERS:
        paths += sorted((root / folder).rglob("*.py"))
    for path in paths:
        try:
            facts = path.stat()
        except OSError:
            continue
        total.update(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
    return f"tree-{total.hexdigest()[:16]}"
