"""Third-party implementations, right and wrong; tests copy this file elsewhere and plug it in by name.

``right`` is a verify in plain PyTorch. ``menu`` misbehaves as ``lower_bound`` says, so that one
child process can serve many misbehaviours; the other factories always do, or only sometimes.
It knows nothing of the suite but the contract.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from impl.contract import Domain, Implementation, Records

Tensor = torch.Tensor
Step = Callable[[dict[str, Any], Tensor], Any]


def compute(
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
    """Verify by the contract, a row and a token at a time, in fp32."""
    out = torch.empty_like(v) if out is None else out
    heads, key_dim = q.shape[2:]
    a, bias = A_log.exp()[:, None], dt_bias.reshape(heads, key_dim)
    starts = query_start_loc.tolist()
    for row, slot in enumerate(state_indices.tolist()):
        first, last = starts[row], starts[row + 1]
        if slot <= 0:
            out[0, first:last] = 0.0
            continue
        state = checkpoint_state[slot].float()
        for t, token in enumerate(range(first, last)):
            x = raw_g[0, token].float() + bias
            if lower_bound is None:
                g = -a * torch.where(x > 20.0, x, torch.log(1.0 + torch.exp(x)))
            else:
                g = lower_bound * torch.sigmoid(a * x)
            key, query = (_normalised(y[0, token].float()) for y in (k, q))
            state = state * torch.exp(g)[:, None, :]
            beta = torch.sigmoid(raw_beta[0, token].float())[:, None]
            u = beta * (v[0, token].float() - (state * key[:, None, :]).sum(-1))
            state = state + u[:, :, None] * key[:, None, :]
            out[0, token] = (state * (query * key_dim**-0.5)[:, None, :]).sum(-1).to(out.dtype)
            records.correction[row, :, t] = u
            records.key_gate[row, :, t] = torch.cat((k[0, token], raw_g[0, token]), -1)
    return out


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _made(step: Step) -> Implementation:
    """An implementation that computes rightly, then takes ``step``; a step may return another result."""

    def verify(
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
    ) -> Any:
        given = dict(locals())
        given.pop("step", None)
        result = compute(**given)
        return step(given, result)

    return Implementation("zoo", {"verify": verify}, domain=Domain(records=("row",)))


def right() -> Implementation:
    """No fault; says nothing of its arithmetic."""
    return _made(lambda _, out: out)


class RudeError(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def _raise(error: BaseException) -> Any:
    raise error


def _chatter(given: dict[str, Any], out: Tensor) -> Tensor:
    for _ in range(40):
        print("x" * 100_000)
        os.write(1, b"y" * 100_000 + b"\n")
        os.write(2, b"\x1b[31m\xff" * 20_000 + b"\n")
    return out


def _write_past_the_end(given: dict[str, Any], out: Tensor) -> Tensor:
    ctypes.memset(out.data_ptr() + out.numel() * out.element_size(), 1, 8)
    return out


def _write_input(given: dict[str, Any], out: Tensor) -> Tensor:
    given["k"].zero_()
    return out


_calls = 0


def _differ(given: dict[str, Any], out: Tensor) -> Tensor:
    global _calls
    _calls += 1
    if _calls % 2 == 0:
        out.copy_(out.nextafter(torch.tensor(9.0)))
    return out


def _leak_a_thread(given: dict[str, Any], out: Tensor) -> Tensor:
    threading.Thread(target=time.sleep, args=(1000.0,)).start()
    return out


def _die_soon(given: dict[str, Any], out: Tensor) -> Tensor:
    threading.Timer(0.5, ctypes.string_at, (0,)).start()
    return out


def _set_dtype(given: dict[str, Any], out: Tensor) -> Tensor:
    torch.set_default_dtype(torch.float64)
    torch.set_flush_denormal(True)
    return out


def _leave_a_process(given: dict[str, Any], out: Tensor) -> Tensor:
    if os.fork() == 0:
        time.sleep(1000.0)
    os._exit(4)


def _delete_itself(given: dict[str, Any], out: Tensor) -> Tensor:
    Path(__file__).unlink(missing_ok=True)
    return out


def _hang(given: dict[str, Any], out: Tensor) -> Any:
    while True:
        time.sleep(1.0)


STEPS: tuple[Step, ...] = (
    lambda given, out: out,
    lambda given, out: _raise(RuntimeError("boom\n\x1b[31m\ud800")),
    lambda given, out: None,
    lambda given, out: out[:, :, :, :1],
    lambda given, out: out.double(),
    lambda given, out: out.clone(),
    _write_input,
    _write_past_the_end,
    _differ,
    _set_dtype,
    _leak_a_thread,
    _chatter,
    lambda given, out: _raise(SystemExit(3)),
    lambda given, out: input(),
    lambda given, out: _raise(RudeError()),
    lambda given, out: os.closerange(3, 256),
    _leave_a_process,
    lambda given, out: ctypes.string_at(0),
    lambda given, out: os._exit(3),
    _hang,
    _delete_itself,
    lambda given, out: sys.exit("\x1b[31mbye"),
    lambda given, out: os.write(_reply_channel(), b"\xff" * 64),
    lambda given, out: out.to("meta"),
    _die_soon,
)
"""What ``menu`` does, by minus the lower bound."""


def _reply_channel() -> int:
    """The highest open pipe: where the suite's own process answers."""
    pipes = (
        p for p in Path("/proc/self/fd").iterdir() if p.exists() and str(p.readlink()).startswith("pipe:")
    )
    return max(int(p.name) for p in pipes)


def menu() -> Implementation:
    """Misbehaves as the lower bound says; rightly for 0."""
    return _made(lambda given, out: STEPS[int(-given["lower_bound"])](given, out))


def raises() -> Implementation:
    """Always raises."""
    return _made(STEPS[1])


def segfaults() -> Implementation:
    """Always reads address 0."""
    return _made(STEPS[17])


def hangs() -> Implementation:
    """Never returns."""
    return _made(_hang)


def large() -> Implementation:
    """Wrong only with more than one head and more than 16 value channels."""

    def step(given: dict[str, Any], out: Tensor) -> Tensor:
        return out.add_(1.0) if out.shape[2] > 1 and out.shape[3] > 16 else out

    return _made(step)


def spiked() -> Implementation:
    """Wrong only in a head and token with a value beyond 50."""

    def step(given: dict[str, Any], out: Tensor) -> Tensor:
        return out.add_((given["v"].abs() > 50.0).any(-1, keepdim=True))

    return _made(step)


def killed_once() -> Implementation:
    """The first time killed from outside, as by the system when memory runs out."""

    def step(given: dict[str, Any], out: Tensor) -> Tensor:
        mark = Path("killed")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return out

    return _made(step)


def _marked(step: Step) -> Implementation:
    """Leaves a file ``marked-<process>`` when called, so that a test can wait for the moment."""

    def marking(given: dict[str, Any], out: Tensor) -> Any:
        Path(f"marked-{os.getpid()}").touch()
        return step(given, out)

    return _made(marking)


def stuck() -> Implementation:
    """Marks its process, then hangs."""
    return _marked(_hang)


def slowly_wrong() -> Implementation:
    """Wrong with more than 16 value channels; then marks its process, and takes half a second a case."""
    found = False

    def step(given: dict[str, Any], out: Tensor) -> Tensor:
        nonlocal found
        time.sleep(0.5 if found else 0.0)
        if out.shape[3] <= 16:
            return out
        found = True
        Path(f"marked-{os.getpid()}").touch()
        return out.add_(1.0)

    return _made(step)


def slow() -> Implementation:
    """Right, and marks its process; a case takes at least a tenth of a second."""

    def step(given: dict[str, Any], out: Tensor) -> Tensor:
        time.sleep(0.1)
        return out

    return _marked(step)
