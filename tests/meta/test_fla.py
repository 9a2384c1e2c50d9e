"""The oracle's gate and recurrence against flash-linear-attention's plain PyTorch ones.

fla's functions were written by others from the same paper: an error of thought in the oracle
would show. Only those few functions are taken out of fla's files, so neither Triton nor fla's
other requirements are imported. They compute in fp32; replaced by double precision, the
recurrences must agree to the rounding of doubles, otherwise to the oracle's own bound.
"""

import ast
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oracle.gate import log_decay
from oracle.recurrence import closed_form, normalise, stepwise
from oracle.tracked import ANY_ORDER, Tracked, exact
from tests.meta.test_recurrence import Inputs, magnitudes, steps_of, windows

Tensor = torch.Tensor
Function = Callable[..., Any]


class Double:
    """torch, with ``torch.float`` in double precision."""

    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        """Everything else is torch's."""
        return getattr(torch, name)


def plain(file: str, name: str, library: object = torch) -> Function:
    """One function of a file of fla, run with ``library`` for torch; skips where there is no fla."""
    spec = importlib.util.find_spec("fla")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs fla; found none")
    path = Path(spec.submodule_search_locations[0]) / "ops" / "kda" / file
    tree = ast.parse(path.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    scope: dict[str, Any] = {"torch": library, "F": torch.nn.functional}
    exec(compile(tree, str(path), "exec"), scope)  # noqa: S102  an installed package's own code
    found: Function = scope[name]
    return found


def recurrent(function: Function, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(u, o, final state) of fla's recurrence, in the oracle's shapes ``[N, H, Q, ..]`` and V-major.

    fla keeps no corrections: u is read from one key channel more, whose decay forgets
    everything before each token and whose key is 1, after every prefix of the window.
    """
    q, k, v, g, beta, state = inputs
    pad = torch.nn.functional.pad
    more = (pad(q, (0, 1)), pad(k, (0, 1), value=1.0), v, pad(g, (0, 1), value=-torch.inf), beta)
    S = pad(state, (0, 1)).transpose(2, 3)  # [N, H, K + 1, V]
    tokens = [x.transpose(1, 2) for x in more]  # [N, Q, H, ..]
    us = []
    for t in range(1, k.shape[2] + 1):
        prefix = (x[:, :t] for x in tokens)
        o, final = function(*prefix, scale=1.0, initial_state=S, output_final_state=True)
        us.append(final[:, :, -1])
    return torch.stack(us, 2), o.transpose(1, 2), final[:, :, :-1].transpose(2, 3)


@given(windows(strongest=100.0))
def test_recurrences_agree_to_1e_12(inputs: Inputs) -> None:
    theirs = recurrent(plain("naive.py", "naive_recurrent_kda", Double()), *inputs)
    steps = steps_of(inputs)
    for ours in ((steps.u.v, steps.o.v, steps.state.v), closed_form(*inputs)):
        for a, b, size in zip(ours, theirs, magnitudes(*inputs), strict=True):
            assert float(((a - b).abs() / (size + 1e-290)).max()) <= 1e-12


@given(windows(strongest=100.0))
def test_recurrences_differ_when_one_value_differs(inputs: Inputs) -> None:
    # The comparison can fail: the last token's values moved by 1e-9 of u's size.
    q, k, v, g, beta, state = inputs
    size = magnitudes(*inputs)[0][..., -1, :]
    moved = v.clone()
    moved[..., -1, :] += 1e-9 * (1.0 + size / beta[..., -1, None].clamp(min=1e-300))
    theirs = recurrent(plain("naive.py", "naive_recurrent_kda", Double()), q, k, moved, g, beta, state)[0]
    assert float(((steps_of(inputs).u.v - theirs)[..., -1, :].abs() / size).min()) > 1e-12


@st.composite
def raw_windows(draw: st.DrawFn) -> dict[str, Tensor]:
    """Raw fp32 arguments of 1 to 3 rows, 1 to 3 heads, K and V to 64, windows to 8."""
    N, H, Q = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 8))
    K, V = draw(st.sampled_from((1, 3, 16, 64))), draw(st.sampled_from((1, 5, 64)))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from((0.0, 1.0, 8.0, 30.0)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    return {
        "q": normal(N, H, Q, K),
        "k": normal(N, H, Q, K) * draw(st.sampled_from((1.0, 1e-3, 0.0))),
        "v": normal(N, H, Q, V),
        "raw_g": spread * normal(N, H, Q, K),
        "raw_beta": 4.0 * normal(N, H, Q),
        "A_log": normal(H) * draw(st.sampled_from((1.0, 3.0))),
        "dt_bias": normal(H, K),
        "state": normal(N, H, V, K) * 2.0 ** draw(st.integers(-20, 20)),
    }


def decays(raw: dict[str, Tensor], lower_bound: float | None) -> tuple[Tracked, Tensor]:
    """The oracle's log decay and fla's, ``[N, H, Q, K]``."""
    A_log, dt_bias = exact(raw["A_log"])[:, None, None], exact(raw["dt_bias"])[:, None]
    ours = log_decay(exact(raw["raw_g"]), A_log, dt_bias, lower_bound, ANY_ORDER)
    g = raw["raw_g"].transpose(1, 2)  # [N, Q, H, K]
    if lower_bound is None:
        theirs = plain("gate.py", "naive_kda_gate")(g, raw["A_log"], raw["dt_bias"])
    else:
        theirs = plain("gate.py", "naive_kda_lowerbound_gate")(g, raw["A_log"], raw["dt_bias"], lower_bound)
    return ours, theirs.transpose(1, 2)


BOUNDS = pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5, 0.0])


def within(known: Tracked, held: Tensor) -> bool:
    return bool(((held.double() - known.v).abs() <= known.e).all())


@BOUNDS
@given(raw=raw_windows())
def test_gates_agree(lower_bound: float | None, raw: dict[str, Tensor]) -> None:
    ours, theirs = decays(raw, lower_bound)
    assert within(ours, theirs)


@BOUNDS
@given(raw=raw_windows())
def test_fp32_lies_in_the_bound(lower_bound: float | None, raw: dict[str, Tensor]) -> None:
    ar, K = ANY_ORDER, raw["q"].shape[-1]
    q, k, v, raw_beta, state = (raw[name] for name in ("q", "k", "v", "raw_beta", "state"))
    g, fla_g = decays(raw, lower_bound)
    scaled_q = ar.scale(normalise(exact(q), ar), K**-0.5)
    k_hat, beta = normalise(exact(k), ar), ar.sigmoid(exact(raw_beta))
    ours = stepwise(scaled_q, k_hat, exact(v), g, beta, exact(state), ar)

    def unit(x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

    function = plain("naive.py", "naive_recurrent_kda")
    theirs = recurrent(function, unit(q) * K**-0.5, unit(k), v, fla_g, raw_beta.sigmoid(), state)
    for known, held in zip((ours.u, ours.o, ours.state), theirs, strict=True):
        assert within(known, held)
