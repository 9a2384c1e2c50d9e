"""Serving a script of events: an engine that drives an implementation, held against the model.

The engine does what an inference engine does around the kernels: it gives out slots and keeps
block tables (``ci.slots``), copies a state into the block where a request goes on, and starts
requests from cached boundaries. Memory is carried from call to call: every call is a case of its
own whose inputs are what the last one left, and is judged by its operation's oracle, byte by
byte. After every commit the states are also held against ``oracle.serving``, which has seen
accepted tokens only.
"""

import math
from dataclasses import replace

import torch

from ci import steps
from ci.slots import Running, Slots
from ci.steps import Batch
from impl.contract import Implementation
from impl.devices.base import Device
from impl.observe import observe
from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.serve import WIDTH, Serve
from oracle.calls.verify import Verify
from oracle.case import Case
from oracle.expect import expect
from oracle.expectation import Cells, Expected, Observation
from oracle.gate import log_decay
from oracle.judge import Problem, Verdict, judge
from oracle.layout import DTYPES, Layout
from oracle.serving import Request, Tokens, added_by_commit, started
from oracle.tracked import Tracked, arithmetic, exact
from oracle.values import Values, build, index_tensors

Tensor = torch.Tensor
PLACES = {"conv": "conv_state.0", "state": "state.0", "correction": "correction.0", "key_gate": "key_gate.0"}
"""The engine's memory by its names in a commit."""


class _WrongError(Exception):
    """A call, or what it came to, was wrong."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__()
        self.problems = problems


def serve(case: Case, implementation: Implementation, device: Device) -> Verdict:
    """Run a case of serving whole; the verdict on the first call that went wrong, or on all."""
    assert isinstance(case.call, Serve)
    engine = _Engine(case, case.call, implementation, device)
    try:
        engine.run()
    except _WrongError as wrong:
        worst = max((problem.ratio for problem in wrong.problems), default=math.inf)
        return Verdict(worst, engine.ratios, wrong.problems, engine.path)
    return Verdict(max(engine.ratios.values(), default=0.0), engine.ratios, (), engine.path)


class _Engine:
    def __init__(self, case: Case, call: Serve, implementation: Implementation, device: Device) -> None:
        self._case, self._call, self._implementation, self._device = case, call, implementation, device
        self._tokens = build(case).tensors
        self._ar = arithmetic(implementation.arithmetic, device.name)
        self._slots = Slots(call.pool, call.block_size)
        self._step = 0
        self.ratios: dict[str, float] = {}
        self.path = ""
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
            self._step = step
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
        after, _ = self._call_judged(steps.prefill(call, rows, slots, continued), tensors)
        self._memory["conv"] = after["conv_states"]
        out, first = after["out"], 0
        for i, slot in zip(rows, slots, strict=True):
            running = self._slots.running[call.slots[i]]
            some = self._some(i, out[first : first + call.qlens[i]])
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
        """One step of decoding: update, verify, commit; then hold the states against the model."""
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
        convolved = self._update(batch, counted=counted)
        windows: dict[int, Tokens] = {}
        first = 0
        for i, request in zip(batch.events, batch.requests, strict=True):
            if request:
                windows[request] = self._some(i, convolved[first : first + call.qlens[i]])
            first += call.qlens[i]
        corrections = self._verify(batch, convolved, windows)
        self._commit(batch, windows, corrections)

    def _update(self, batch: Batch, *, counted: bool) -> Tensor:
        tensors = {
            "x": self._rows("x", batch.events),
            "weight": self._tokens["weight"],
            "conv_state": self._memory["conv"],
        }
        after, _ = self._call_judged(steps.update(self._call, batch, counted=counted), tensors)
        self._memory["conv"] = after["conv_state"]
        return after["out"]

    def _verify(self, batch: Batch, convolved: Tensor, windows: dict[int, Tokens]) -> Cells:
        """Run verify on the convolved tokens; returns what is expected of its corrections."""
        verify = steps.verify(self._call, batch)
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
        after, expected = self._call_judged(verify, tensors)
        for name in ("correction", "key_gate"):
            self._memory[name] = after[name]
        self._hold_outputs(batch, verify, windows, after["out"], expected.cells["out"])
        return expected.cells["correction"]

    def _hold_outputs(
        self, batch: Batch, verify: Verify, windows: dict[int, Tokens], out: Tensor, cells: Cells
    ) -> None:
        """Outputs of the window against plain decode steps of the model."""
        assert cells.bound is not None
        value, bound = cells.value.clone(), cells.bound.clone()
        for row, request in enumerate(batch.requests):
            if request:
                place = slice(verify.starts[row], verify.starts[row + 1])
                value[place], spread = self._slots.running[request].model.outputs(windows[request])
                bound[place] += spread
        wanted = Expected({"out": replace(cells, value=value, bound=bound)})
        self._judge("served", wanted, Observation({"out": out}, {"out": out}), {})

    def _commit(self, batch: Batch, windows: dict[int, Tokens], corrections: Cells) -> None:
        commit = steps.commit(self._call, batch, self._slots, wide=self._step % 2 == 1)
        tensors = {place: self._memory[name] for name, place in PLACES.items()}
        tensors |= {"A_log.0": self._tokens["A_log"], "dt_bias.0": self._tokens["dt_bias"]}
        before = self._memory["state"]
        after, _ = self._call_judged(commit, tensors)
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
        self._judge("served", expected, Observation(tensors, tensors), axes)
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

    def _some(self, event: int, convolved: Tensor) -> Tokens:
        """An event's tokens as the model takes them: convolved as memory has it, gates exact."""
        q, k, v = (part.double() for part in self._split(convolved))
        A_log, dt_bias = exact(self._tokens["A_log"])[:, None], exact(self._tokens["dt_bias"])
        g = log_decay(exact(self._rows("raw_g", [event])), A_log, dt_bias, self._call.lower_bound, self._ar)
        beta = torch.sigmoid(self._rows("raw_beta", [event]).double())
        inputs = self._rows("x", [event]).to(DTYPES[self._call.conv])
        return Tokens(q, k, v, g, beta, inputs)

    def _call_judged(self, call: AnyCall, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Expected]:
        """Run a call on these tensors; returns memory afterwards and what was expected of it, or raises."""
        gap = self._call.gap
        specs = call.tensors()
        layouts = {
            name: Layout(gaps=(gap, *[0] * (len(spec.shape) - 1)))
            for name, spec in specs.items()
            if spec.role == "slot" and gap
        }
        case = Case(call=call, layouts=layouts, poison=self._case.poison)
        values = Values.full(tensors | index_tensors(call))
        seen = observe(case, self._implementation, self._device, values)
        self.path = seen.path
        expected = expect(case, values, self._ar)
        self._judge(case.op, expected, seen, {name: spec.axes for name, spec in call.results().items()})
        return seen.after, expected

    def _judge(
        self, what: str, expected: Expected, seen: Observation, axes: dict[str, tuple[str, ...]]
    ) -> None:
        verdict = judge(expected, seen, axes)
        for name, ratio in verdict.ratios.items():
            key = f"{what} {name.partition('.')[0]}"
            self.ratios[key] = max(ratio, self.ratios.get(key, 0.0))
        if not verdict.ok:
            note = f"in {what} of step {self._step}"
            raise _WrongError(tuple(problem.noted(note) for problem in verdict.problems))
