"""The short convolution's host checks: each error with its sentence, in the order they are made (1.5).

The project's own functions are asked directly: a refusal happens before anything is launched,
so no device is needed.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

Arguments = dict[str, Any]
Change = Callable[[Arguments], object]
Refusal = tuple[str, str, Change]
C, W, S, N, T = 8, 4, 5, 3, 6


@pytest.fixture
def own(device: str) -> SimpleNamespace:
    from impl.devices.registry import open_device

    open_device(device)  # before Triton is imported: it decides how
    from impl.triton.conv import causal_conv1d_fn, causal_conv1d_update
    from impl.triton.packed_conv import packed_causal_conv1d_fn, packed_causal_conv1d_supported

    return SimpleNamespace(
        update=causal_conv1d_update,
        prefill=causal_conv1d_fn,
        packed=packed_causal_conv1d_fn,
        supported=packed_causal_conv1d_supported,
    )


def good(name: str, device: str) -> Arguments:
    """Arguments that fit together; for update with query_start_loc and accepted counts."""

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=device)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    a: Arguments = {"x": zeros(T, C), "weight": zeros(C, W), "bias": zeros(C), "activation": "silu"}
    a["query_start_loc"] = ints(0, 4, 5, 6)
    if name == "update":
        a |= {"conv_state": zeros(S, C, W + 2), "conv_state_indices": ints(1, 2, 3), "max_query_len": 4}
        return a | {"num_accepted_tokens": ints(1, 1, 1), "out": zeros(T, C)}
    initial = torch.tensor([True, False, True], device=device)
    a |= {"conv_states": zeros(S, C, W - 1), "cache_indices": ints(1, 2, 3), "has_initial_state": initial}
    return a | ({"x": zeros(C, T)} if name == "prefill" else {"part_dim": 4})


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda a: a.update({name: change(a[name])})


def drop(name: str) -> Change:
    return lambda a: a.update({name: None})


def parameters(state: str, widest: int) -> list[Refusal]:
    return [
        (
            "x-dtype",
            r"needs x in bfloat16, float16 or float32; found torch.float64",
            put("x", torch.Tensor.double),
        ),
        ("weight-rank", r"needs a weight of \[8, taps\]", put("weight", lambda w: w[:, 0])),
        ("weight-channels", r"needs a weight of \[8, taps\]; found \(7, 4\)", put("weight", lambda w: w[1:])),
        ("one-tap", rf"takes 2 to {widest} taps; found 1", put("weight", lambda w: w[:, :1])),
        ("wide", rf"takes 2 to {widest} taps; found 8", put("weight", lambda w: torch.cat([w, w], 1))),
        ("bias", r"needs a bias of \[8\]; found \(7,\)", put("bias", lambda b: b[1:])),
        ("state-rank", r"needs a conv state of \[slots, 8, at least 3\]", put(state, lambda s: s[0])),
        ("state-channels", r"needs a conv state of \[slots, 8, at least 3\]", put(state, lambda s: s[:, 1:])),
        ("state-short", r"at least 3\]; found \(5, 8, 2\)", put(state, lambda s: s[..., :2])),
        ("weight-dtype", r"weight and conv state in bfloat16 or float32", put("weight", torch.Tensor.half)),
        ("state-dtype", r"weight and conv state in bfloat16 or float32", put(state, torch.Tensor.half)),
        ("bias-dtype", r"needs a bias in bfloat16, float16 or float32", put("bias", torch.Tensor.double)),
    ]


def vector(name: str, entries: int | None) -> list[Refusal]:
    size = "any number of" if entries is None else str(entries)
    refusals: list[Refusal] = [
        (f"{name}-rank", rf"needs {name} of {size} entries", put(name, lambda v: v[None])),
        (
            f"{name}-dtype",
            rf"needs {name} in \w+( or \w+)?; found torch.float32",
            put(name, torch.Tensor.float),
        ),
    ]
    if entries is not None:
        refusals.insert(1, (f"{name}-short", rf"needs {name} of {size} entries", put(name, lambda v: v[1:])))
    return refusals


def elsewhere(name: str) -> Refusal:
    return (f"{name}-device", r"needs all tensors on one device", put(name, lambda v: v.to("meta")))


# In the order of the checks: a call that breaks two rules is refused for the earlier one.
REFUSALS: dict[str, list[Refusal]] = {
    "update": [
        ("x-rank", r"needs x of shape \[tokens, channels\]", put("x", lambda x: x[None])),
        ("max-query-len", r"needs max_query_len with query_start_loc", lambda a: a.pop("max_query_len")),
        *parameters("conv_state", 6),
        ("no-slots", r"needs conv_state_indices; found None", drop("conv_state_indices")),
        *vector("conv_state_indices", None),
        *vector("query_start_loc", N + 1),
        *vector("num_accepted_tokens", N),
        ("out-shape", r"needs out like x, \(6, 8\) torch.float32", put("out", lambda o: o[1:])),
        ("out-dtype", r"needs out like x", put("out", torch.Tensor.half)),
        ("out-device", r"needs out like x", put("out", lambda o: o.to("meta"))),
        *(elsewhere(n) for n in ("weight", "bias", "conv_state", "conv_state_indices", "query_start_loc")),
        elsewhere("num_accepted_tokens"),
    ],
    "prefill": [
        ("x-rank", r"needs x of shape \[channels, tokens\]", put("x", lambda x: x[None])),
        *parameters("conv_states", 4),
        ("five-taps", r"takes 2 to 4 taps; found 5", put("weight", lambda w: w[:, :1].expand(C, 5))),
        ("no-slots", r"needs cache_indices; found None", drop("cache_indices")),
        *vector("cache_indices", None),
        *vector("query_start_loc", N + 1),
        ("no-initial", r"needs has_initial_state; found None", drop("has_initial_state")),
        *vector("has_initial_state", N),
        *(elsewhere(n) for n in ("weight", "bias", "conv_states", "cache_indices", "query_start_loc")),
        elsewhere("has_initial_state"),
    ],
    "packed": [
        ("x-rank", r"needs x of shape \[tokens, dim\]", put("x", lambda x: x[None])),
        ("part-dim", r"needs a part_dim that divides 8 channels; found 3", lambda a: a.update(part_dim=3)),
        ("no-part-dim", r"needs a part_dim that divides 8 channels; found 0", lambda a: a.update(part_dim=0)),
        ("three-taps", r"takes 4 taps; found 3", put("weight", lambda w: w[:, 1:])),
        *(r for r in parameters("conv_states", 4) if r[0] not in ("one-tap", "wide")),
        *vector("cache_indices", None),
        *vector("query_start_loc", N + 1),
        *vector("has_initial_state", N),
        elsewhere("conv_states"),
    ],
}
CASES = [pytest.param(f, *r[1:], id=f"{f}-{r[0]}") for f, refusals in REFUSALS.items() for r in refusals]
PREFIX = {
    "update": "causal_conv1d_update ",
    "prefill": "causal_conv1d_fn ",
    "packed": "packed_causal_conv1d_fn ",
}


@pytest.mark.parametrize(("function", "sentence", "change"), CASES)
def test_refusal(own: SimpleNamespace, device: str, function: str, sentence: str, change: Change) -> None:
    arguments = good(function, device)
    wanted = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    before = {name: x.clone() for name, x in wanted.items()}
    change(arguments)
    with pytest.raises(ValueError, match=sentence) as caught:
        getattr(own, function)(**arguments)
    assert str(caught.value).startswith(PREFIX[function])
    for name, x in before.items():
        assert torch.equal(wanted[name], x), f"a refused call wrote {name}"


@pytest.mark.parametrize("function", list(REFUSALS))
def test_the_earlier_rule_speaks(own: SimpleNamespace, device: str, function: str) -> None:
    """For every pair of rules that can be broken together, the earlier one is reported."""
    checked = 0
    refusals = REFUSALS[function]
    for i, (_, sentence, change) in enumerate(refusals):
        for _, other_sentence, other in refusals[i + 1 :]:
            arguments = good(function, device)
            change(arguments)
            try:
                other(arguments)
                with pytest.raises(ValueError, match=sentence):
                    getattr(own, function)(**arguments)
            except (
                AttributeError,
                IndexError,
                TypeError,
                RuntimeError,
                pytest.fail.Exception,
                AssertionError,
            ):
                continue  # the second change undid or cannot follow the first
            checked += sentence != other_sentence
    assert checked > 0.8 * len(refusals) * (len(refusals) - 1) / 2


def fixed(device: str, *shape: int) -> Arguments:
    """Update without query_start_loc: x ``[N, C]`` or ``[N, C, L]``."""
    a = good("update", device)
    del a["query_start_loc"], a["max_query_len"]
    return a | {"x": a["x"].new_zeros(shape), "out": a["x"].new_zeros(shape)}


@pytest.mark.parametrize("shape", [(N,), (N, C, 1, 1)])
def test_fixed_windows_need_two_or_three_axes(own: SimpleNamespace, device: str, shape: tuple[int]) -> None:
    with pytest.raises(ValueError, match=r"x of shape \[rows, channels\] or \[rows, channels, tokens\]"):
        own.update(**fixed(device, *shape))


@pytest.mark.parametrize("shape", [(N + 1, C), (N + 1, C, 2)])
def test_fixed_windows_need_a_slot_a_row(own: SimpleNamespace, device: str, shape: tuple[int]) -> None:
    with pytest.raises(ValueError, match=r"needs conv_state_indices of 4 entries; found \(3,\)"):
        own.update(**fixed(device, *shape))


def test_a_window_must_fit_into_its_conv_row(own: SimpleNamespace, device: str) -> None:
    """With accepted counts W-2 columns and the window are stored; without, W-1 columns of any window."""
    arguments = fixed(device, N, C, 5)
    with pytest.raises(ValueError, match=r"conv_state rows of 7 columns for windows of 5 tokens; found 6"):
        own.update(**arguments)
    own.update(**arguments | {"num_accepted_tokens": None})
    own.update(**fixed(device, N, C, 4))


@pytest.mark.parametrize("activation", ["gelu", "SiLU", "", 1, 0])
def test_update_knows_its_activations(own: SimpleNamespace, device: str, activation: object) -> None:
    """An ``AssertionError``, as in the shipped one, and before anything else is looked at."""
    with pytest.raises(AssertionError, match="knows the activations None, a bool, silu and swish"):
        own.update(**good("update", device) | {"activation": activation, "weight": None})


@pytest.mark.parametrize("function", ["prefill", "packed"])
@pytest.mark.parametrize("activation", ["gelu", None, False, "swish", True])
def test_prefill_takes_any_activation(
    own: SimpleNamespace, device: str, function: str, activation: object
) -> None:
    """SiLU of 1 is not 1: whatever is not SiLU is the identity."""
    arguments = good(function, device) | {"activation": activation}
    arguments["bias"].fill_(1.0)
    got = getattr(own, function)(**arguments)
    assert bool((got == 1).all()) == (activation not in ("swish", True))


@pytest.mark.parametrize("function", list(REFUSALS))
def test_good_arguments_are_accepted(own: SimpleNamespace, device: str, function: str) -> None:
    arguments = good(function, device)
    got = getattr(own, function)(**arguments)
    assert (got is arguments.get("out")) == (function == "update")
    assert got.dtype == arguments["x"].dtype
    assert got.shape == ((2, T, 4) if function == "packed" else arguments["x"].shape)


@pytest.mark.parametrize("function", list(REFUSALS))
@pytest.mark.parametrize("rows", [0, N])
def test_no_tokens(own: SimpleNamespace, device: str, function: str, rows: int) -> None:
    """Nothing to do is done after all checks, and the conv state stays."""
    a = good(function, device)
    for name in {"x", "out"} & a.keys():
        a[name] = a[name][:, :0] if function == "prefill" else a[name][:0]
    for name in {
        "conv_state_indices",
        "cache_indices",
        "num_accepted_tokens",
        "has_initial_state",
    } & a.keys():
        a[name] = a[name][:rows]
    a["query_start_loc"] = a["query_start_loc"][: rows + 1] * 0
    state = a["conv_state" if function == "update" else "conv_states"].fill_(7.0)
    assert getattr(own, function)(**a).numel() == 0
    assert bool((state == 7).all())
    with pytest.raises(ValueError, match="all tensors on one device"):
        getattr(own, function)(**a | {"bias": a["bias"].to("meta")})


def test_packed_is_supported_on_a_gpu_only(own: SimpleNamespace, device: str) -> None:
    x = torch.zeros(T, 128, dtype=torch.bfloat16, device=device)
    weight, states = torch.zeros(128, 4, device=device), torch.zeros(S, 128, 3, device=device)
    gpu = x.is_cuda
    assert own.supported(x, weight, states, 64) is gpu
    assert own.supported(x[:, :], weight, states, 128) is gpu
    for change in (
        (x.T, weight, states, 64),
        (x[0], weight, states, 64),
        (x.double(), weight, states, 64),
        (x, weight[:, 1:], states, 64),
        (x, weight.bfloat16(), states, 64),
        (x, weight, states[..., :2], 64),
        (x, weight, states[:, 1:], 64),
        (x, weight, states[0], 64),
        (x, weight, states.bfloat16(), 64),
        (x, weight, states, 32),
        (x, weight, states, 0),
        (x, weight, states, 192),
    ):
        assert own.supported(*change) is False
