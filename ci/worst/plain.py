"""The reference that tests of kernels usually bring along: plain PyTorch in fp32, step by step as written.

Nothing of the oracle's arithmetic is in it. What it makes of a case is rounded once, to the dtype that the
kernel stores; bf16 products are not rounded, since such references do not know of it.
"""

from collections.abc import Callable
from typing import Any

import torch

from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import WIDTH, FusedVerify
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.layout import DTYPES

Tensor = torch.Tensor
Tensors = dict[str, Tensor]


def plain(case: Case, given: Tensors) -> Tensors:
    """Every computed output of the case from its dense inputs; cells that nobody writes are 0."""
    return _PLAIN[case.op](case.call, given)


def _verify(call: Verify, given: Tensors) -> Tensors:
    outputs = _blank(call, "out", "correction")
    for row in range(call.rows):
        if not call.live(row):
            continue
        tokens = slice(call.starts[row], call.starts[row + 1])
        q, k, v, raw_g = (given[name][tokens].float() for name in ("q", "k", "v", "raw_g"))
        beta = torch.sigmoid(given["raw_beta"][tokens].float())
        g = _gate(raw_g, given["A_log"], given["dt_bias"], call.lower_bound)
        state = given["state"][call.slots[row]].float()
        u, o = _window(q, k, v, g, beta, state)
        outputs["out"][tokens] = o.to(outputs["out"].dtype)
        outputs["correction"][call.record_row(row), :, : len(u)] = u.transpose(0, 1)
    return outputs


def _fused(call: FusedVerify, given: Tensors) -> Tensors:
    outputs, (H, K) = _blank(call, "out", "correction", "key_gate"), (call.heads, call.key_dim)
    for row in range(call.rows):
        if not call.live(row):
            continue
        n, tokens = call.qlens[row], slice(call.starts[row], call.starts[row + 1])
        stored = given["conv_state"][call.slots[row]]
        stored = stored if call.dim_first else stored.T
        history = stored[:, call.first(row) : call.first(row) + WIDTH - 1].T
        win = torch.cat((history, given["mixed_qkv"][tokens])).float()
        y = _convolved(win, given["conv_weight"], None, silu=True).bfloat16()
        q, k, v = y.float().reshape(n, 3, H, K).unbind(1)
        raw_g = given["raw_gate"][tokens].reshape(n, H, K)
        g = _gate(raw_g.float(), given["A_log"], given["dt_bias"].reshape(H, K), call.lower_bound)
        beta = torch.sigmoid(given["raw_beta"][tokens].float())
        u, o = _window(q, k, v, g, beta, given["state"][call.slots[row]].float())
        outputs["out"][tokens] = o.reshape(n, H * K).bfloat16()
        outputs["correction"][row, :, :n] = u.transpose(0, 1)
        outputs["key_gate"][row, :, :n] = torch.cat((k.bfloat16(), raw_g), -1).transpose(0, 1)
    return outputs


def _conv(call: ConvUpdate | ConvPrefill, given: Tensors) -> Tensors:
    """Both convolutions; the packed one in planes."""
    dtype, kind = DTYPES[call.conv], "conv_state" if isinstance(call, ConvUpdate) else "conv_states"
    x = given["x"].to(dtype)  # the history has room for no more
    out = x.to(DTYPES[call.activation])
    for row in range(call.rows):
        if not call.live(row):
            continue
        first = call.first(row) if isinstance(call, ConvUpdate) else 0
        history = given[kind][call.slots[row]][:, first : first + call.width - 1].T
        if isinstance(call, ConvPrefill) and not call.initial[row]:
            history = torch.zeros_like(history)
        place = call.token_place(row)
        win = torch.cat((history, x[place])).float()
        y = _convolved(win, given["weight"], given.get("bias"), silu=call.silu)
        # A result that the callee allocates has room for no more either.
        out[place] = y.to(out.dtype) if getattr(call, "own_out", False) else y.to(dtype).to(out.dtype)
    if isinstance(call, PackedConv):
        planes = call.channels // call.part_dim
        return {"out": out.reshape(call.tokens, planes, call.part_dim).transpose(0, 1)}
    return {"x" if isinstance(call, ConvUpdate) and call.in_place else "out": out}


_LAYER = ("state", "correction", "key_gate", "A_log", "dt_bias")


def _commit(call: Commit, given: Tensors) -> Tensors:
    outputs = {}
    for layer in range(call.layers):
        part = {name: given[f"{name}.{layer}"] for name in _LAYER}
        states = outputs[f"state.{layer}"] = part["state"].clone()
        for row in range(call.rows):
            plan = call.plan(row)
            if not plan.writes:
                continue
            both = part["key_gate"][call.record_row(row), :, : plan.n].float().transpose(0, 1)
            k, raw_g = both[..., : call.key_dim], both[..., call.key_dim :]
            g = _gate(raw_g, part["A_log"], part["dt_bias"], call.lower_bound)
            state = part["state"][call.slots[row]].float()
            for t in range(plan.n):
                u = part["correction"][call.record_row(row), :, t]
                state = state * torch.exp(g[t])[:, None, :] + u[:, :, None] * _unit(k[t])[:, None, :]
                if plan.writes_boundary and t + 1 == plan.m:
                    states[plan.boundary] = state.to(states.dtype)
            states[plan.final] = state.to(states.dtype)
    return outputs


_PLAIN: dict[str, Callable[[Any, Tensors], Tensors]] = {
    "verify": _verify,
    "conv_update": _conv,
    "conv_prefill": _conv,
    "packed_conv": _conv,
    "commit": _commit,
    "fused_verify": _fused,
}
OPERATIONS = tuple(_PLAIN)
"""Operations that there is such a reference for."""


def _blank(call: Verify | FusedVerify, *names: str) -> Tensors:
    specs = call.results()
    return {name: torch.zeros(specs[name].shape, dtype=DTYPES[specs[name].dtype]) for name in names}


def _gate(raw: Tensor, A_log: Tensor, dt_bias: Tensor, bound: float | None) -> Tensor:
    """Log decays [n, H, K]."""
    x, a = raw + dt_bias, torch.exp(A_log)[:, None]
    return -a * torch.nn.functional.softplus(x) if bound is None else bound * torch.sigmoid(a * x)


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _window(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Corrections and outputs [n, H, V] of tokens [n, H, ...] from a state [H, V, K]."""
    us, os = [], []
    q, k = _unit(q) * q.shape[-1] ** -0.5, _unit(k)
    for t in range(len(q)):
        state = state * torch.exp(g[t])[:, None, :]
        u = beta[t][:, None] * (v[t] - torch.einsum("hvk,hk->hv", state, k[t]))
        state = state + u[:, :, None] * k[t][:, None, :]
        us.append(u)
        os.append(torch.einsum("hvk,hk->hv", state, q[t]))
    return torch.stack(us), torch.stack(os)


def _convolved(win: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool) -> Tensor:
    """[W-1+n, C] to [n, C]."""
    shift = None if bias is None else bias.float()
    y = torch.nn.functional.conv1d(win.T[None], weight.float()[:, None], shift, groups=weight.shape[0])[0].T
    return torch.nn.functional.silu(y) if silu else y
