"""Commit's host checks: each ``ValueError`` with its sentence, in the contract's order (1.6).

The project's own context is asked directly, in both record layouts: a refusal happens before
anything is launched, so no device is needed for it.
"""

import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Arguments = dict[str, Any]
Change = Callable[[Arguments], object]
L, H, K, V, Q, S, N, R = 2, 2, 16, 8, 4, 6, 3, 4
P = Q + 2
C = H * (2 * K + V)


@pytest.fixture
def context(device: str) -> Iterator[Any]:
    from impl.devices.registry import open_device

    open_device(device)  # before Triton is imported: it decides how
    from impl.triton import commit

    yield commit.KDARecoverSSMCommitContext
    commit.set_conv_state_dim_first(False)


@pytest.fixture(params=["row", "slot"])
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def good_layers(layout: str, device: str) -> Arguments:
    """Arguments of ``create`` that fit together."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    layers = []
    for _ in range(L):
        layer = SimpleNamespace(
            A_log=ones(H), dt_bias=ones(H * K), local_num_heads=H, head_dim=K, gate_lower_bound=-5.0
        )
        rows = S if layout == "slot" else R
        records = [ones(rows, H, Q, V), ones(rows, H, Q, 2 * K)]
        layer.kv_cache = [ones(S, P, C), ones(S, H, V, K)]
        if layout == "slot":
            layer.kv_cache += records
        else:
            layer.recoverssm_records = SimpleNamespace(correction=records[0], key_gate=records[1])
        layers.append(layer)
    return {"layers": layers, "spec_query_len": Q, "max_num_reqs": R}


def good_call(device: str) -> Arguments:
    """Arguments of ``commit`` that fit together, in align mode with a request mapping."""

    def index(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return {
        "num_accepted_tokens": index(1, 2, 3),
        "state_indices": index(1, 2, 3),
        "query_start_loc": index(0, 4, 8, 12),
        "request_indices": index(2, 1, 0),
        "block_table": index(1, 2, 3)[:, None],
        "num_computed_tokens": index(0, 0, 0),
        "mamba_block_size": 8,
    }


def tensors(arguments: Arguments) -> list[torch.Tensor]:
    found = [x for x in arguments.values() if isinstance(x, torch.Tensor)]
    for layer in arguments.get("layers", ()):
        found += [*layer.kv_cache, layer.A_log, layer.dt_bias]
        if hasattr(layer, "recoverssm_records"):
            found += [layer.recoverssm_records.correction, layer.recoverssm_records.key_gate]
    return found


def part(index: int, change: Callable[[torch.Tensor], torch.Tensor], *layers: int) -> Change:
    """Change one part of the pages of some layers: conv, state, correction (2), key/gate (3)."""

    def apply(a: Arguments) -> None:
        for i in layers or range(L):
            layer = a["layers"][i]
            if index < 2 or len(layer.kv_cache) > 2:
                layer.kv_cache[index] = change(layer.kv_cache[index])
            else:
                name = ("correction", "key_gate")[index - 2]
                changed = {**vars(layer.recoverssm_records)}
                changed[name] = change(changed[name])
                layer.recoverssm_records = SimpleNamespace(**changed)

    return apply


def own(name: str, change: Callable[[Any], object], layer: int = 1) -> Change:
    return lambda a: setattr(a["layers"][layer], name, change(getattr(a["layers"][layer], name)))


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same shape and values with other inner strides."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def other_layout(a: Arguments) -> None:
    """Give the last layer the other record layout."""
    layer = a["layers"][-1]
    if len(layer.kv_cache) == 4:
        correction, key_gate = layer.kv_cache[2:]
        layer.kv_cache = layer.kv_cache[:2]
        layer.recoverssm_records = SimpleNamespace(correction=correction, key_gate=key_gate)
    else:
        records = layer.recoverssm_records
        layer.kv_cache = [*layer.kv_cache, records.correction, records.key_gate]
        del layer.recoverssm_records


# In the order of the contract: layers that break two rules are refused for the earlier one.
CREATE: list[tuple[str, str, Change]] = [
    ("no-layers", r"needs at least one layer; found none", lambda a: a.update(layers=[])),
    ("too-few-parts", r"page parts .*; found 1", own("kv_cache", lambda x: x[:1])),
    ("three-parts", r"page parts .*; found 3", own("kv_cache", lambda x: [*x[:2], x[0]])),
    ("five-parts", r"page parts .*; found 5", own("kv_cache", lambda x: [*x, *x][:2] + [x[0]] * 3)),
    ("mixed-layouts", r"page parts of one record layout", other_layout),
    ("bounds", r"one gate bound for all layers; found", own("gate_lower_bound", lambda _: -1.0)),
    ("bound-or-none", r"one gate bound for all layers; found", own("gate_lower_bound", lambda _: None)),
    ("state-rank", r"needs a checkpoint of \[slots, heads,", part(1, lambda x: x[0], 1)),
    ("state-shape", r"needs checkpoints of one shape", part(1, lambda x: x[:-1], 1)),
    ("state-dtype", r"needs checkpoints of one shape", part(1, lambda x: x.bfloat16(), 1)),
    ("state-device", r"needs checkpoints of one shape", part(1, lambda x: x.to("meta"), 1)),
    ("state-strides", r"needs checkpoints of one shape", part(1, transposed, 1)),
    ("correction-rank", r"needs correction records of", part(2, lambda x: x[0])),
    ("correction-shape", r"needs correction records of", part(2, lambda x: x[:, :, 1:])),
    ("correction-rows", r"needs correction records of", part(2, lambda x: x[: R - 1], 1)),
    ("correction-dtype", r"needs correction records of torch.float32", part(2, lambda x: x.bfloat16())),
    ("correction-device", r"needs correction records of", part(2, lambda x: x.to("meta"))),
    ("correction-strides", r"needs correction records of", part(2, transposed, 1)),
    ("key-gate-rank", r"needs key/gate records of", part(3, lambda x: x[0])),
    ("key-gate-shape", r"needs key/gate records of", part(3, lambda x: x[..., 1:])),
    ("key-gate-rows", r"needs key/gate records of", part(3, lambda x: x[: R - 1], 1)),
    ("key-gate-dtype", r"needs key/gate records of", part(3, lambda x: x.half(), 1)),
    ("key-gate-device", r"needs key/gate records of", part(3, lambda x: x.to("meta"), 1)),
    ("key-gate-strides", r"needs key/gate records of", part(3, transposed, 1)),
    ("A-log", r"needs A_log of \[2\]; found \(1,\)", own("A_log", lambda x: x[1:])),
    ("dt-bias", r"needs dt_bias of 2 heads x 16 channels", own("dt_bias", lambda x: x[1:])),
    ("heads", r"needs dt_bias of 2 heads x 16 channels", own("local_num_heads", lambda _: H + 1)),
    ("head-dim", r"needs dt_bias of 2 heads x 16 channels", own("head_dim", lambda _: K // 2)),
    ("conv-rank", r"a conv state of three dimensions", part(0, lambda x: x[0], 1)),
    ("conv-short", r"at least the window's 4 columns; found 3", part(0, lambda x: x[:, : Q - 1])),
    ("conv-channels", r"needs conv states alike", part(0, lambda x: x[:, :, 1:], 1)),
    ("conv-dtype", r"needs conv states alike", part(0, lambda x: x.bfloat16(), 1)),
    ("conv-device", r"needs conv states alike", part(0, lambda x: x.to("meta"))),
    ("conv-slots", r"needs conv states alike", part(0, lambda x: x[1:])),
    ("backend", r"backend 'triton' or 'cute'; found 'cuda'", lambda a: a.update(backend="cuda")),
    ("cute", r"needs states of 128 x 128 .* for the CuTe fold", lambda a: a.update(backend="cute")),
]
COMMIT: list[tuple[str, str, Change]] = [
    (
        "capacity",
        r"at most 4 rows; found 5",
        lambda a: a.update(state_indices=a["state_indices"].new_ones(R + 1)),
    ),
    (
        "starts",
        r"query_start_loc of \d entries; found \d",
        lambda a: a.update(query_start_loc=a["query_start_loc"][:2]),
    ),
    (
        "requests",
        r"request_indices of at least \d entries; found 2",
        lambda a: a.update(request_indices=a["request_indices"][:2]),
    ),
    ("no-table", r"together; found \d of them", lambda a: a.update(block_table=None)),
    ("no-computed", r"together; found \d of them", lambda a: a.update(num_computed_tokens=None)),
    ("no-block-size", r"together; found \d of them", lambda a: a.update(mamba_block_size=None)),
    (
        "block-size",
        r"mamba_block_size of at least the window 4; found 3",
        lambda a: a.update(mamba_block_size=Q - 1),
    ),
    (
        "table-rank",
        r"a block table of \[requests, columns\]",
        lambda a: a.update(block_table=a["block_table"][:, 0]),
    ),
    *[
        (f"device-{name}", "all tensors on", lambda a, name=name: a.update({name: a[name].to("meta")}))
        for name in good_call("cpu")
        if name != "mamba_block_size"
    ],
]


@pytest.mark.parametrize(("sentence", "change"), [r[1:] for r in CREATE], ids=[r[0] for r in CREATE])
def test_create_refuses(context: Any, layout: str, device: str, sentence: str, change: Change) -> None:
    arguments = good_layers(layout, device)
    wanted = tensors(arguments)
    before = [x.clone() for x in wanted]
    change(arguments)
    with pytest.raises(ValueError, match=r"^KDA commit needs ") as caught:
        context.create(**arguments)
    assert re.search(sentence, str(caught.value))
    assert all(torch.equal(x, y) for x, y in zip(wanted, before, strict=True)), "a refused call wrote"


def test_create_names_the_earlier_rule(context: Any, layout: str, device: str) -> None:
    """The earlier rule of a pair is broken last, so that the later one cannot mend it."""
    for i, (name, sentence, change) in enumerate(CREATE):
        for other_name, _, other in CREATE[i + 1 :]:
            arguments = good_layers(layout, device)
            try:
                other(arguments)
                change(arguments)
            except (IndexError, AttributeError):
                continue  # the two cannot be broken together
            with pytest.raises(ValueError, match=r"^KDA commit needs ") as caught:
                context.create(**arguments)
            assert re.search(sentence, str(caught.value)), (name, other_name)


@pytest.mark.parametrize(("sentence", "change"), [r[1:] for r in COMMIT], ids=[r[0] for r in COMMIT])
def test_commit_refuses(context: Any, layout: str, device: str, sentence: str, change: Change) -> None:
    layers = good_layers(layout, device)
    made = context.create(**layers)
    arguments = good_call(device)
    plan = [made.commit_lens, made.final_state_indices, made.boundary_state_indices]
    plan.append(made.boundary_recovery_lens)
    for x in plan:
        x.fill_(-7)
    wanted = [*tensors(layers), *tensors(arguments), *plan]
    before = [x.clone() for x in wanted]
    change(arguments)
    with pytest.raises(ValueError, match=r"^KDA commit ") as caught:
        made.commit(**arguments)
    assert re.search(sentence, str(caught.value))
    assert all(torch.equal(x, y) for x, y in zip(wanted, before, strict=True)), "a refused call wrote"


def test_commit_names_the_earlier_rule(context: Any, device: str) -> None:
    made = context.create(**good_layers("row", device))
    for i, (name, sentence, change) in enumerate(COMMIT):
        for other_name, _, other in COMMIT[i + 1 :]:
            arguments = good_call(device)
            other(arguments)
            change(arguments)
            with pytest.raises(ValueError, match=r"^KDA commit ") as caught:
                made.commit(**arguments)
            assert re.search(sentence, str(caught.value)), (name, other_name)


def test_good_arguments_are_accepted(context: Any, layout: str, device: str) -> None:
    made = context.create(**good_layers(layout, device))
    assert made.commit(**good_call(device)) is None
    assert made.commit_lens[:N].tolist() == [3, 2, 1]
    assert made.final_state_indices[:N].tolist() == [3, 2, 1]


def test_no_rows_return_before_any_check(context: Any, layout: str, device: str) -> None:
    layers = good_layers(layout, device)
    made = context.create(**layers)
    before = [x.clone() for x in tensors(layers)]
    arguments = good_call(device)
    for _, _, change in COMMIT[1:7]:
        change(arguments)
    arguments["state_indices"] = arguments["state_indices"][:0].to("meta")
    assert made.commit(**arguments) is None
    assert all(torch.equal(x, y) for x, y in zip(tensors(layers), before, strict=True))


def test_a_conv_row_as_short_as_the_window_passes(context: Any, layout: str, device: str) -> None:
    arguments = good_layers(layout, device)
    for layer in arguments["layers"]:
        row = torch.arange(Q, dtype=torch.float32, device=device)
        layer.kv_cache[0] = row[None, :, None].repeat(S, 1, C)
    made = context.create(**arguments)
    assert made.conv_history_len == 1
    call = good_call(device)
    made.commit(call["num_accepted_tokens"], call["state_indices"], call["query_start_loc"])
    for layer in arguments["layers"]:
        assert layer.kv_cache[0][:, 0, 0].tolist() == [0, 0, 1, 2, 0, 0]
        assert layer.kv_cache[0][1:4, 1:, 0].tolist() == [[1, 2, 3]] * 3


def test_more_record_rows_than_requests_pass(context: Any, device: str) -> None:
    arguments = good_layers("row", device) | {"max_num_reqs": R - 1}
    assert context.create(**arguments).commit_lens.shape == (R - 1,)


def test_conv_strides_may_differ_by_layer(context: Any, layout: str, device: str) -> None:
    arguments = good_layers(layout, device)
    part(0, transposed, 1)(arguments)
    made = context.create(**arguments)
    assert made.conv_state_dim_strides.tolist() == [1, P]
    assert made.conv_state_token_strides.tolist() == [C, 1]


def test_dim_first_conv_states_are_taken_as_stored(context: Any, layout: str, device: str) -> None:
    from impl.triton.commit import is_conv_state_dim_first, set_conv_state_dim_first

    assert not is_conv_state_dim_first()
    set_conv_state_dim_first(True)
    assert is_conv_state_dim_first()
    arguments = good_layers(layout, device)
    for layer in arguments["layers"]:
        layer.kv_cache[0] = layer.kv_cache[0].transpose(1, 2).contiguous()
    made = context.create(**arguments)
    assert all(x is layer.kv_cache[0] for x, layer in zip(made.conv_states, arguments["layers"], strict=True))
