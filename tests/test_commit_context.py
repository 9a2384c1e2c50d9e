"""The public fields of a commit context, as ``create`` makes them and as the CuTe fold reads them (1.6)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from impl.contract import Records
from tests.test_vllm_load import real, real_cache  # noqa: F401 (a fixture)

L, H, K, V, Q, S, R, P, C = 3, 2, 16, 16, 4, 6, 5, 6, 24
PLAN = ("commit_lens", "final_state_indices", "boundary_state_indices", "boundary_recovery_lens")
LONG = (
    "conv_state_base_addrs",
    "conv_state_block_strides",
    "conv_state_dim_strides",
    "conv_state_token_strides",
    "state_base_addrs",
    "state_block_strides",
    "correction_cache_base_addrs",
    "correction_cache_block_strides",
    "kg_cache_base_addrs",
    "kg_cache_block_strides",
)


@dataclass(frozen=True)
class Given:
    """An implementation's context class, the record layout it is given, how conv states are stored."""

    create: Callable[..., Any]
    source: str
    device: str
    records: str
    dim_first: bool = True


SOURCES = [("own", "row"), ("own", "slot"), ("0.33.0", "row"), ("0.31.0", "slot")]


@pytest.fixture(params=SOURCES, ids=lambda p: "-".join(p))
def given(
    request: pytest.FixtureRequest,
    device: str,
    real_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> Given:
    from impl.devices.registry import open_device

    source, records = request.param
    open_device(device)  # before Triton is imported: it decides how
    if source == "own":
        from impl.triton import commit

        monkeypatch.setattr(commit, "_dim_first", False)
        create = _of(commit.KDARecoverSSMCommitContext, commit.set_conv_state_dim_first)
        return Given(create, source, device, records)
    from impl.vllm.load import load

    loaded = load(real(source, real_cache, monkeypatch))
    create = _of(loaded.commit_context(), loaded.set_conv_state_dim_first)
    return Given(create, source, device, records)


def _of(context: Any, set_dim_first: Callable[[bool], object]) -> Callable[..., Any]:
    def create(dim_first: bool, layers: list[Any], **arguments: Any) -> Any:
        set_dim_first(dim_first)
        return context.create(layers, **arguments)

    return create


@pytest.fixture(params=[True, False], ids=["dim-first", "token-major"])
def stored(given: Given, request: pytest.FixtureRequest) -> Given:
    return replace(given, dim_first=request.param)


def filled(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def slots(layer: int, given: Given, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Zeros; in all layers but the first each slot lies 4 elements into a longer one."""
    numbers, pad = torch.Size(shape[1:]).numel(), 8 if layer else 0
    wide = torch.zeros(shape[0], numbers + pad, dtype=dtype, device=given.device)
    return wide[:, pad // 2 : pad // 2 + numbers].view(shape[0], *shape[1:])


def layers_of(given: Given, bound: float | None = -5.0) -> list[Any]:
    """Three layers cut from pages whose slots are padded, every layer at another offset and pitch."""
    layers = []
    rows = R if given.records == "row" else S
    for i in range(L):
        conv = slots(i, given, S, *((C, P) if given.dim_first else (P, C)), dtype=torch.bfloat16)
        state = slots(i, given, S, H, V, K)
        correction = slots(i, given, rows, H, Q, V)
        key_gate = slots(i, given, rows, H, Q, 2 * K, dtype=torch.bfloat16)
        layer = SimpleNamespace(
            kv_cache=(conv, state) + ((correction, key_gate) if given.records == "slot" else ()),
            A_log=filled(H, dtype=torch.float32, device=given.device, seed=i),
            dt_bias=filled(H * K, dtype=torch.float32, device=given.device, seed=10 + i),
            local_num_heads=H,
            head_dim=K,
            gate_lower_bound=bound,
        )
        if given.records == "row":
            layer.recoverssm_records = Records(correction, key_gate)
        layers.append(layer)
    return layers


def created(given: Given, layers: list[Any], **more: Any) -> Any:
    return given.create(given.dim_first, layers, spec_query_len=Q, max_num_reqs=R, **more)


def parts_of(given: Given, layer: Any) -> tuple[torch.Tensor, ...]:
    """conv as ``[S, C, P]``, state, correction, key/gate."""
    conv = layer.kv_cache[0] if given.dim_first else layer.kv_cache[0].transpose(1, 2)
    records = layer.kv_cache[2:] if given.records == "slot" else vars(layer.recoverssm_records).values()
    return (conv, layer.kv_cache[1], *records)


def test_addresses_and_strides(stored: Given) -> None:
    """Of every layer, as int64 ``[L]`` on the device; strides in elements."""
    layers = layers_of(stored)
    context = created(stored, layers)
    expected: dict[str, list[int]] = {name: [] for name in LONG}
    for layer in layers:
        conv, state, correction, key_gate = parts_of(stored, layer)
        for name, value in zip(
            LONG,
            (
                conv.data_ptr(),
                *conv.stride(),
                *(x for part in (state, correction, key_gate) for x in (part.data_ptr(), part.stride(0))),
            ),
            strict=True,
        ):
            expected[name].append(value)
    for name in LONG:
        field = getattr(context, name)
        assert field.dtype == torch.int64, name
        assert field.shape == (L,), name
        assert field.device.type == stored.device, name
        assert field.stride() == (1,), name
        assert field.tolist() == expected[name], name
    assert len(set(expected["state_base_addrs"])) == L
    assert len(set(expected["conv_state_block_strides"])) == 2


def test_tensors_of_the_layers_are_kept(stored: Given) -> None:
    """As views of what was given, conv states as ``[S, C, P]`` however they are stored."""
    layers = layers_of(stored)
    context = created(stored, layers)
    for i, layer in enumerate(layers):
        kept = (
            context.conv_states[i],
            context.checkpoints[i],
            context.correction_caches[i],
            context.kg_caches[i],
        )
        for found, part in zip(kept, parts_of(stored, layer), strict=True):
            assert (found.data_ptr(), found.shape, found.stride(), found.dtype) == (
                part.data_ptr(),
                part.shape,
                part.stride(),
                part.dtype,
            )
    assert context.conv_states[0].shape == (S, C, P)
    names = ("conv_states", "checkpoints", "correction_caches", "kg_caches")
    assert {len(getattr(context, name)) for name in names} == {L}
    assert context.conv_history_len == P - Q + 1


def test_the_plan_s_tensors(given: Given) -> None:
    """Four int32 vectors of max_num_reqs, none of which shares memory with another."""
    context = created(given, layers_of(given))
    starts = []
    for name in PLAN:
        field = getattr(context, name)
        assert (field.dtype, field.shape, field.stride()) == (torch.int32, (R,), (1,)), name
        assert field.device.type == given.device
        starts.append(field.data_ptr())
    starts.sort()
    assert all(b - a >= 4 * R for a, b in pairwise(starts))


@pytest.mark.parametrize("bound", [-5.0, 0.0, None])
def test_gate_parameters_are_copies(given: Given, bound: float | None) -> None:
    layers = layers_of(given, bound)
    wanted = [layer.A_log.clone() for layer in layers], [layer.dt_bias.clone() for layer in layers]
    context = created(given, layers)
    assert (context.A_log.dtype, context.A_log.shape) == (torch.float32, (L, H))
    assert (context.dt_bias.dtype, context.dt_bias.shape) == (torch.float32, (L, H, K))
    assert context.A_log.is_contiguous()
    assert context.dt_bias.is_contiguous()
    for layer in layers:
        layer.A_log.fill_(7.0)
        layer.dt_bias.fill_(7.0)
    assert torch.equal(context.A_log, torch.stack(wanted[0]))
    assert torch.equal(context.dt_bias, torch.stack(wanted[1]).reshape(L, H, K))
    assert context.lower_bound == bound
    assert context.spec_query_len == Q


def test_the_backend_is_named(given: Given) -> None:
    if given.source == "0.31.0":
        pytest.skip("needs a create with a backend; found one of 0.29 to 0.32")
    assert created(given, layers_of(given)).backend == "triton"
    assert created(given, layers_of(given), backend="triton").backend == "triton"
    if given.source == "own":  # its create checks that the fold serves the layers
        with pytest.raises(ValueError, match=r"needs states of 128 x 128 .* for the CuTe fold"):
            created(given, layers_of(given), backend="cute")
        return
    assert created(given, layers_of(given), backend="cute").backend == "cute"


def test_the_plan_is_that_of_the_last_commit(given: Given) -> None:
    """Rows below N of the four vectors, whatever an earlier and larger commit left there."""
    context = created(given, layers_of(given))

    def vector(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=given.device)

    def commit(accepted: tuple[int, ...], slots: tuple[int, ...], starts: tuple[int, ...]) -> None:
        assert context.commit(vector(*accepted), vector(*slots), vector(*starts)) is None

    commit((4, 4, 4, 4, 4), (1, 2, 3, 4, 5), (0, 4, 8, 12, 16, 20))
    assert [getattr(context, name).tolist() for name in PLAN] == [[4] * 5, [1, 2, 3, 4, 5], [0] * 5, [0] * 5]
    commit((3, 0, 2), (5, 2, 0), (0, 2, 6, 8))
    assert [getattr(context, name)[:3].tolist() for name in PLAN] == [[2, 0, 0], [5, 0, 0], [0] * 3, [0] * 3]
    table = torch.tensor([[1, 2], [4, 3]], dtype=torch.int32, device=given.device)
    arguments = {"block_table": table, "num_computed_tokens": vector(6, 1), "mamba_block_size": 8}
    context.commit(vector(3, 1), vector(1, 3), vector(0, 4, 5), **arguments)
    # Row 0: tokens 6, 7, 8; block 0 ends after two of them. Row 1: token 1, seven short of the end.
    assert [getattr(context, name)[:2].tolist() for name in PLAN] == [[3, 1], [2, 4], [1, 0], [2, 7]]
