"""What CI demands of a run, so that one that tested nothing does not pass.

``KDAFUZZ_REQUIRE_GPU=1``: there is a GPU, and something ran on it. ``KDAFUZZ_MIN_EXAMPLES=N``:
every operation that an implementation offers, of those that were asked for, has judged N examples.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from impl.contract import UnavailableError

REQUIRE_GPU = "KDAFUZZ_REQUIRE_GPU"
MIN_EXAMPLES = "KDAFUZZ_MIN_EXAMPLES"


@dataclass(frozen=True)
class Demands:
    """Nothing is demanded by default."""

    gpu: bool = False
    examples: int = 0

    @classmethod
    def asked(cls, environment: Mapping[str, str] = os.environ) -> "Demands":
        """What the environment asks for; ``UnavailableError`` if that cannot be understood."""
        gpu = environment.get(REQUIRE_GPU, "").strip()
        if gpu not in ("", "0", "1"):
            raise UnavailableError(f"{REQUIRE_GPU} takes 1 or 0; found {gpu!r}")
        examples = environment.get(MIN_EXAMPLES, "").strip() or "0"
        if not (examples.isascii() and examples.isdigit()):
            raise UnavailableError(f"{MIN_EXAMPLES} takes a number of examples; found {examples!r}")
        return cls(gpu == "1", int(examples))

    def check_device(self, device: str) -> None:
        """``UnavailableError`` if a GPU is demanded and ``device`` is none, or there is none."""
        if not self.gpu:
            return
        if not torch.cuda.is_available():
            built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
            raise UnavailableError(
                f"{REQUIRE_GPU}=1 needs a CUDA GPU; found none (torch {torch.__version__} for {built}, "
                f"CUDA_VISIBLE_DEVICES {os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): "
                f"run where nvidia-smi lists one, install a torch built for CUDA, or unset {REQUIRE_GPU}"
            )
        if device != "cuda":
            raise UnavailableError(
                f"{REQUIRE_GPU}=1 needs device cuda; found {device}: run it with --device cuda, or unset "
                f"{REQUIRE_GPU}"
            )

    def unmet(self, examples: Mapping[tuple[str, str], int]) -> list[str]:
        """A sentence for each (implementation, operation) that judged too few examples."""
        return [
            f"{implementation} {operation} judged {count} examples; {MIN_EXAMPLES} asks for {self.examples}"
            for (implementation, operation), count in examples.items()
            if count < self.examples
        ]


def all_skipped(reasons: Iterable[str]) -> str:
    """What to say of a run that had to test a GPU and did not."""
    told = "; ".join(dict.fromkeys(reasons)) or "none was chosen"
    return f"{REQUIRE_GPU}=1 needs tests that run; found none that did: {told}"
