"""Serving on the CuTe path: sound kernels pass, faults that steps carry on are found, bounds know of ties."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from ci.check import check
from impl.contract import SERVING, Domain, Implementation, UnavailableError
from impl.cute.emulator.compiled import why_absent
from impl.cute.emulator.settings import DEFAULT_SCHEDULES
from impl.devices.base import Device
from impl.devices.registry import open_device
from impl.registry import resolve
from oracle.calls.serve import Serve
from oracle.case import Case
from oracle.codec import canonical, case_from_json
from oracle.judge import Verdict
from oracle.serving import Request, Tokens, added_by_commit, started
from oracle.tracked import Tracked, arithmetic, exact
from tests.strategies.serve import Event, script

emulated = pytest.mark.skipif(bool(why_absent()), reason=why_absent() or "never")
FIELDS: dict[str, Any] = {
    "heads": 1,
    "key_dim": 128,
    "value_dim": 128,
    "window": 2,
    "pool": 3,
    "capacity": 2,
    **dict.fromkeys(("activation", "state", "conv", "taps"), "bfloat16"),
}
STEPS: list[list[Event]] = [
    [("prefill", 1, 2, 0)],
    [("decode", 1, 2, 1)],
    [("decode", 1, 2, 2), ("pad", 0, 2, 1)],
    [("decode", 1, 1, 1)],
]
SCHEDULES = len(DEFAULT_SCHEDULES.split(","))
DENSE = ("dense",)
TURNS = ("dense", "shifted", "dense")


@pytest.fixture(scope="module")
def device() -> Device:
    return open_device("emulator")


def served(device: Device, implementation: Implementation, **fields: Any) -> Verdict:
    """The verdict on the script, with these fields changed."""
    return check(Case(call=script(FIELDS | fields, STEPS)), implementation, device)


def with_verify(base: type[Any]) -> Implementation:
    """The own kernels with another wrapper of the fused verify."""
    own = resolve("cute")
    return replace(own, operations={**own.operations, "fused_verify": base})


def wrapper() -> type[Any]:
    """The own wrapper."""
    found: Any = resolve("cute").operations["fused_verify"]
    return found  # type: ignore[no-any-return]


def column_spoiled() -> type[Any]:
    """A verify that leaves a wrong number in one column of one channel, which only a later step reads."""

    class Verify(wrapper()):  # type: ignore[misc]
        def __call__(self, *, conv_state: torch.Tensor, **named: Any) -> bool:
            launched = bool(super().__call__(conv_state=conv_state, **named))
            if launched:
                conv_state[1, 5, 0] += 1.0
            return launched

    return Verify


def launch_lost() -> type[Any]:
    """A verify that launches nothing, and says it did, in the call after one that it declined."""

    class Verify(wrapper()):  # type: ignore[misc]
        declined = False

        def __call__(self, **named: Any) -> bool:
            if self.declined:
                self.declined = False
                return True
            self.declined = not super().__call__(**named)
            return not self.declined

    return Verify


def declines_later() -> type[Any]:
    """A verify that declines by its own choice from its second step on."""

    class Verify(wrapper()):  # type: ignore[misc]
        calls = 0

        def __call__(self, **named: Any) -> bool:
            self.calls += 1
            return self.calls <= SCHEDULES and bool(super().__call__(**named))

    return Verify


@emulated
@pytest.mark.parametrize("name", ["cute"])
def test_sound_kernels_pass(name: str, device: Device) -> None:
    verdict = served(device, resolve(name), lying=TURNS, block_size=2)
    assert verdict.ok, [str(problem) for problem in verdict.problems]
    ran = {key.split()[0] for key in verdict.ratios}
    assert ran == {"conv_prefill", "fused_verify", "conv_update", "verify", "commit", "served"}


@emulated
@pytest.mark.parametrize(
    ("plant", "lying", "step"),
    [(column_spoiled, DENSE, 1), (launch_lost, TURNS, 3), (declines_later, DENSE, 2)],
)
def test_faults_are_found(plant: Any, lying: tuple[str, ...], step: int, device: Device) -> None:
    verdict = served(device, with_verify(plant()), lying=lying)
    assert not verdict.ok
    assert f"in fused_verify of step {step}" in " ".join(str(problem) for problem in verdict.problems)


@emulated
def test_what_the_kernels_do_not_take_is_refused(device: Device) -> None:
    with pytest.raises(UnavailableError, match="head dimensions"):
        served(device, resolve("cute"), key_dim=64)
    with pytest.raises(UnavailableError, match="lower bound"):
        served(device, resolve("cute"), lower_bound=None)
    with pytest.raises(UnavailableError, match=r"state\.0 on multiples of 16 bytes"):
        served(device, resolve("cute"), gap=1)


def test_parts_come_from_the_implementation_or_its_fallback() -> None:
    def nothing(records: object) -> None: ...

    fallback = Implementation("rest", dict.fromkeys(SERVING, nothing))
    mixed = Implementation("mixed", {"commit": nothing, "fused_verify": nothing}, fallback=fallback)
    served_by = {part: one.name for part, one in mixed.serving().items()}
    assert served_by == {**dict.fromkeys(SERVING, "rest"), "commit": "mixed", "fused_verify": "mixed"}
    assert "serve" in mixed.all_operations
    assert mixed.offered("serve") == Domain(records=("row",))
    alone = replace(mixed, fallback=None)
    assert "serve" not in alone.all_operations
    with pytest.raises(UnavailableError, match="conv_prefill: mixed does not offer it"):
        alone.serving()


@pytest.mark.parametrize(
    ("change", "fusable"),
    [
        ({}, True),
        ({"window": 8}, True),
        ({"window": 9}, False),
        ({"gap": 16}, True),
        ({"gap": 1}, False),
        ({"key_dim": 64}, False),
        ({"conv": "float32"}, False),
        ({"taps": "float32"}, True),
        ({"records": "slot"}, False),
        ({"lower_bound": None}, False),
        ({"lower_bound": -45.0}, False),
    ],
)
def test_windows_that_a_fused_verify_takes(change: dict[str, Any], fusable: bool) -> None:
    call: Serve = script(FIELDS | change, [])
    assert call.fusable is fusable


def test_a_case_keeps_where_tokens_lie() -> None:
    plain, turned = (Case(call=script(FIELDS | more, STEPS)) for more in ({}, {"lying": TURNS}))
    assert b"lying" not in canonical(plain)
    for case in (plain, turned):
        assert case_from_json(canonical(case)) == case
    assert {"lying": msgspec.UNSET} in turned.call.smaller()
    assert turned.call.size() > plain.call.size()


def test_the_bound_covers_a_key_at_a_tie() -> None:
    """A recorded key one step of bf16 aside moves the state by what ``Tokens.k.e`` adds to the bound."""
    draw = torch.Generator().manual_seed(0)
    n, K, V = 3, 16, 8

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    ar = arithmetic("factored-fp32", "cpu")
    before, k, inputs = normal(1, V, K), normal(n, 1, K), torch.zeros(n, 2 * K + V)
    step = torch.zeros_like(k)
    step[1, 0, 2] = 2.0**-8
    some = Tokens(
        normal(n, 1, K), Tracked(k, step), normal(n, 1, V), exact(-normal(n, 1, K).abs()),
        torch.sigmoid(normal(n, 1)), inputs,
    )  # fmt: skip
    other = replace(some, k=exact(k + step))
    model = replace(_at(before), E=torch.zeros(1, V, dtype=torch.float64))
    u = _corrections(model, some)
    memory = _folded(before, other, u)
    moved = (memory - model.advanced(some).S).norm(dim=-1)
    tracked = added_by_commit(before, some, exact(u), torch.float32, ar)
    untracked = added_by_commit(before, replace(some, k=exact(k)), exact(u), torch.float32, ar)
    assert bool((moved <= tracked.norm(dim=-1)).all())
    assert bool((moved > untracked.norm(dim=-1)).any())


def _at(S: torch.Tensor) -> Request:
    return replace(started((1, 8, 16), (40, 3), torch.float32), S=S)


def _corrections(model: Request, some: Tokens) -> torch.Tensor:
    """u [n, H, V] of plain decode steps, from the states before and after each."""
    found = []
    for t in range(some.q.shape[0]):
        one = Tokens(
            some.q[t : t + 1], some.k[t : t + 1], some.v[t : t + 1], some.g[t : t + 1],
            some.beta[t : t + 1], some.inputs[t : t + 1],
        )  # fmt: skip
        k = _unit(some.k.v[t])
        decayed = model.S * torch.exp(some.g.v[t])[:, None]
        model = model.advanced(one)
        found.append(torch.einsum("hvk,hk->hv", model.S - decayed, k) / (k * k).sum(-1, keepdim=True))
    return torch.stack(found)


def _folded(S: torch.Tensor, some: Tokens, u: torch.Tensor) -> torch.Tensor:
    """The fold of recorded keys and corrections, token by token."""
    for t in range(u.shape[0]):
        S = S * torch.exp(some.g.v[t])[:, None] + u[t][:, :, None] * _unit(some.k.v[t])[:, None]
    return S


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
