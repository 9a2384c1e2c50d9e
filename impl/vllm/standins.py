"""Small stand-ins for the vLLM modules that the kernels import but that would pull in the rest of vLLM.

Each builder makes one module's names. They answer what the shipped modules answer on the machine at hand;
the answers come from `torch.cuda` at the time of the call, so building one never starts CUDA.
"""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

# The contract's values, for a tree whose own file does not say.
_CONTRACT_CONSTANTS = {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1}
_CONSTANTS_FILE = "vllm/v1/attention/backends/utils.py"


class ConvStateLayout:
    """The conv-state layout of one loaded vLLM; `dim_first` False (token-major) is vLLM's default."""

    def __init__(self) -> None:
        self.dim_first = False


class DeviceCapability(NamedTuple):
    """A compute capability, compared as a pair; `to_int` gives 103 for (10, 3)."""

    major: int
    minor: int

    def to_int(self) -> int:
        """Return major * 10 + minor."""
        return self.major * 10 + self.minor


class CurrentPlatform:
    """What the kernels ask of `vllm.platforms.current_platform`."""

    def is_cuda(self) -> bool:
        """Tell whether there is a CUDA GPU."""
        return torch.version.cuda is not None and torch.cuda.is_available()

    def is_rocm(self) -> bool:
        """Tell whether there is a ROCm GPU."""
        return torch.version.hip is not None and torch.cuda.is_available()

    def is_cuda_alike(self) -> bool:
        """Tell whether there is a CUDA or ROCm GPU."""
        return self.is_cuda() or self.is_rocm()

    def is_cpu(self) -> bool:
        """Return False always: on a CPU the suite interprets the GPU kernels.

        A True would make causal_conv1d replace its Triton functions by vLLM's CPU ones when it is loaded.
        """
        return False

    def is_xpu(self) -> bool:
        """Return False always: the kernels under test are the CUDA ones."""
        return False

    is_tpu = is_out_of_tree = is_xpu

    def get_device_capability(self, device_id: int = 0) -> DeviceCapability | None:
        """Return the device's compute capability, None without a GPU."""
        return (
            DeviceCapability(*torch.cuda.get_device_capability(device_id))
            if torch.cuda.is_available()
            else None
        )

    def has_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Tell whether the device has at least that capability, (9, 0) or 90."""
        found = self.get_device_capability(device_id)
        return found is not None and found.to_int() >= _as_int(capability)

    def is_device_capability(self, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Tell whether the device has exactly that capability, (9, 0) or 90."""
        found = self.get_device_capability(device_id)
        return found is not None and found.to_int() == _as_int(capability)

    def is_device_capability_family(self, capability: int, device_id: int = 0) -> bool:
        """Tell whether the device's major number is that of `capability` (100 for SM10x)."""
        found = self.get_device_capability(device_id)
        return found is not None and found.major == capability // 10

    def is_arch_support_pdl(self) -> bool:
        """Tell whether the current device has programmatic dependent launch (SM90 and later)."""
        return self.is_cuda() and torch.cuda.get_device_capability()[0] >= 9

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the stand-in for vllm.platforms.current_platform has no {name}")


def _as_int(capability: tuple[int, int] | int) -> int:
    return capability if isinstance(capability, int) else capability[0] * 10 + capability[1]


def module_constants(path: Path) -> dict[str, Any]:
    """Read the upper-case literals assigned at a source file's top level; {} if it is unreadable."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return {}
    found: dict[str, Any] = {}
    for node in body:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        names = [target.id for target in targets if isinstance(target, ast.Name) and target.id.isupper()]
        value = getattr(node, "value", None)
        if not names or value is None:
            continue
        try:
            found.update(dict.fromkeys(names, ast.literal_eval(value)))
        except ValueError:
            continue
    return found


def _triton_utils(_root: Path, _layout: ConvStateLayout) -> dict[str, Any]:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice

    return {"triton": triton, "tl": tl, "tldevice": libdevice, "HAS_TRITON": True}


def _platforms(_root: Path, _layout: ConvStateLayout) -> dict[str, Any]:
    return {"current_platform": CurrentPlatform(), "DeviceCapability": DeviceCapability}


def _backend_utils(root: Path, _layout: ConvStateLayout) -> dict[str, Any]:
    return _CONTRACT_CONSTANTS | module_constants(root / _CONSTANTS_FILE)


def _mamba_utils(_root: Path, layout: ConvStateLayout) -> dict[str, Any]:
    return {
        "is_conv_state_dim_first": lambda: layout.dim_first,
        "get_conv_state_layout": lambda: "DS" if layout.dim_first else "SD",
    }


BUILDERS: dict[str, Callable[[Path, ConvStateLayout], dict[str, Any]]] = {
    "vllm.triton_utils": _triton_utils,
    "vllm.platforms": _platforms,
    "vllm.v1.attention.backends.utils": _backend_utils,
    "vllm.model_executor.layers.mamba.mamba_utils": _mamba_utils,
}
