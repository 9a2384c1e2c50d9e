"""Finds the wheel of a vLLM release: in the user's folders, else on the package index through pip."""

import os
import re
import subprocess
import sys
from pathlib import Path

from packaging.version import InvalidVersion, Version

from impl.vllm.cache import SourceError

_PIP_OPTIONS = [
    "--no-deps",
    "--only-binary=:all:",
    "--no-input",
    "--retries=2",
    "--timeout=20",
    "--disable-pip-version-check",
    "--progress-bar=off",
]
# Only sources are taken out of it, so a machine that vLLM has no wheel for can use this one.
_LINUX_OPTIONS = [
    "--implementation=cp",
    "--abi=abi3",
    "--python-version=3.12",
    "--platform=manylinux_2_28_x86_64",
    "--platform=manylinux_2_31_x86_64",
    "--platform=manylinux_2_35_x86_64",
]
_OFFLINE = (
    r"ConnectionError|Failed to resolve|name resolution|ProxyError|SSLError|timed out|Connection broken"
)


def local(version: Version) -> Path | None:
    """Return the first wheel of that release in the folders of KDAFUZZ_WHEELS, or None."""
    for folder in filter(None, os.environ.get("KDAFUZZ_WHEELS", "").split(os.pathsep)):
        for wheel in sorted(Path(folder).expanduser().glob("vllm-*.whl")):
            try:
                found = Version(wheel.name.split("-")[1])
            except (InvalidVersion, IndexError):
                continue
            # A build of the release for another CUDA ("0.33.0+cu129") has the same sources.
            if found == version or (version.local is None and found.public == version.public):
                return wheel
    return None


def download(version: Version, folder: Path) -> Path:
    """Fetch the release's wheel (about 320 MB) into `folder`: first for this machine, then for Linux x86-64.

    Raises SourceError if pip is missing, the index is out of reach or has no such release.
    """
    command = [sys.executable, "-m", "pip", "download", *_PIP_OPTIONS, f"--dest={folder}", f"vllm=={version}"]
    said = ""
    for options in ([], _LINUX_OPTIONS):
        done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        said = done.stderr
        if "No module named pip" in said:
            raise SourceError(
                f"cannot fetch vLLM {version}: Python has no pip; put a wheel in KDAFUZZ_WHEELS"
            )
        if re.search(_OFFLINE, said):
            raise SourceError(
                f"cannot fetch vLLM {version}: index out of reach; put a wheel in KDAFUZZ_WHEELS"
            )
    if "No matching distribution" in said:
        raise SourceError(f"the package index has no vLLM {version}; name a release that exists")
    reason = next((line.strip() for line in reversed(said.splitlines()) if line.strip()), "it gave no reason")
    raise SourceError(f"pip could not fetch vLLM {version} ({reason}); put a wheel in KDAFUZZ_WHEELS")
