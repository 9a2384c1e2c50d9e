"""Prefill convolution of a packed projection, in place, into one dense plane per part.

The rows of ``[T, dim]`` hold q, k and v side by side. The kernel is the prefill kernel of
``conv.py``; only the addresses of the outputs differ, so both functions give the same bits. A
program streams 32 tokens of one sequence over 128 channels (64 where the planes want it) of one
plane in a single warp: history in registers, the next 8 rows on their way while 8 are computed.
Only the first chunk of a sequence reads the conv state, and the same program writes the new one.
"""

import torch

from impl.triton.conv import NULL_BLOCK_ID, check_prefill, is_silu, launch_prefill

_NAME = "packed_causal_conv1d_fn"


def packed_causal_conv1d_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor,
    part_dim: int,
    activation: bool | str | None = "silu",
    null_block_id: int | None = NULL_BLOCK_ID,
) -> torch.Tensor:
    """Convolve x ``[T, dim]`` into planes ``[dim // part_dim, T, part_dim]`` (contract 1.5).

    As ``causal_conv1d_fn(x.T, ...)``, bit for bit on live tokens and conv state, with weight
    ``[dim, 4]``. Returns a new dense tensor in x.dtype, uninitialised at skipped tokens.
    ``ValueError`` for what does not fit together.
    """
    if x.ndim != 2:
        raise ValueError(f"{_NAME} needs x of shape [tokens, dim]; found {tuple(x.shape)}")
    tokens, dim = x.shape
    if part_dim < 1 or dim % part_dim != 0:
        raise ValueError(f"{_NAME} needs a part_dim that divides {dim} channels; found {part_dim}")
    if weight.ndim == 2 and weight.shape[1] != 4:
        raise ValueError(f"{_NAME} takes 4 taps; found {weight.shape[1]}")
    indices = (query_start_loc, cache_indices, has_initial_state)
    check_prefill(_NAME, dim, x, weight, bias, conv_states, *indices, widest=4)
    out = torch.empty((dim // part_dim, tokens, part_dim), dtype=x.dtype, device=x.device)
    launch_prefill(x, weight, bias, conv_states, *indices, out, null_block_id, silu=is_silu(activation))
    return out


def packed_causal_conv1d_supported(
    x: torch.Tensor, weight: torch.Tensor, conv_states: torch.Tensor, part_dim: int
) -> bool:
    """Whether a caller should take the packed path: a GPU and the shapes and dtypes it is made for.

    x ``[T, dim]`` bf16, fp16 or fp32 with unit channel stride, weight ``[dim, 4]`` and conv_states
    ``[S, dim, at least 3]`` fp32, part_dim a multiple of 64 that divides dim.
    """
    if not (x.is_cuda and x.ndim == 2 and conv_states.ndim == 3):
        return False
    dim = x.shape[1]
    return (
        x.stride(1) == 1
        and x.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and conv_states.dtype == torch.float32
        and conv_states.shape[1] == dim
        and conv_states.shape[2] >= 3
        and weight.dtype == torch.float32
        and weight.shape == (dim, 4)
        and part_dim > 0
        and part_dim % 64 == 0
        and dim % part_dim == 0
    )
