"""``packed_causal_conv1d_supported``: its truth table (contract, 1.5)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

Arguments = dict[str, Any]
DIM, PART, T, S = 384, 128, 5, 3
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def supported(device: str) -> Callable[..., bool]:
    from impl.devices.registry import open_device

    open_device(device)  # before Triton is imported: it decides how
    from impl.triton.packed_conv import packed_causal_conv1d_supported

    return packed_causal_conv1d_supported


@pytest.fixture
def cuda() -> str:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA; found none")
    return "cuda"


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def good(device: str, *, dim: int = DIM, dtype: torch.dtype = torch.bfloat16) -> Arguments:
    """Arguments of which it is true on a GPU."""
    return {
        "x": zeros(T, dim, dtype=dtype, device=device),
        "weight": zeros(dim, 4, device=device),
        "conv_states": zeros(S, dim, 3, device=device),
        "part_dim": PART,
    }


def true_table(device: str) -> dict[str, Arguments]:
    """Every kind of argument that is supported."""
    base = good(device)
    table = {str(dtype): good(device, dtype=dtype) for dtype in FLOATS}
    table |= {f"part of {part}": base | {"part_dim": part} for part in (64, 128, 192, 384)}
    table |= {
        "rows of a wider projection": base
        | {"x": zeros(T, DIM + 72, dtype=torch.bfloat16, device=device)[:, 8 : 8 + DIM]},
        "longer conv rows": base | {"conv_states": zeros(S, DIM, 9, device=device)},
        "token-major conv rows": base | {"conv_states": zeros(S, 3, DIM, device=device).mT},
        "a page's conv rows": base | {"conv_states": zeros(S, DIM, 8, device=device)[..., :3]},
        "strided taps": base | {"weight": zeros(4, DIM, device=device).T},
        "no token": base | {"x": zeros(0, DIM, dtype=torch.bfloat16, device=device)},
        "one plane of 64": good(device, dim=64) | {"part_dim": 64},
    }
    return table


def false_table(device: str) -> dict[str, Arguments]:
    """One thing at a time that is not supported."""
    base = good(device)
    x, weight, states = base["x"], base["weight"], base["conv_states"]
    table = {f"x {dtype}": base | {"x": x.to(dtype)} for dtype in (torch.float64, torch.int32)}
    table |= {f"weight {dtype}": base | {"weight": weight.to(dtype)} for dtype in FLOATS[:2]}
    table |= {f"state {dtype}": base | {"conv_states": states.to(dtype)} for dtype in FLOATS[:2]}
    table |= {f"{width} taps": base | {"weight": zeros(DIM, width, device=device)} for width in (2, 3, 5)}
    table |= {f"part of {part}": base | {"part_dim": part} for part in (32, 96, 256, 768, 100, 1, 0, -64)}
    table |= {
        "x of one dimension": base | {"x": x[0]},
        "x of three dimensions": base | {"x": x[None]},
        "x channel-major": base | {"x": zeros(DIM, T, dtype=torch.bfloat16, device=device).T},
        "x of every other channel": base
        | {"x": zeros(T, 2 * DIM, dtype=torch.bfloat16, device=device)[:, ::2]},
        "state of two dimensions": base | {"conv_states": states[0]},
        "state of four dimensions": base | {"conv_states": states[None]},
        "state of other channels": base | {"conv_states": zeros(S, DIM + 64, 3, device=device)},
        "state of two columns": base | {"conv_states": states[..., :2]},
        "state as stored token-major": base | {"conv_states": zeros(S, 3, DIM, device=device)},
        "taps of other channels": base | {"weight": zeros(DIM // 2, 4, device=device)},
        "taps first": base | {"weight": zeros(4, DIM, device=device)},
        "taps of one dimension": base | {"weight": zeros(DIM * 4, device=device)},
        "taps of three dimensions": base | {"weight": weight[:, None]},
    }
    return table


NAMES = [*true_table("cpu"), *false_table("cpu")]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_supported_on_a_cpu(name: str, supported: Callable[..., bool]) -> None:
    tables = true_table("cpu") | false_table("cpu")
    assert supported(**tables[name]) is False


@pytest.mark.gpu
@pytest.mark.parametrize("name", true_table("cpu"))
def test_what_is_supported(name: str, supported: Callable[..., bool], cuda: str) -> None:
    assert supported(**true_table(cuda)[name]) is True


@pytest.mark.gpu
@pytest.mark.parametrize("name", false_table("cpu"))
def test_what_is_not_supported(name: str, supported: Callable[..., bool], cuda: str) -> None:
    assert supported(**false_table(cuda)[name]) is False


@pytest.mark.parametrize("name", false_table("cpu"))
def test_each_condition_counts(name: str, supported: Callable[..., bool]) -> None:
    """The table of refusals without a GPU: as if the tensors were on one, told by the arguments alone."""
    arguments = {key: _Pretend(x) if key == "x" else x for key, x in false_table("cpu")[name].items()}
    assert supported(**arguments) is False


@pytest.mark.parametrize("name", true_table("cpu"))
def test_nothing_else_counts(name: str, supported: Callable[..., bool]) -> None:
    arguments = {key: _Pretend(x) if key == "x" else x for key, x in true_table("cpu")[name].items()}
    assert supported(**arguments) is True


class _Pretend:
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def __getattr__(self, name: str) -> Any:
        return getattr(self._x, name)
