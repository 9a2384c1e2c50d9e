"""flash-linear-attention's recurrent KDA as an outside reference for verify.

What is fla's (``fla.ops.kda.fused_recurrent_kda``, its Triton kernel on either device):

* outputs: one launch over all live rows, with gate, sigmoid of beta and l2 norm in its kernel
  (x / sqrt(sum x**2 + 1e-6), the contract's eps) and the state V-major;
* corrections: fla keeps none, so the window runs a second time, a token a launch, with one key
  channel more. There the key is 1 and the log decay -inf: nothing is read from the channel,
  and afterwards the state holds u there. The log decay comes from ``naive_kda_gate`` or
  ``naive_kda_lowerbound_gate``, beta's sigmoid from the kernel.

What is the adapter's: which rows and tokens there are (it waits for the device), zeros of null
rows, the copies into the key/gate record, k^ of the second run, widening v to fp32 (fla stores
outputs in v's dtype) and the one rounding to the dtype of ``out``. The checkpoint is copied
before fla sees it. Arguments are not checked: fla is a reference, not a subject.

The declared arithmetic allows sums in any order. Two figures of fla's compiled kernel have no
proof in it: x / sqrt(..) from sqrt.approx and div.full, and the softplus from lg2.approx. On an
H200 they reach 0.74 (25,000 keys of 1 to 128 channels each) and 0.49 (16 million gates) of it.
"""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from packaging.version import Version

from impl.contract import Domain, Implementation, Records, UnavailableError

FIRST_VERSION = "0.6.0"
"""Older ones swallow ``state_v_first`` as an unknown keyword and take the state K-major."""
EPS = 1e-6

Tensor = torch.Tensor


@dataclass(frozen=True)
class Kernels:
    """The functions of fla that the adapter calls."""

    version: str
    recurrent: Callable[..., tuple[Tensor, Tensor]]
    unbounded_gate: Callable[..., Tensor]
    bounded_gate: Callable[..., Tensor]

    def log_decay(self, raw_g: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
        """Log decay ``[..., H, K]`` in fp32, by fla's plain PyTorch functions."""
        if lower_bound is None:
            return self.unbounded_gate(raw_g, A_log, dt_bias)
        return self.bounded_gate(raw_g, A_log, dt_bias, lower_bound)


@dataclass(frozen=True)
class Batch:
    """The live rows of a call: ``first`` token and ``count`` per row, longest row first."""

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    first: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Every live token, row by row."""
        return [first + t for first, count in zip(self.first, self.count, strict=True) for t in range(count)]

    @property
    def starts(self) -> list[int]:
        """Where each row starts in ``tokens``, and the end of the last one."""
        return [sum(self.count[:i]) for i in range(len(self.count) + 1)]

    def longer_than(self, t: int) -> int:
        """The number of rows that have a token ``t``; they are the first ones."""
        return sum(count > t for count in self.count)


def implementation() -> Implementation:
    """The implementation ``fla``; ``UnavailableError`` says in one line why it cannot be had.

    Call it after ``open_device``: Triton decides when fla is imported whether it interprets.
    """
    kernels = _load()

    def kda_recoverssm_verify(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        raw_g: Tensor,
        raw_beta: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        lower_bound: float | None,
        checkpoint_state: Tensor,
        records: Records,
        query_start_loc: Tensor,
        state_indices: Tensor,
        spec_query_len: int,
        out: Tensor | None = None,
    ) -> Tensor:
        out = torch.empty_like(v) if out is None else out
        starts, slots = query_start_loc.tolist(), state_indices.tolist()
        batch = _batch(starts, slots, spec_query_len)
        for slot, (first, end) in zip(slots, pairwise(starts), strict=True):
            if slot <= 0:
                out[0, first : min(end, first + spec_query_len)] = 0.0
        if not batch.rows:
            return out
        state = checkpoint_state[torch.tensor(batch.slots, device=q.device)]
        inputs = (q[0], k[0], v[0], raw_g[0], raw_beta[0])
        gate = (A_log, dt_bias, lower_bound)
        _outputs(kernels, batch, inputs, gate, state, out[0])
        _records(kernels, batch, inputs, gate, state, records)
        return out

    return Implementation(
        name="fla",
        version=f"fla-core {kernels.version}",
        operations={"verify": kda_recoverssm_verify},
        arithmetic="any-order-fp32",
        devices=("cpu", "cuda"),
        domain=Domain(graphs=False),
        path=lambda: "fused_recurrent_kda",
    )


def _load() -> Kernels:
    if importlib.util.find_spec("fla") is None:
        raise UnavailableError(f"fla: needs fla-core >= {FIRST_VERSION} and einops; found none")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it tells of parts that are not used here
        import fla

        version = str(getattr(fla, "__version__", "0"))
        if Version(version) < Version(FIRST_VERSION):
            raise UnavailableError(f"fla: needs fla-core >= {FIRST_VERSION}; found {version}")
        try:
            from fla.ops.kda import fused_recurrent_kda
            from fla.ops.kda.gate import naive_kda_gate, naive_kda_lowerbound_gate
        except ImportError as error:
            raise UnavailableError(f"fla: fla-core {version} cannot be imported: {error}") from None
    return Kernels(version, fused_recurrent_kda, naive_kda_gate, naive_kda_lowerbound_gate)


def _batch(starts: list[int], slots: list[int], window: int) -> Batch:
    counts = [min(end - first, window) for first, end in pairwise(starts)]
    live = [i for i, slot in enumerate(slots) if slot > 0 and counts[i] > 0]
    live.sort(key=lambda i: -counts[i])
    return Batch(
        tuple(live),
        tuple(slots[i] for i in live),
        tuple(starts[i] for i in live),
        tuple(counts[i] for i in live),
    )


def _outputs(
    kernels: Kernels,
    batch: Batch,
    inputs: tuple[Tensor, ...],
    gate: tuple[Tensor, Tensor, float | None],
    state: Tensor,
    out: Tensor,
) -> None:
    """Run all windows in one launch and store the outputs."""
    tokens = torch.tensor(batch.tokens, device=out.device)
    q, k, v, raw_g, raw_beta = (x[tokens].unsqueeze(0) for x in inputs)
    A_log, dt_bias, lower_bound = gate
    o, _ = kernels.recurrent(
        q,
        k,
        v.float(),
        raw_g,
        raw_beta,
        A_log=A_log,
        dt_bias=dt_bias,
        lower_bound=lower_bound,
        initial_state=state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=True,
        cu_seqlens=torch.tensor(batch.starts, device=out.device),
    )
    out[tokens] = o[0].to(out.dtype)


def _records(
    kernels: Kernels,
    batch: Batch,
    inputs: tuple[Tensor, ...],
    gate: tuple[Tensor, Tensor, float | None],
    state: Tensor,
    records: Records,
) -> None:
    """Run the windows a token at a time and store u, the raw key and the raw gate of each."""
    _, k, v, raw_g, raw_beta = inputs
    K = k.shape[-1]
    S = torch.nn.functional.pad(state.float(), (0, 1))  # [n, H, V, K + 1]
    for t in range(max(batch.count)):
        n = batch.longer_than(t)
        row = torch.tensor(batch.rows[:n], device=k.device)
        token = torch.tensor([first + t for first in batch.first[:n]], device=k.device)
        key = torch.nn.functional.pad(_normalise(k[token].float()), (0, 1), value=1.0)
        g = torch.nn.functional.pad(kernels.log_decay(raw_g[token], *gate), (0, 1), value=-torch.inf)
        _, S = kernels.recurrent(
            torch.zeros_like(key)[:, None],
            key[:, None],
            v[token][:, None],
            g[:, None],
            raw_beta[token][:, None],
            initial_state=S[:n],
            output_final_state=True,
            use_beta_sigmoid_in_kernel=True,
            state_v_first=True,
        )
        records.correction[:, :, t][row] = S[..., K]
        records.key_gate[:, :, t, :K][row] = k[token]
        records.key_gate[:, :, t, K:][row] = raw_g[token]


def _normalise(x: Tensor) -> Tensor:
    """x * rsqrt(sum x**2 + 1e-6) over the last dimension (contract, section 1.3)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)
