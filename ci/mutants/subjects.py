"""Whose kernels are mutated: files, the functions that operations start from, and how a copy is run.

A mutant is a copy of the subject's files with one of them changed, in a folder of its own. Own
kernels come as a copy of the package ``impl``, which a child process finds before the sound one;
vLLM's as a tree, which ``--impl vllm:PATH`` takes. No file of the repository is touched.
"""

import hashlib
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ci.mutants.reach import MODULE, Tree
from ci.mutants.sites import Mutant, mutants_of, planted
from impl.contract import UnavailableError
from impl.cute.compile import ARCHITECTURES, asked_architecture
from impl.vllm.cache import NEEDED_FILES, NEEDED_FOLDERS, cache_dir
from impl.vllm.source import SourceError, resolve, split_flavour

OWN = Path(__file__).resolve().parents[2]
"""The folder that holds the package ``impl``."""
Entries = Mapping[str, tuple[tuple[str, str], ...]]
SEARCHED = ("conv_update", "verify", "commit", "packed_conv", "conv_prefill", "fused_verify", "serve")
"""Operations in the order in which they are tried: those that cost least come first."""
SERVED = {"conv_update", "conv_prefill", "verify", "commit", "fused_verify"}
"""What serving is made of."""

_TRITON: Entries = {
    "verify": (
        ("impl/triton/verify.py", "kda_recoverssm_verify"),
        ("impl/triton/verify.py", "kda_recoverssm_verify_by_slot"),
    ),
    "conv_update": (("impl/triton/conv.py", "causal_conv1d_update"),),
    "conv_prefill": (("impl/triton/conv.py", "causal_conv1d_fn"),),
    "packed_conv": (("impl/triton/packed_conv.py", "packed_causal_conv1d_fn"),),
    "commit": (
        ("impl/triton/commit.py", "KDARecoverSSMCommitContext"),
        ("impl/triton/commit.py", "set_conv_state_dim_first"),
    ),
}
_CUTE: Entries = {
    "commit": (
        ("impl/cute/host.py", "compile_state_commit"),
        ("impl/cute/host.py", "cute_recoverssm_commit"),
        ("impl/cute/commit.py", "Commit"),
    ),
    "fused_verify": (
        ("impl/cute/host.py", "CuteRecoverSSMVerify"),
        ("impl/cute/verify.py", "Verify"),
        ("impl/cute/verify_ws.py", "VerifyWs"),
    ),
}
_OPS, _CONVS = "vllm/models/kimi_k3/nvidia/ops", "vllm/model_executor/layers/mamba/ops"
_VLLM: Entries = {
    "verify": ((f"{_OPS}/recoverssm.py", "kda_recoverssm_verify"),),
    "conv_update": ((f"{_CONVS}/causal_conv1d.py", "causal_conv1d_update"),),
    "conv_prefill": ((f"{_CONVS}/causal_conv1d.py", "causal_conv1d_fn"),),
    "packed_conv": ((f"{_OPS}/kda_conv.py", "packed_causal_conv1d_fn"),),
    "commit": ((f"{_OPS}/recoverssm.py", "KDARecoverSSMCommitContext"),),
}
_RECOVER = "vllm/models/kimi_k3/nvidia/recoverssm"
_VLLM_CUTE: Entries = {
    "commit": (
        (f"{_RECOVER}/kernels.py", "compile_state_commit"),
        (f"{_RECOVER}/kernels.py", "cute_recoverssm_commit"),
        *((f"{_RECOVER}/cutedsl/commit.py", name) for name in ("*",)),
    ),
    "fused_verify": (
        (f"{_RECOVER}/kernels.py", "CuteRecoverSSMVerify"),
        *((f"{_RECOVER}/cutedsl/{name}.py", "*") for name in ("verify", "verify_ws")),
    ),
}


@dataclass(frozen=True)
class Copy:
    """A subject's copy: the implementation's name, and what a process that runs it has in its environment.

    ``package`` is the copy of our package ``impl``, if that is what was copied.
    """

    implementation: str
    environment: dict[str, str]
    package: Path | None = None


@dataclass(frozen=True)
class Subject:
    """Kernels to mutate. ``texts`` are the files below ``root`` that may be changed."""

    name: str
    device: str
    root: Path
    texts: Mapping[str, str]
    entries: Entries

    @cached_property
    def digest(self) -> str:
        """Changes with any of the files."""
        total = hashlib.blake2b(digest_size=8)
        for file, text in sorted(self.texts.items()):
            total.update(f"{file}\0{text}\0".encode())
        return total.hexdigest()

    def mutants(self, files: Collection[str] | None = None) -> tuple[Mutant, ...]:
        """Every mutant of every function that some operation reaches, file by file, or of these files."""
        tree = Tree(self.texts)
        device = tree.device()
        reached = {operation: tree.reached(entries) for operation, entries in self.entries.items()}
        found: list[Mutant] = []
        for file, text in self.texts.items():
            if files is not None and file not in files:
                continue
            functions: dict[str, tuple[bool, tuple[str, ...]]] = {}
            for each in tree.functions():
                operations = _ordered(op for op, keys in reached.items() if each.key in keys)
                if each.file == file and operations:
                    functions[each.name] = each.key in device, operations
            if functions:
                everything = _ordered({op for _, operations in functions.values() for op in operations})
                functions[MODULE] = False, everything
                found += mutants_of(file, text, functions)
        return tuple(found)

    def copy(self, folder: Path, mutant: Mutant | None) -> Copy:
        """Lay a copy out in ``folder``, with the fault in it or sound."""
        own = self.root == OWN
        if own:
            shutil.copytree(OWN / "impl", folder / "impl", ignore=shutil.ignore_patterns("__pycache__"))
        else:
            _copy_needed(self.root, folder)
        if mutant is not None:
            (folder / mutant.module).write_text(planted(self.texts[mutant.module], mutant))
        environment = {"TRITON_CACHE_DIR": str(folder / "triton")}
        if self.device == "emulator":
            environment["KDAFUZZ_CACHE"] = str(_lent_cache(folder / "cache"))
        if own:
            path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
            return Copy(self.name, environment | {"PYTHONPATH": os.pathsep.join(path)}, folder / "impl")
        flavour = split_flavour(self.name)[1]
        return Copy(f"vllm:{folder}" + (":cute" if flavour == "cute" else ""), environment)


def _ordered(operations: object) -> tuple[str, ...]:
    """Operations in the order in which they are tried, with serving behind those that it is made of."""
    held = set(operations)  # type: ignore[call-overload]
    return tuple(op for op in SEARCHED if op in held or (op == "serve" and held & SERVED))


def _copy_needed(root: Path, folder: Path) -> None:
    for name in NEEDED_FOLDERS:
        if (root / name).is_dir():
            shutil.copytree(root / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED_FILES:
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def _lent_cache(folder: Path) -> Path:
    """A cache that has what ours has, by links; what a mutant adds goes away with it."""
    folder.mkdir()
    home = cache_dir()
    for entry in home.iterdir() if home.is_dir() else ():
        if not entry.name.startswith("."):
            (folder / entry.name).symlink_to(entry)
    return folder


def subject(name: str, device: str | None) -> Subject:
    """The subject of an ``--impl`` name; ``UnavailableError`` where its sources cannot be mutated."""
    if name == "triton":
        return _own(name, device or "cpu", _TRITON, "impl/triton/", ("launch.py", "__init__.py"))
    if name == "cute":
        unused = [arch for arch in ARCHITECTURES if arch != asked_architecture(ARCHITECTURES[0])]
        left_out = [f"mma_{arch.rstrip('a').replace('_', '')}.py" for arch in unused]
        files = ("commit", "device", "guarded", "host", "mma", "mma_sm90", "mma_sm100", "paging")
        kept = {f"{each}.py" for each in (*files, "verify", "verify_ws", "window")} - set(left_out)
        others = [path.name for path in (OWN / "impl/cute").glob("*.py") if path.name not in kept]
        return _own(name, device or "emulator", _CUTE, "impl/cute/", tuple(others))
    text, flavour = split_flavour(name)
    if not text.startswith("vllm"):
        raise UnavailableError(
            f"mutants are made of triton, cute and the vllm forms of --impl; found {name!r}"
        )
    try:
        source = resolve(text)
    except SourceError as error:
        raise UnavailableError(f"{name}: {error}") from None
    entries = _VLLM_CUTE if flavour == "cute" else _VLLM
    texts = _needed_texts(source.root)
    tree = Tree(texts)
    kept_entries = {op: tree.present(wanted) for op, wanted in entries.items()}
    reached = tree.imported({file for wanted in kept_entries.values() for file, _ in wanted})
    return Subject(
        name,
        device or ("emulator" if flavour == "cute" else "cpu"),
        source.root,
        {file: text for file, text in texts.items() if file in reached},
        {op: wanted for op, wanted in kept_entries.items() if wanted},
    )


def _own(name: str, device: str, entries: Entries, folder: str, left_out: tuple[str, ...]) -> Subject:
    paths = [path for path in sorted((OWN / folder).glob("*.py")) if path.name not in left_out]
    return Subject(name, device, OWN, {f"{folder}{path.name}": path.read_text() for path in paths}, entries)


def _needed_texts(root: Path) -> dict[str, str]:
    paths = [path for folder in NEEDED_FOLDERS for path in sorted((root / folder).rglob("*.py"))]
    return {path.relative_to(root).as_posix(): path.read_text() for path in paths}
