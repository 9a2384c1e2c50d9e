"""A verify whose state lies 8 GiB away: ``python -m tests.meta.giant KERNEL.py`` says whether it is found.

No case can ask for such memory, but an address space can: the pages in between are reserved
and never touched. The slot's element offset is 2**32, which 32 bits wrap to 0, where a decoy
lies; so a kernel that forms the address in 32 bits computes with the decoy and does not crash.
"""

import mmap
import sys

import torch

from impl.devices.registry import open_device
from tests.meta.planted import load

SLOT, STRIDE = 4, 1 << 30
KEY_DIM, VALUE_DIM, WINDOW = 16, 8, 2
_NORESERVE = 0x4000  # of Linux; Python 3.11 does not name it


def outputs(kernel: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of the kernel in a file, for a far state and for a dense copy of it."""
    open_device("cpu")
    tile = VALUE_DIM * KEY_DIM
    memory = mmap.mmap(
        -1, 2 * (SLOT * STRIDE + tile), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    )
    flat = torch.frombuffer(memory, dtype=torch.bfloat16)
    far = flat.as_strided((SLOT + 1, 1, VALUE_DIM, KEY_DIM), (STRIDE, tile, KEY_DIM, 1))
    far[0], far[SLOT] = 100.0, torch.arange(tile).reshape(VALUE_DIM, KEY_DIM) / 64.0
    dense = torch.zeros((SLOT + 1, 1, VALUE_DIM, KEY_DIM), dtype=torch.bfloat16)
    dense[0], dense[SLOT] = far[0], far[SLOT]
    return _run(kernel, far), _run(kernel, dense)


def _run(kernel: str, state: torch.Tensor) -> torch.Tensor:
    module, tokens = load(kernel), WINDOW
    keys = torch.linspace(-1.0, 1.0, tokens * KEY_DIM).reshape(1, tokens, 1, KEY_DIM)
    values = torch.linspace(0.0, 1.0, tokens * VALUE_DIM).reshape(1, tokens, 1, VALUE_DIM)
    records = module.KDARecoverSSMRecords.allocate(1, 1, WINDOW, KEY_DIM, torch.float32, torch.device("cpu"))
    records = module.KDARecoverSSMRecords(records.correction[..., :VALUE_DIM], records.key_gate)
    result = module.kda_recoverssm_verify(
        q=keys,
        k=keys,
        v=values,
        raw_g=keys,
        raw_beta=torch.zeros(1, tokens, 1),
        A_log=torch.zeros(1),
        dt_bias=torch.zeros(KEY_DIM),
        lower_bound=-5.0,
        checkpoint_state=state,
        records=records,
        query_start_loc=torch.tensor([0, tokens], dtype=torch.int32),
        state_indices=torch.tensor([SLOT], dtype=torch.int32),
        spec_query_len=WINDOW,
    )
    assert isinstance(result, torch.Tensor)
    return result


def main() -> None:
    """Print ``same`` or ``differs``."""
    far, dense = outputs(sys.argv[1])
    print("same" if torch.equal(far, dense) else "differs")


if __name__ == "__main__":
    main()
