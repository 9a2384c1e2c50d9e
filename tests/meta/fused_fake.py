"""A fused verify in plain PyTorch: the factored arithmetic of tensor-core kernels, with faults to plant.

It has the public signature and the host side's rules (contract, section 1.7). The warp-specialised
path scales projections and couplings after the product, the plain one normalises keys and queries
first; the product with the state follows what an H200 does in every step of 16 products.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from impl.contract import Domain, Implementation, Records

Tensor = torch.Tensor
K, TAPS = 128, 4
SCALE = torch.tensor(K**-0.5, dtype=torch.float32)


@dataclass
class Run:
    """What is planted, and the path that the last call took."""

    fault: str = ""
    path: str = ""


def implementation(fault: str = "") -> Implementation:
    """The fake, sound or with one fault of ``FAULTS``."""
    run = Run(fault)
    return Implementation(
        name=f"fake {fault}".strip(),
        operations={"fused_verify": partial(FusedFake, run=run)},
        arithmetic="factored-fp32",
        devices=("cpu",),
        domain=Domain(records=("row",)),
        path=lambda: run.path,
    )


@dataclass(kw_only=True)
class FusedFake:
    """``CuteRecoverSSMVerify`` on a CPU."""

    num_heads: int
    window: int
    conv_dim_first: bool
    conv_weight_dtype: torch.dtype
    device: torch.device
    run: Run
    counter: Tensor = field(init=False)
    compiled: bool = False

    def __post_init__(self) -> None:
        self.counter = torch.zeros(1, dtype=torch.int32, device=self.device)

    def compile(self) -> None:
        """Nothing to do, but a call without it is an error."""
        self.compiled = True

    def __call__(self, *, records: Records, lower_bound: float, **tensors: Tensor) -> Any:
        """Run all rows; False for tensors off their alignment."""
        assert self.compiled
        fault = self.run.fault
        t = tensors | {"correction": records.correction, "key_gate": records.key_gate}
        dynamic = ("mixed_qkv", "raw_gate", "raw_beta", "out", "query_start_loc", "state_indices")
        if fault != "never declines" and any(
            t[name].data_ptr() % 16 for name in (*dynamic, "num_accepted_tokens")
        ):
            if fault == "writes before it declines":
                t["out"][:1, :1] = 0.0
            return False
        self.run.path = "warp-specialised" if self._special(t) else "plain"
        for row in range(len(t["state_indices"])):
            self._row(t, row, lower_bound)
        if fault == "work counter":
            self.counter += 1
        return None if fault == "returns nothing" else True

    def _special(self, t: dict[str, Tensor]) -> bool:
        conv = t["conv_state"].stride()
        if self.run.fault == "path by the first stride alone":
            return self.conv_dim_first and t["mixed_qkv"].stride(0) % 8 == 0
        return (
            self.conv_dim_first
            and t["mixed_qkv"].stride(0) % 8 == t["raw_gate"].stride(0) % 8 == 0
            and t["conv_weight"].stride() == (TAPS, 1)
            and conv[1:] == (self.window + 2, 1)
            and conv[0] % 8 == 0
        )

    def _row(self, t: dict[str, Tensor], row: int, lower_bound: float) -> None:
        fault, H = self.run.fault, self.num_heads
        begin, end = t["query_start_loc"][row : row + 2].tolist()
        slot, n = int(t["state_indices"][row]), end - begin
        if slot == 0 if fault == "null is 0 alone" else slot <= 0:
            if fault != "null outputs unwritten":
                t["out"][begin:end] = 0.0
            return
        if n == 0:
            if fault == "empty row rolls":
                stored = t["conv_state"][slot]
                (stored if self.conv_dim_first else stored.T)[:, 0] = 0.0
            return
        # The whole window is computed, as kernels do: the shape of a sum decides its order.
        pad = (0, 0, 0, self.window - n)
        y = self._convolved(t, row, slot, begin, end)
        y = torch.nn.functional.pad(y.T, pad).T.contiguous()
        q, k, v = y.reshape(3, H, K, self.window).transpose(2, 3).contiguous()  # [H, Q, K]
        raw_g = torch.nn.functional.pad(t["raw_gate"][begin:end], pad).reshape(-1, H, K).transpose(0, 1)
        raw_g = raw_g.contiguous()
        keys = t["mixed_qkv"][begin:end].reshape(n, 3, H, K)[:, 1].transpose(0, 1)
        gates = raw_g[:, :n]
        t["key_gate"][row, :, :n, :K] = keys if fault == "record of the raw key" else k[:, :n]
        t["key_gate"][row, :, :n, K:] = gates.float() + 0.0 if fault == "gate record normalised" else gates
        if fault == "tail of records" and n < self.window:
            t["correction"][row, :, n] = 0.0
        x = raw_g.float() + t["dt_bias"].reshape(H, 1, K)
        g = lower_bound * sigmoid(exp(t["A_log"])[:, None, None] * x)
        beta = sigmoid(
            torch.nn.functional.pad(t["raw_beta"][begin:end].float(), pad)
        ).T.contiguous()  # [H, Q]
        if fault == "beta of the last token":
            beta = beta[:, n - 1 : n].expand(-1, self.window)
        form = _before if self.run.path == "plain" else _after
        u, o = form(q.float(), k.float(), v.float(), g, beta, t["state"][slot], fault)
        t["correction"][row, :, :n] = u[:, :n]
        t["out"][begin:end] = o[:, :n].transpose(0, 1).reshape(n, -1).to(t["out"].dtype)

    def _convolved(self, t: dict[str, Tensor], row: int, slot: int, begin: int, end: int) -> Tensor:
        """Convolve and roll; [3HK, n] in bf16."""
        fault, n = self.run.fault, end - begin
        stored = t["conv_state"][slot]
        stored = stored if self.conv_dim_first else stored.T
        first = int(t["num_accepted_tokens"][row]) - 1
        if fault == "history from the first column":
            first = 0
        win = torch.cat((stored[:, first : first + TAPS - 1], t["mixed_qkv"][begin:end].T), 1)
        count = 2 + n - (fault == "one column less rolls")
        stored[:, :count] = win[:, 1 : 1 + count]
        if fault == "whole row rolls":
            stored[:, count:] = 0.0
        win = torch.nn.functional.pad(win, (0, self.window - n))
        acc = torch.zeros(win.shape[0], self.window)
        for j in range(TAPS):
            x, w = win[:, j : j + self.window], t["conv_weight"][:, j, None]
            if w.dtype == torch.bfloat16 and fault != "products unrounded":
                acc = acc + x * w
            else:
                acc = (x.double() * w.double() + acc.double()).float()
        y = acc if fault == "no SiLU" else divide(acc, 1.0 + exp(-acc))
        return y.bfloat16()[:, :n]


EXP, RSQRT, DIV = 2.0**-22 - 2.0**-24, 2.0**-22.9 - 2.0**-24, 2.0**-22 - 2.0**-24
"""The relative errors that the arithmetic declares, less the rounding of the result."""


def _moved(x: Tensor, exact: Tensor, rel: float) -> Tensor:
    """A double rounded to fp32, off by all the error there may be; its sign hangs on a bit of ``x``."""
    sign = 1.0 - 2.0 * (x.view(torch.int32) & 1)
    return (exact * (1.0 + sign * rel)).float()


def exp(x: Tensor) -> Tensor:
    """A fast exponential: results below 2**-126 are 0."""
    scaled = x.double() + x.double() * 2.0**-24  # x * log2(e) is rounded
    result = _moved(x, torch.exp(scaled), EXP)
    return torch.where(result < 2.0**-126, torch.zeros_like(result), result)


def rsqrt(x: Tensor) -> Tensor:
    """A fast reciprocal square root."""
    return _moved(x, torch.rsqrt(x.double()), RSQRT)


def divide(a: Tensor | float, b: Tensor) -> Tensor:
    """A fast division: the reciprocal of more than 2**126 is 0."""
    return torch.where(b > 2.0**126, a * 0.0, _moved(b, a / b.double(), DIV))


def sigmoid(x: Tensor) -> Tensor:
    """By an exponential and a division."""
    return divide(1.0, 1.0 + exp(-x))


def _norm(x: Tensor, fault: str) -> Tensor:
    """[H, n] of [H, n, K]."""
    return rsqrt((x * x).sum(-1) + (1e-5 if fault == "eps" else 1e-6))


def _decays(g: Tensor, fault: str) -> tuple[Tensor, Tensor]:
    """e^{L_t} and e^{-L_t}, [H, n, K]."""
    total, logs = torch.zeros_like(g[:, 0]), []
    for t in range(g.shape[1]):
        logs.append(total := total + g[:, t])
    L = torch.stack(logs, 1)
    later = (
        torch.cat((torch.zeros_like(L[:, :1]), L[:, :-1]), 1) if fault == "decay of the token before" else L
    )
    return exp(later), exp(-L)


def _before(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, fault: str
) -> tuple[Tensor, Tensor]:
    """Keys and queries normalised, then probes, weights and couplings of these."""
    scale = torch.tensor(1.0) if fault == "no scale" else SCALE
    decay, growth = _decays(g, fault)
    kn = k * _norm(k, fault)[..., None]
    qn = q * _norm(q, fault)[..., None] * scale
    p, r, w = decay * kn, decay * qn, growth * kn
    return _solve(project(S, p, fault), project(S, r, fault), dots(w, p), dots(w, r), v, beta, fault)


def _after(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, fault: str
) -> tuple[Tensor, Tensor]:
    """Probes, weights and couplings of what the convolution gives, scaled afterwards."""
    scale = torch.tensor(1.0) if fault == "no scale" else SCALE
    decay, growth = _decays(g, fault)
    k_scale, q_scale = _norm(k, fault), _norm(q, fault) * scale
    p, r, w = decay * k, decay * q, growth * k
    c = dots(w, p) * (k_scale[:, None] * k_scale[..., None])
    d = dots(w, r) * (k_scale[:, None] * q_scale[..., None])
    P, R = project(S, p, fault) * k_scale[..., None], project(S, r, fault) * q_scale[..., None]
    return _solve(P, R, c, d, v, beta, fault)


def dots(w: Tensor, p: Tensor) -> Tensor:
    """<w_i, p_t> as [H, t, i]."""
    return (w[:, None] * p[:, :, None]).sum(-1)


def _solve(
    P: Tensor, R: Tensor, c: Tensor, d: Tensor, v: Tensor, beta: Tensor, fault: str
) -> tuple[Tensor, Tensor]:
    """Corrections and outputs [H, n, V]."""
    us: list[Tensor] = []
    os: list[Tensor] = []
    if fault == "couplings swapped":
        c, d = d, c
    for t in range(v.shape[1]):
        acc = v[:, t] - P[:, t]
        for i in range(t):
            acc = acc - c[:, t, i, None] * us[i]
        us.append(beta[:, t, None] * acc)
        o = R[:, t]
        for i in range(t if fault == "own correction left out" else t + 1):
            o = o + d[:, t, i, None] * us[i]
        os.append(o)
    return torch.stack(us, 1), torch.stack(os, 1)


def project(S: Tensor, probe: Tensor, fault: str = "") -> Tensor:
    """The state [H, V, K] times probes [H, n, K] in bf16 halves: [H, n, V] in fp32."""
    high = probe.bfloat16()
    low = (probe - high.float()).bfloat16()
    if fault == "low half dropped":
        low = torch.zeros_like(low)
    state = S.double()
    acc = torch.zeros(probe.shape[0], probe.shape[1], S.shape[1], dtype=torch.float64)
    for step in range(0, K, 16):
        for half in (high.double(), low.double()):
            acc = _step(acc, state[:, None, :, step : step + 16], half[:, :, None, step : step + 16])
    # Nothing can be aligned to an infinity: what is not finite comes out as NaN.
    plain = torch.einsum("hvk,hnk->hnv", state, high.double()) + torch.einsum(
        "hvk,hnk->hnv", state, low.double()
    )
    return torch.where(plain.isfinite(), acc, plain).float()


def _step(acc: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Sixteen products and the accumulator, aligned to the largest, cut, added, cut to fp32."""
    products = a * b
    exponent = (_exponent(a) + _exponent(b)).where(products != 0.0, torch.tensor(-math.inf))
    largest = torch.maximum(exponent.amax(-1), _exponent(acc))
    grid = torch.exp2((largest - 25.0).clamp(min=-400.0))
    total = (products / grid[..., None]).trunc().sum(-1) + (acc / grid).trunc()
    exact = total * grid
    near = exact.float()
    past = near.double().abs() > exact.abs()
    return torch.where(past, torch.nextafter(near, torch.zeros_like(near)), near).double()


def _exponent(x: Tensor) -> Tensor:
    """The power of two of every number, -inf of 0."""
    power = torch.frexp(x)[1].double() - 1.0
    return torch.where(x == 0.0, -math.inf, power)


FAULTS = {
    "eps": "value",
    "no scale": "value",
    "couplings swapped": "value",
    "low half dropped": "value",
    "decay of the token before": "value",
    "own correction left out": "value",
    "one column less rolls": "copy",
    "whole row rolls": "frame",
    "no SiLU": "value",
    "history from the first column": "",
    "beta of the last token": "value",
    "products unrounded": "value",
    "record of the raw key": "value",
    "gate record normalised": "copy",
    "tail of records": "frame",
    "null is 0 alone": "",
    "null outputs unwritten": "value",
    "empty row rolls": "frame",
    "never declines": "",
    "writes before it declines": "frame",
    "path by the first stride alone": "path",
    "work counter": "raised",
    "returns nothing": "raised",
}
"""Every fault, and the kind of problem that it is; empty where several may come first."""
