"""Serving a script of events: an engine that drives an implementation, held against the model.

The engine does what an inference engine does around the kernels: it gives out slots and keeps
block tables (``ci.slots``), copies a state into the block where a request goes on, and starts
requests from cached boundaries. A window goes through the fused verify where there is one and it
does not decline, otherwise through the convolution and verify. Memory is carried from call to
call: every call is a case of its own whose inputs are what the last one left, and is judged by
its operation's oracle, byte by byte. After every commit the states are also held against
``oracle.serving``, which has seen accepted tokens only.
"""

import math
from dataclasses import replace

import torch

from ci import steps
from ci.runs import Watch, ignore
from ci.serving_calls import Calls, WrongError
from ci.slots import Running, Slots
from ci.steps import Batch
from impl.contract import FUSED, Implementation
from impl.devices.base import Device
from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.serve import WIDTH, Lying, Serve
from oracle.case import Case
from oracle.conv import convolve
from oracle.expectation import Cells, Expected, Observation
from oracle.gate import log_decay
from oracle.judge import Verdict
from oracle.layout import DTYPES
from oracle.serving import Request, Tokens, added_by_commit, started
from oracle.tracked import Tracked, bfloat16, exact
from oracle.values import build

Tensor = torch.Tensor
PLACES = {"conv": "conv_state.0", "state": "state.0", "correction": "correction.0", "key_gate": "key_gate.0"}
"""The engine's memory by its names in a commit."""


def serve(case: Case, implementation: Implementation, device: Device, watch: Watch = ignore) -> Verdict:
    """Run a case of serving whole; the verdict on the first call that went wrong, or on all."""
    assert isinstance(case.call, Serve)
    calls = Calls(case, case.call, implementation, device, watch)
    try:
        _Engine(case, case.call, calls).run()
    except WrongError as wrong:
        worst = max((problem.ratio for problem in wrong.problems), default=math.inf)
        return Verdict(worst, calls.ratios, wrong.problems, calls.path)
    return Verdict(max(calls.ratios.values(), default=0.0), calls.ratios, (), calls.path)


class _Engine:
    def __init__(self, case: Case, call: Serve, calls: Calls) -> None:
        self._call, self._calls = call, calls
        self._tokens = build(case).tensors
        self._ar = calls.arithmetic("commit")
        self._slots = Slots(call.pool, call.block_size)
        self._decoded = 0
        S, H, K, V, Q = call.pool, call.heads, call.key_dim, call.value_dim, call.window
        rows = call.capacity if call.records == "row" else S
        self._memory = {
            "conv": torch.full((S, call.channels, call.state_len), math.nan, dtype=DTYPES[call.conv]),
            "state": torch.full((S, H, V, K), math.nan, dtype=DTYPES[call.state]),
            "correction": torch.full((rows, H, Q, V), math.nan),
            "key_gate": torch.full((rows, H, Q, 2 * K), math.nan, dtype=DTYPES[call.activation]),
        }

    def run(self) -> None:
        """All steps of the script."""
        call = self._call
        for step in sorted(set(call.steps)):
            self._calls.step = step
            events = [i for i in range(call.rows) if call.steps[i] == step]
            by_kind = {kind: [i for i in events if call.kinds[i] == kind] for kind in call.kinds}
            for i in by_kind.get("finish", []):
                self._slots.finish(call.slots[i])
            for i in by_kind.get("cached", []):
                # The engine copies: the kernels write into the slot that they start from.
                self._copy(*self._slots.start_cached(call.slots[i], call.accepted[i]))
            self._prefill(by_kind.get("prefill", []))
            self._decode(by_kind.get("plain", []), [], counted=False)
            self._decode(by_kind.get("decode", []), by_kind.get("pad", []), counted=True)

    def _copy(self, source: int, target: int) -> None:
        """Copy a slot; onto itself, as with zeros for none, nothing changes."""
        for name in ("conv", "state"):
            self._memory[name][target] = self._memory[name][source]

    # Calls

    def _prefill(self, events: list[int]) -> None:
        """One call of the prefill convolution; the states are the model's, rounded."""
        call = self._call
        rows: list[int] = []
        continued: list[bool] = []
        for i in events:
            request = call.slots[i]
            if not call.qlens[i] or request < 1 or request in [call.slots[j] for j in rows]:
                continue
            running = self._slots.running.get(request)
            new = running is None
            running = running or Running([], self._fresh())
            if not self._slots.reach(running, call.qlens[i]):
                if new:
                    self._slots.release(running)
                continue
            self._slots.running[request] = running
            if not new:
                self._copy(self._slots.slot(request), self._slots.slot(request, call.qlens[i]))
            rows.append(i)
            continued.append(not new)
        if not rows:
            return
        slots = tuple(self._slots.slot(call.slots[i], call.qlens[i]) for i in rows)
        tensors = {
            "x": self._rows("x", rows),
            "weight": self._tokens["weight"],
            "conv_states": self._memory["conv"],
        }
        after = self._calls.run(steps.prefill(call, rows, slots, continued), tensors).after
        self._memory["conv"] = after["conv_states"]
        out, first = after["out"], 0
        for i, slot in zip(rows, slots, strict=True):
            running = self._slots.running[call.slots[i]]
            some = self._some(i, exact(out[first : first + call.qlens[i]]))
            first += call.qlens[i]
            model = running.model.advanced(some)
            self._memory["state"][slot] = model.S.to(DTYPES[call.state])
            running.model = replace(
                model, S=self._memory["state"][slot].double(), E=torch.zeros_like(model.E)
            )

    def _fresh(self) -> Request:
        call = self._call
        state = (call.heads, call.value_dim, call.key_dim)
        return started(state, (call.channels, WIDTH - 1), DTYPES[call.conv])

    def _decode(self, events: list[int], pads: list[int], *, counted: bool) -> None:
        """One step of decoding: verify, commit; then hold the states against the model."""
        call = self._call
        rows: list[int] = []
        for i in events:
            request = call.slots[i]
            running = self._slots.running.get(request)
            fits = len(rows) < call.capacity and request not in [call.slots[j] for j in rows]
            if running and fits and call.qlens[i] and self._slots.reach(running, call.qlens[i]):
                rows.append(i)
        if not rows:
            return
        pads = pads[: call.capacity - len(rows)]
        batch = steps.batch_of(call, rows, pads, self._slots)
        lying = call.lying[self._decoded % len(call.lying)] if call.lying else "dense"
        self._decoded += 1
        done = self._verify_fused(batch, lying) if counted and self._calls.fused else None
        windows, corrections = done or self._verify_apart(batch, lying, counted=counted)
        self._commit(batch, windows, corrections)

    def _verify_fused(self, batch: Batch, lying: Lying) -> tuple[dict[int, Tokens], Cells] | None:
        """The window in one call: its tokens by request, corrections as expected; None if declined."""
        call, dim_first = steps.fused(self._call, batch), self._call.dim_first
        conv = self._memory["conv"]
        tensors = {
            "mixed_qkv": self._rows("x", batch.events),
            "raw_gate": self._rows("raw_g", batch.events).flatten(1),
            "raw_beta": self._rows("raw_beta", batch.events),
            "A_log": self._tokens["A_log"],
            "dt_bias": self._tokens["dt_bias"].flatten(),
            "state": self._memory["state"],
            "conv_state": conv if dim_first else conv.mT.contiguous(),
            "conv_weight": self._tokens["weight"],
        }
        done = self._calls.run(call, tensors, lying)
        if done.declined:
            return None
        for name in ("correction", "key_gate"):
            self._memory[name] = done.after[name]
        stored = done.after["conv_state"]
        self._memory["conv"] = stored if dim_first else stored.mT.contiguous()
        windows = {
            request: self._some(i, self._convolved(i, self._slots.running[request].model))
            for i, request in zip(batch.events, batch.requests, strict=True)
            if request
        }
        self._hold_outputs(batch, call, windows, done.after["out"], done.expected.cells["out"])
        return windows, done.expected.cells["correction"]

    def _verify_apart(self, batch: Batch, lying: Lying, *, counted: bool) -> tuple[dict[int, Tokens], Cells]:
        """The window by the convolution and verify: the same of it."""
        tensors = {
            "x": self._rows("x", batch.events),
            "weight": self._tokens["weight"],
            "conv_state": self._memory["conv"],
        }
        updated = self._calls.run(steps.update(self._call, batch, counted=counted), tensors, lying).after
        self._memory["conv"], convolved = updated["conv_state"], updated["out"]
        call = steps.verify(self._call, batch)
        q, k, v = self._split(convolved)
        tensors = {
            "q": q,
            "k": k,
            "v": v,
            "raw_g": self._rows("raw_g", batch.events),
            "raw_beta": self._rows("raw_beta", batch.events),
            "A_log": self._tokens["A_log"],
            "dt_bias": self._tokens["dt_bias"],
            **{name: self._memory[name] for name in ("state", "correction", "key_gate")},
        }
        done = self._calls.run(call, tensors, lying)
        for name in ("correction", "key_gate"):
            self._memory[name] = done.after[name]
        windows = {
            request: self._some(i, exact(convolved[call.starts[row] : call.starts[row + 1]]))
            for row, (i, request) in enumerate(zip(batch.events, batch.requests, strict=True))
            if request
        }
        self._hold_outputs(batch, call, windows, done.after["out"], done.expected.cells["out"])
        return windows, done.expected.cells["correction"]

    def _hold_outputs(
        self, batch: Batch, call: AnyCall, windows: dict[int, Tokens], out: Tensor, cells: Cells
    ) -> None:
        """Outputs of the window against plain decode steps of the model."""
        assert cells.bound is not None
        value, bound = cells.value.clone(), cells.bound.clone()
        for row, request in enumerate(batch.requests):
            if request:
                place = slice(call.starts[row], call.starts[row + 1])
                outs, spread = self._slots.running[request].model.outputs(windows[request])
                value[place] = outs.reshape(value[place].shape)
                bound[place] += spread.reshape(bound[place].shape)
        wanted = Expected({"out": replace(cells, value=value, bound=bound)})
        axes = {"out": call.results()["out"].axes}
        self._calls.judge("served", wanted, Observation({"out": out}, {"out": out}), axes, call)

    def _commit(self, batch: Batch, windows: dict[int, Tokens], corrections: Cells) -> None:
        commit = steps.commit(self._call, batch, self._slots, wide=self._calls.step % 2 == 1)
        tensors = {place: self._memory[name] for name, place in PLACES.items()}
        tensors |= {"A_log.0": self._tokens["A_log"], "dt_bias.0": self._tokens["dt_bias"]}
        before = self._memory["state"]
        after = self._calls.run(commit, tensors).after
        for name, place in PLACES.items():
            self._memory[name] = after[place]
        self._hold_states(batch, commit, before, windows, corrections)

    def _hold_states(
        self, batch: Batch, commit: Commit, before: Tensor, windows: dict[int, Tokens], corrections: Cells
    ) -> None:
        """Committed states and histories against the model, which moves on by the accepted tokens."""
        assert corrections.bound is not None
        wanted: dict[int, Request] = {}
        ended: list[int] = []
        for row, request in enumerate(batch.requests):
            if not request:
                continue
            plan, running = commit.plan(row), self._slots.running[request]
            if not plan.writes:
                ended.append(request)
                continue
            some, record = windows[request], commit.record_row(row)
            u = Tracked(corrections.value[record].transpose(0, 1), corrections.bound[record].transpose(0, 1))
            base, source = running.model, before[commit.slots[row]].double()
            for slot, n in ((plan.boundary, plan.m), (plan.final, plan.n)):
                if slot > 0:
                    part = some.first(n)
                    added = added_by_commit(source, part, u[:n], DTYPES[self._call.state], self._ar)
                    wanted[slot] = base.advanced(part, added)
            running.model = wanted[plan.final]
            if plan.writes_boundary and plan.boundary != plan.final:
                self._slots.cache(request, plan.boundary, wanted[plan.boundary])
        tensors = {"state": self._memory["state"], "conv_state": self._memory["conv"]}
        axes = {"state": ("slot", "head", "v", "k"), "conv_state": ("slot", "channel", "column")}
        expected = steps.held(wanted, tensors["state"], tensors["conv_state"])
        self._calls.judge("served", expected, Observation(tensors, tensors), axes, commit)
        for request in ended:
            self._slots.finish(request)

    # Parts of a call

    def _rows(self, name: str, events: tuple[int, ...] | list[int]) -> Tensor:
        """The events' tokens, one after the other."""
        starts = self._call.starts
        return torch.cat([self._tokens[name][starts[i] : starts[i + 1]] for i in events])

    def _split(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k ``[T, H, K]`` and v ``[T, H, V]`` of the packed projection."""
        call = self._call
        H, K, V = call.heads, call.key_dim, call.value_dim
        q, k, v = convolved.split((H * K, H * K, H * V), 1)
        return (
            q.reshape(-1, H, K).contiguous(),
            k.reshape(-1, H, K).contiguous(),
            v.reshape(-1, H, V).contiguous(),
        )

    def _convolved(self, event: int, model: Request) -> Tracked:
        """An event's convolved tokens [n, C], from the model's own history: a fused call leaves none."""
        inputs = self._rows("x", [event]).to(DTYPES[self._call.conv])
        win = torch.cat((model.history, inputs.T), 1)[None]
        ar = self._calls.arithmetic(FUSED)
        y = bfloat16(convolve(win, self._tokens["weight"], None, silu=True, ar=ar))
        return Tracked(y.v[0].T, y.e[0].T)

    def _some(self, event: int, convolved: Tracked) -> Tokens:
        """An event's tokens as the model takes them, from the convolved ones [n, C]; gates exact."""
        q, k, v = self._split(convolved.v)
        _, k_error, _ = self._split(convolved.e)
        A_log, dt_bias = exact(self._tokens["A_log"])[:, None], exact(self._tokens["dt_bias"])
        g = log_decay(exact(self._rows("raw_g", [event])), A_log, dt_bias, self._call.lower_bound, self._ar)
        beta = torch.sigmoid(self._rows("raw_beta", [event]).double())
        inputs = self._rows("x", [event]).to(DTYPES[self._call.conv])
        return Tokens(q, Tracked(k, k_error), v, g, beta, inputs)
