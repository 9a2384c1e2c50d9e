"""Small made-up vLLM trees, wheels and repositories for the loader's tests."""

import subprocess
import zipfile
from pathlib import Path

KERNELS = "vllm/models/kimi_k3/nvidia/ops/recoverssm.py"
CONV = "vllm/model_executor/layers/mamba/ops/causal_conv1d.py"
SHARED = "vllm/model_executor/layers/mamba/ops/recoverssm.py"
UTILS = "vllm/v1/attention/backends/utils.py"
CUTE = "vllm/models/kimi_k3/nvidia/recoverssm/kernels.py"

Files = dict[str, str]


def tree_files(
    arguments: str = "correction_cache, kg_cache", null: int = 0, version: str = "0.30.1"
) -> Files:
    """Make a small vLLM: every package's __init__ raises, so that running one shows."""
    boom = "raise RuntimeError('a package __init__ ran')\n"
    return {
        "vllm/__init__.py": boom,
        "vllm/models/kimi_k3/__init__.py": boom,
        "vllm/models/kimi_k3/nvidia/ops/__init__.py": boom,
        "vllm/_version.py": f"__version__ = version = '{version}'\n",
        UTILS: f"import vllm.config\nPAD_SLOT_ID = -1\nNULL_BLOCK_ID: int = {null}\n",
        KERNELS: (
            "from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first\n"
            "from vllm.v1.attention.backends.utils import NULL_BLOCK_ID\n"
            f"def kda_recoverssm_verify(q, {arguments}):\n"
            "    from vllm.model_executor.layers.mamba.ops.causal_conv1d import tag\n"
            "    return tag, NULL_BLOCK_ID, is_conv_state_dim_first()\n"
            "class KDARecoverSSMCommitContext:\n"
            "    pass\n"
        ),
        CONV: f"from vllm.platforms import current_platform\ntag = 'conv {version}'\n",
    }


def write_tree(root: Path, files: Files) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def write_wheel(folder: Path, files: Files, version: str = "0.30.1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"vllm-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(f"vllm-{version}.dist-info/METADATA", f"Name: vllm\nVersion: {version}\n")
    return path


def git(repo: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    command = ["git", "-C", str(repo), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def write_repository(root: Path) -> tuple[str, str]:
    """Make a repository with a tagged revision in the slot layout and a later one in the row layout."""
    root.mkdir(parents=True)
    git(root, "init", "-q", "-b", "main")
    hashes = []
    for arguments in ("correction_cache, kg_cache", "records"):
        write_tree(root, tree_files(arguments))
        git(root, "add", "-A")
        git(root, "commit", "-q", "-m", arguments)
        hashes.append(git(root, "rev-parse", "HEAD"))
    git(root, "tag", "v0.30.1", hashes[0])
    return hashes[0], hashes[1]
