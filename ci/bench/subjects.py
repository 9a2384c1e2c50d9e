"""What stands in a table's columns: an implementation, called on one of its ways."""

import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import torch

from ci.bench.calls import updated, verified
from ci.bench.inputs import Inputs, tensor
from ci.bench.traffic import moved, moved_by_fold
from impl.bindings import BINDINGS, Launched, Views
from impl.contract import BY_RECORDS, FUSED, Implementation, UnavailableError
from oracle.calls import AnyCall
from oracle.calls.conv import ConvPrefill, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify


@dataclass(frozen=True)
class Job:
    """A call on one set of inputs, made once; ``call`` makes it again, without the binding's checks."""

    call: Callable[[], object]
    results: Views
    """What the first call left, by the names of the operation's tensors; slots are those of the set."""


@dataclass(frozen=True)
class Subject:
    """One column. ``bind`` makes the first call on a set, through the suite's own binding."""

    name: str
    bind: Callable[[Inputs], Job]
    graph: bool = True
    """Whether a CUDA graph can hold the call."""
    odd: bool = False
    """Whether rows of the projection shall be off 16 bytes."""
    bytes: Callable[[AnyCall], int] = moved


def subjects(op: str, name: str, implementation: Implementation) -> list[Subject]:
    """An implementation's columns in an operation's table; ``UnavailableError`` if it has none."""
    match op:
        case "fused_verify":
            return _fused(name, implementation)
        case "commit":
            return _commit(name, implementation)
        case "conv_prefill":
            return _prefill(name, implementation)
        case "packed_conv":
            return _packed(name, implementation)
    function = _function(op, implementation)
    records = _record_layout(implementation) if op == BY_RECORDS else ""

    def bind(inputs: Inputs) -> Job:
        given = _by_slot(inputs) if records == "slot" else inputs
        bound = _Bound(op, given, function, implementation)
        return Job(bound.call, bound.results)

    return [Subject(name, bind)]


# ---- The ways.


def _fused(name: str, implementation: Implementation) -> list[Subject]:
    """Both kernels of a fused verify, or else the pair of calls in its place."""
    if FUSED not in implementation.operations:
        try:
            implementation.variants("conv_update"), implementation.variants("verify")
        except UnavailableError:
            implementation.variants(FUSED)  # says why there is none
        return [Subject(f"{name}: update + verify", partial(_pair, implementation))]

    def bind(path: str, inputs: Inputs) -> Job:
        bound = _Bound(FUSED, inputs, _function(FUSED, implementation), implementation)
        taken = implementation.path() or path
        if bound.declined or taken != path:
            raise ValueError(f"took the path {'declined' if bound.declined else taken}, not {path}")
        return Job(bound.call, bound.results)

    return [
        Subject(f"{name}: {path}", partial(bind, path), odd=odd)
        for path, odd in (("warp-specialised", False), ("plain", True))
    ]


def _pair(implementation: Implementation, inputs: Inputs) -> Job:
    """``causal_conv1d_update``, then verify on its output."""
    call, views = inputs.call, inputs.views
    assert isinstance(call, FusedVerify)
    x = views["mixed_qkv"]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape = (call.tokens, call.heads, call.key_dim)
    q, k, v = (part.view(shape) for part in y.split(call.heads * call.key_dim, 1))
    update = {
        "x": x,
        "out": y,
        "weight": views["conv_weight"],
        "conv_state": views["conv_state"],
        "conv_state_indices": views["state_indices"],
        "query_start_loc": views["query_start_loc"],
        "num_accepted_tokens": views["num_accepted_tokens"],
    }
    verify = views | {
        "q": q,
        "k": k,
        "v": v,
        "raw_g": views["raw_gate"].view(shape),
        "out": views["out"].view(shape),
    }
    first = _Bound(
        "conv_update",
        Inputs(updated(call), update),
        _function("conv_update", implementation),
        implementation,
    )
    layout = _record_layout(implementation)
    given = Inputs(verified(call, "row"), verify)
    second = _Bound(
        BY_RECORDS,
        _by_slot(given) if layout == "slot" else given,
        _function(BY_RECORDS, implementation),
        implementation,
    )
    one, two = first.call, second.call

    def both() -> None:
        one()
        two()

    results = second.results | {"conv_state": first.results["conv_state"]}
    return Job(both, results | {"out": results["out"].view(views["out"].shape)})


def _commit(name: str, implementation: Implementation) -> list[Subject]:
    """The whole commit, and the fold alone where it is a launch of its own."""
    context = _function("commit", implementation)

    def bind(inputs: Inputs, *, fold: bool) -> Job:
        bound = _Bound("commit", inputs, context, implementation)
        call = bound.call
        if fold:
            rows, slots = inputs.call.rows, inputs.views["state_indices"]
            call = partial(_fold_of(name), call.func.__self__, slots, rows, False)
            call()  # compiles what this way of calling it needs, and says so if it cannot
        return Job(call, bound.results)

    whole = Subject(name, partial(bind, fold=False))
    if name != "cute" and not name.endswith(":cute"):
        return [whole]
    return [whole, Subject(f"{name}: fold alone", partial(bind, fold=True), bytes=moved_by_fold)]


def _fold_of(name: str) -> Callable[..., object]:
    if name == "cute":
        from impl.cute.host import cute_recoverssm_commit

        return cute_recoverssm_commit
    from impl.vllm.gpu import host_module

    found: Callable[..., object] = host_module(name).cute_recoverssm_commit
    return found


def _prefill(name: str, implementation: Implementation) -> list[Subject]:
    """A prefill as it is called by default; where that waits for the host, with precomputed metadata too."""
    function = _function("conv_prefill", implementation)

    def bind(inputs: Inputs, *, ready: bool) -> Job:
        given = partial(function, metadata=metadata_of(inputs)) if ready else function
        bound = _Bound("conv_prefill", inputs, given, implementation)
        return Job(bound.call, bound.results)

    return _with_metadata(name, implementation, bind)


def _packed(name: str, implementation: Implementation) -> list[Subject]:
    """The packed prefill, or else a plain one for each part in its place."""
    if "packed_conv" in implementation.operations:
        function = _function("packed_conv", implementation)

        def packed(inputs: Inputs) -> Job:
            bound = _Bound("packed_conv", inputs, function, implementation)
            return Job(bound.call, bound.results)

        return [Subject(name, packed)]
    try:
        plain = _function("conv_prefill", implementation)
    except UnavailableError:
        implementation.variants("packed_conv")  # says why there is none
        raise

    def bind(inputs: Inputs, *, ready: bool) -> Job:
        given = partial(plain, metadata=metadata_of(inputs)) if ready else plain
        bound = [_Bound("conv_prefill", x, given, implementation) for x in _parts(inputs)]
        calls = [x.call for x in bound]
        out = torch.stack([x.results["out"] for x in bound])
        states = torch.cat([x.results["conv_states"] for x in bound], 1)
        return Job(lambda: [call() for call in calls], {"out": out, "conv_states": states})

    return _with_metadata(f"{name}: 3 plain calls", implementation, bind)


def _with_metadata(name: str, implementation: Implementation, bind: Callable[..., Job]) -> list[Subject]:
    if implementation.offered("conv_prefill").graphs:
        return [Subject(name, partial(bind, ready=False))]
    return [
        Subject(name, partial(bind, ready=False), graph=False),
        Subject(f"{name}, metadata", partial(bind, ready=True)),
    ]


def _parts(inputs: Inputs) -> list[Inputs]:
    """A packed prefill's q, k and v."""
    call, views = inputs.call, inputs.views
    assert isinstance(call, PackedConv)
    result = []
    for first in range(0, call.channels, call.part_dim):
        part = slice(first, first + call.part_dim)
        own = {"x": views["x"][:, part], "weight": views["weight"][part]}
        own["conv_states"] = views["conv_states"][:, part]
        result.append(Inputs(call.unpacked(), views | own))
    return result


class _Programs(dict[int, dict[str, Any]]):
    """For every block of tokens what vLLM prepares once a step: which program serves which chunk."""

    def __init__(self, lengths: tuple[int, ...], device: torch.device) -> None:
        super().__init__()
        self._lengths, self._device = lengths, device

    def __missing__(self, block: int) -> dict[str, Any]:
        counts = [-(-length // block) for length in self._lengths]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        chunks = [chunk for count in counts for chunk in range(count)]
        made: dict[str, Any] = {"tot": len(rows), "mlist": rows, "mlist_len": len(rows), "offsetlist": chunks}
        for key, values in (("batch_ptr", rows), ("token_chunk_offset_ptr", chunks)):
            made[key] = torch.tensor(values, dtype=torch.int32, device=self._device)
        self[block] = made
        return made


_USUAL_BLOCK = 8


def metadata_of(inputs: Inputs) -> types.SimpleNamespace:
    """Precomputed metadata as ``causal_conv1d_fn`` of vLLM takes it."""
    assert isinstance(inputs.call, ConvPrefill)
    programs = _Programs(inputs.call.qlens, inputs.views["x"].device)
    usual = programs[_USUAL_BLOCK]
    return types.SimpleNamespace(
        nums_dict=programs,
        batch_ptr=usual["batch_ptr"],
        token_chunk_offset_ptr=usual["token_chunk_offset_ptr"],
    )


# ---- Binding.


def _function(op: str, implementation: Implementation) -> Callable[..., object]:
    variants = implementation.variants(op)
    return variants[_record_layout(implementation)] if op == BY_RECORDS else variants[""]


def _record_layout(implementation: Implementation) -> str:
    """``row`` where an implementation takes it, else ``slot``."""
    return "row" if "row" in implementation.variants(BY_RECORDS) else "slot"


def _by_slot(inputs: Inputs) -> Inputs:
    """A verify's set with record rows at state slots."""
    call = msgspec.structs.replace(inputs.call, records="slot")
    specs, device = call.tensors(), inputs.views["state"].device
    own = {name: tensor(call, specs[name], device, 0) for name in ("correction", "key_gate")}
    return Inputs(call, inputs.views | own)


@dataclass
class _Log:
    """The last call that went through."""

    call: Any = None


@dataclass(frozen=True)
class _Watched:
    """Stands between a binding and what it calls, objects that it makes included."""

    _target: Any
    _log: _Log = field(default_factory=_Log)

    def __call__(self, *arguments: object, **named: object) -> Any:
        self._log.call = partial(self._target, *arguments, **named)
        result = self._log.call()
        plain = result is None or isinstance(result, bool | torch.Tensor)
        return result if plain else _Watched(result, self._log)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return _Watched(value, self._log) if callable(value) else value

    def __int__(self) -> int:
        return int(self._target)


class _Bound:
    """An operation called once through its binding, and how to call it again directly."""

    def __init__(
        self, op: str, inputs: Inputs, function: Callable[..., object], implementation: Implementation
    ) -> None:
        log = _Log()
        run = BINDINGS[op](inputs.call, inputs.views, _Watched(function, log), implementation)
        given = run()
        self.declined = isinstance(given, Launched) and given.declined
        if isinstance(given, Launched):
            given.check()
        self.call = log.call
        self.results = {name: x.clone() for name, x in (_left(inputs) | given).items()}


def _left(inputs: Inputs) -> Views:
    """What a call writes or must leave alone, of a set's own slots."""
    call, result = inputs.call, {}
    for name, spec in call.tensors().items():
        by_slot = isinstance(call, Verify) and call.records == "slot" and spec.axes[0] == "row"
        if spec.axes[0] == "slot" or (by_slot and spec.output):
            result[name] = inputs.views[name][list(call.slots)]
        elif spec.role == "output":
            result[name] = inputs.views[name]
    return result
