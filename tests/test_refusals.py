"""Verify's host checks: each ``ValueError`` with its sentence, in the contract's order (1.4).

The project's own two functions (record layouts ``row`` and ``slot``) are asked directly: a
refusal happens before anything is launched, so no device is needed.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from impl.contract import Records

Arguments = dict[str, Any]
H, K, V, Q, S, N = 2, 16, 8, 4, 5, 3
T = 6


@pytest.fixture(params=["row", "slot"])
def verify(request: pytest.FixtureRequest, device: str) -> Callable[..., torch.Tensor]:
    from impl.devices.registry import open_device

    open_device(device)  # before Triton is imported: it decides how
    from impl.triton.verify import kda_recoverssm_verify, kda_recoverssm_verify_by_slot

    function: Callable[..., torch.Tensor] = (
        kda_recoverssm_verify if request.param == "row" else kda_recoverssm_verify_by_slot
    )

    def call(**arguments: Any) -> torch.Tensor:
        correction, key_gate = arguments.pop("correction"), arguments.pop("key_gate")
        if request.param == "row":
            return function(**arguments, records=Records(correction, key_gate))
        return function(**arguments, correction_cache=correction, kg_cache=key_gate)

    return call


def good(device: str) -> Arguments:
    """Arguments that fit together; S record rows serve both layouts."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return {
        "q": zeros(1, T, H, K),
        "k": zeros(1, T, H, K),
        "v": zeros(1, T, H, V),
        "raw_g": zeros(1, T, H, K),
        "raw_beta": zeros(1, T, H),
        "A_log": zeros(H),
        "dt_bias": zeros(H, K),
        "lower_bound": -5.0,
        "checkpoint_state": zeros(S, H, V, K),
        "correction": zeros(S, H, Q, V),
        "key_gate": zeros(S, H, Q, 2 * K),
        "query_start_loc": torch.tensor([0, 4, 5, 6], dtype=torch.int32, device=device),
        "state_indices": torch.tensor([1, 2, 3], dtype=torch.int32, device=device),
        "spec_query_len": Q,
        "out": zeros(1, T, H, V),
    }


def wide(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The same shape with a gap behind every element of ``dim``: trailing strides no longer dense."""
    size = list(tensor.shape)
    size[dim] *= 2
    return torch.zeros(size, dtype=tensor.dtype, device=tensor.device).narrow(dim, 0, tensor.shape[dim])


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


Change = Callable[[Arguments], object]

# In the order of the contract: a call that breaks two rules is refused for the earlier one.
REFUSALS: list[tuple[str, str, Change]] = [
    ("q-rank", r"needs q of shape \[1, tokens, heads, key_dim\]; found", lambda a: a.update(q=a["q"][0])),
    ("q-batch", r"needs q of shape \[1,", lambda a: a.update(q=a["q"].expand(2, T, H, K))),
    ("k-shape", r"needs k like q and v of", lambda a: a.update(k=a["k"][:, 1:])),
    ("v-tokens", r"needs k like q and v of", lambda a: a.update(v=a["v"][:, 1:])),
    ("v-rank", r"needs k like q and v of", lambda a: a.update(v=a["v"][0])),
    ("gate-shape", r"needs a gate like q and beta of", lambda a: a.update(raw_g=a["raw_g"][..., 1:])),
    ("beta-shape", r"needs a gate like q and beta of", lambda a: a.update(raw_beta=a["raw_beta"][:, :, :1])),
    ("q-heads", r"dense heads in q, k and gate", lambda a: a.update(q=wide(a["q"], 3))),
    ("k-heads", r"dense heads in q, k and gate", lambda a: a.update(k=strided(a["k"]))),
    ("gate-heads", r"dense heads in q, k and gate", lambda a: a.update(raw_g=wide(a["raw_g"], 3))),
    ("v-heads", r"dense heads in v and beta", lambda a: a.update(v=wide(a["v"], 3))),
    ("beta-heads", r"dense heads in v and beta", lambda a: a.update(raw_beta=strided(a["raw_beta"]))),
    (
        "state-shape",
        r"needs a checkpoint of",
        lambda a: a.update(checkpoint_state=a["checkpoint_state"][:, :, :, 1:]),
    ),
    ("state-rank", r"needs a checkpoint of", lambda a: a.update(checkpoint_state=a["checkpoint_state"][0])),
    (
        "correction-shape",
        r"needs a correction buffer of",
        lambda a: a.update(correction=a["correction"][:, :, 1:]),
    ),
    (
        "records-too-few",
        r"needs a correction buffer of",
        lambda a: a.update(correction=a["correction"][: N - 1]),
    ),
    ("key-gate-shape", r"needs a key/gate buffer of", lambda a: a.update(key_gate=a["key_gate"][..., 1:])),
    ("key-gate-rows", r"needs a key/gate buffer of", lambda a: a.update(key_gate=a["key_gate"][1:])),
    ("correction-dtype", r"float32 correction buffer", lambda a: a.update(correction=a["correction"].half())),
    (
        "key-gate-dtype",
        r"key/gate buffer of torch.float32",
        lambda a: a.update(key_gate=a["key_gate"].half()),
    ),
    ("A-log-shape", r"gate parameters A_log", lambda a: a.update(A_log=a["A_log"][1:])),
    ("dt-bias-size", r"gate parameters A_log", lambda a: a.update(dt_bias=a["dt_bias"][:, 1:])),
    ("A-log-strided", r"contiguous gate parameters", lambda a: a.update(A_log=strided(a["A_log"]))),
    ("dt-bias-strided", r"contiguous gate parameters", lambda a: a.update(dt_bias=strided(a["dt_bias"]))),
    (
        "starts",
        r"query_start_loc of 4 entries; found 3",
        lambda a: a.update(query_start_loc=a["query_start_loc"][1:]),
    ),
    ("too-many-tokens", r"at most 3 rows x 1 tokens; found 6", lambda a: shorten(a)),
    ("out-shape", r"needs out of shape", lambda a: a.update(out=a["out"][:, 1:])),
    ("out-heads", r"dense heads in out", lambda a: a.update(out=wide(a["out"], 3))),
    (
        "devices",
        r"all tensors on one device",
        lambda a: a.update(state_indices=a["state_indices"].to("meta")),
    ),
]
UNDONE = {("correction-shape", "too-many-tokens")}
"""Pairs whose second change happens to mend the first."""


def shorten(a: Arguments) -> None:
    """A window of one token, with record buffers to match."""
    a.update(spec_query_len=1, correction=a["correction"][:, :, :1], key_gate=a["key_gate"][:, :, :1])


@pytest.mark.parametrize(("sentence", "change"), [r[1:] for r in REFUSALS], ids=[r[0] for r in REFUSALS])
def test_refusal(verify: Callable[..., torch.Tensor], device: str, sentence: str, change: Change) -> None:
    arguments = good(device)
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    wanted = dict(arguments)
    change(arguments)
    with pytest.raises(ValueError, match=sentence):
        verify(**arguments)
    for name, x in before.items():
        assert torch.equal(wanted[name], x), f"a refused call wrote {name}"


def test_the_earlier_rule_speaks(verify: Callable[..., torch.Tensor], device: str) -> None:
    """For every pair of rules that can be broken together, the earlier one is reported."""
    checked = 0
    for i, (name, sentence, change) in enumerate(REFUSALS):
        for other_name, other_sentence, other in REFUSALS[i + 1 :]:
            if (name, other_name) in UNDONE:
                continue
            arguments = good(device)
            change(arguments)
            try:
                other(arguments)
                same = sentence == other_sentence
                with pytest.raises(ValueError, match=sentence) as caught:
                    verify(**arguments)
            except (IndexError, RuntimeError, pytest.fail.Exception):
                continue  # the second change undid or cannot follow the first
            checked += not same
            assert "KDA verify" in str(caught.value), name
    assert checked > 200


def test_good_arguments_are_accepted(verify: Callable[..., torch.Tensor], device: str) -> None:
    arguments = good(device)
    assert verify(**arguments) is arguments["out"]


def test_no_tokens_returns_after_all_checks(verify: Callable[..., torch.Tensor], device: str) -> None:
    arguments = good(device)
    for name in ("q", "k", "v", "raw_g", "raw_beta", "out"):
        arguments[name] = arguments[name][:, :0]
    arguments["query_start_loc"] = arguments["query_start_loc"] * 0
    assert verify(**arguments) is arguments["out"]
    arguments["state_indices"] = arguments["state_indices"].to("meta")
    with pytest.raises(ValueError, match="all tensors on one device"):
        verify(**arguments)


def test_out_is_made_like_v(verify: Callable[..., torch.Tensor], device: str) -> None:
    arguments = good(device) | {"out": None}
    made = verify(**arguments)
    assert (made.shape, made.dtype, made.device) == (
        arguments["v"].shape,
        arguments["v"].dtype,
        arguments["v"].device,
    )
