"""The CuTe kernels' public functions (contract 1.7): what fits them, compiling, checking, launching.

Nothing here needs the DSL: kernels come from ``impl.cute.compile``. On CPU tensors they are
emulated. Compile before a CUDA graph is captured: launching a variant for the first time compiles it.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from impl.cute.compile import KERNELS, MAX_WINDOW, Variant, architecture, function, variant

K = 128
"""Key and value channels of a head."""
CONV_WIDTH = 4
_ALIGNMENT = 16
_MOST_HEADS = 8
"""Heads that a CTA of commit folds."""
_END_TO_START = 6
"""What a head more at a commit's end costs, in units of a CTA's start that the others do not hide."""

Launch = Callable[..., None]


def can_use_cute_recoverssm(
    *,
    head_dim: int,
    window: int,
    conv_width: int,
    has_conv_bias: bool,
    activation_dtype: torch.dtype,
    conv_state_dtype: torch.dtype,
    state_dtype: torch.dtype,
    conv_weight_dtype: torch.dtype,
    lower_bound: float | None,
) -> tuple[bool, str | None]:
    """Whether the kernels serve a layer of this kind on the current GPU; if not, the first reason."""
    gpu = torch.cuda.get_device_capability()[0] if torch.cuda.is_available() else 0
    reasons = (
        (gpu not in (9, 10), "CuTe kernels need an SM90 or SM10x GPU"),
        (
            head_dim != K or conv_width != CONV_WIDTH,
            f"CuTe kernels need head_dim {K} and a convolution of {CONV_WIDTH} taps",
        ),
        (has_conv_bias, "CuTe kernels need a convolution without bias"),
        (not 1 <= window <= MAX_WINDOW, f"CuTe kernels need a window of 1 to {MAX_WINDOW} tokens"),
        (lower_bound is None, "CuTe kernels need a gate with a lower bound"),
        (
            {activation_dtype, conv_state_dtype, state_dtype} != {torch.bfloat16},
            "CuTe kernels need bfloat16 activations, conv state and SSM state",
        ),
        (
            conv_weight_dtype not in (torch.bfloat16, torch.float32),
            "CuTe kernels need a bfloat16 or float32 convolution weight",
        ),
    )
    reason = next((text for fails, text in reasons if fails), None)
    return reason is None, reason


# ---- Commit.


def compile_state_commit(
    num_heads: int, window: int, device: torch.device, align: bool, *, by_slot: bool = False
) -> None:
    """Compile the fold; one variant serves any ``num_heads``.

    ``by_slot``: records lie at state slots, not at batch rows. ``ValueError``: no such window;
    ``UnavailableError``: no kernel for this device.
    """
    _commit_kernel(window, torch.device(device), align, by_slot)


def cute_recoverssm_commit(context: Any, state_indices: torch.Tensor, batch: int, align: bool) -> None:
    """Fold the accepted tokens of a finished plan into the state of every layer, in one launch.

    ``context`` is a ``KDARecoverSSMCommitContext`` whose plan holds ``batch`` rows; state_indices
    ``[N]`` int32. Boundary slots are written only if ``align``. ``ValueError`` for what the
    kernel does not take: see ``check_commit``.
    """
    if batch == 0:
        return
    if state_indices.dtype != torch.int32:
        raise ValueError(
            f"KDA commit needs int32 state_indices for the CuTe fold; found {state_indices.dtype}"
        )
    prepared = _PREPARED.get(context)
    if prepared is None:
        check_commit(context)
        prepared = _PREPARED[context] = _Prepared(context)
    prepared.launch(state_indices, batch, align)


def check_commit(context: Any) -> None:
    """Raise ``ValueError`` where the fold does not serve a context.

    It needs K = V = 128, a window of 1 to 8, a lower bound, bf16 states and key/gate records, dense state
    and record rows, and addresses and leading strides on multiples of 16 bytes.
    """
    window, state = context.spec_query_len, context.checkpoints[0]
    if state.shape[2:] != (K, K) or not 1 <= window <= MAX_WINDOW:
        raise ValueError(
            f"KDA commit needs states of {K} x {K} and a window of 1 to {MAX_WINDOW} for the CuTe fold; "
            f"found {tuple(state.shape[2:])} and {window}"
        )
    if context.lower_bound is None:
        raise ValueError("KDA commit needs a gate with a lower bound for the CuTe fold; found none")
    for name, tensors, dtype in (
        ("state", context.checkpoints, torch.bfloat16),
        ("correction record", context.correction_caches, torch.float32),
        ("key/gate record", context.kg_caches, torch.bfloat16),
    ):
        for x in tensors:
            if x.dtype != dtype or not _dense_inside(x):
                raise ValueError(
                    f"KDA commit needs {name}s of {dtype} with dense rows, {_ALIGNMENT}-byte aligned, for "
                    f"the CuTe fold; found {x.dtype} {tuple(x.shape)}, strides {x.stride()}, "
                    f"at {x.data_ptr():#x}"
                )


class _Prepared:
    """What launches on one context share. Holds no reference to the context."""

    def __init__(self, context: Any) -> None:
        self.tables = (
            context.state_base_addrs,
            context.state_block_strides,
            context.correction_cache_base_addrs,
            context.correction_cache_block_strides,
            context.kg_cache_base_addrs,
            context.kg_cache_block_strides,
            context.A_log,
            context.dt_bias,
        )
        self.plan = (
            context.commit_lens,
            context.final_state_indices,
            context.boundary_state_indices,
            context.boundary_recovery_lens,
        )
        self.window, self.lower_bound = context.spec_query_len, float(context.lower_bound)
        self.by_slot = bool(getattr(context, "by_slot", False))
        self.device = context.checkpoints[0].device
        self.shape = len(context.checkpoints), context.checkpoints[0].shape[1]
        self.kernels: dict[bool, Launch] = {}
        self.rows, self.views = 0, self.plan
        self.memory = () if self.device.type == "cuda" else tuple(_addressed(context))

    def launch(self, slots: torch.Tensor, rows: int, align: bool) -> None:
        kernel = self.kernels.get(align)
        if kernel is None:
            kernel = _commit_kernel(self.window, self.device, align, self.by_slot)
            self.kernels[align] = kernel
        if rows != self.rows:
            self.rows, self.views = rows, tuple(each[:rows] for each in self.plan)
        layers, heads = self.shape
        with _emulated_memory(self.memory) if self.memory else nullcontext():
            kernel(
                *self.tables,
                slots if slots.shape[0] == rows else slots[:rows],
                *self.views,
                self.lower_bound,
                _heads_per_cta(layers * rows, heads, self.device),
            )


def _addressed(context: Any) -> Iterator[Any]:
    """For the emulator: the memory that the kernel finds by address."""
    from impl.cute.emulator.compiled import allocation

    for name, tensors in (
        ("state", context.checkpoints),
        ("correction", context.correction_caches),
        ("key_gate", context.kg_caches),
    ):
        for layer, x in enumerate(tensors):
            yield allocation(f"{name}.{layer}", x, writable=name == "state")


def _emulated_memory(memory: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """Let kernels access this memory, unless someone has said already what they may access."""
    from impl.cute.emulator import settings

    known = settings.current().allocations
    return settings.using(allocations=known or memory)


_PREPARED: WeakKeyDictionary[Any, _Prepared] = WeakKeyDictionary()
"""Contexts whose layout has been checked."""


def _commit_kernel(window: int, device: torch.device, align: bool, by_slot: bool) -> Launch:
    wanted = variant("commit", architecture(device), window, by_slot=by_slot, align=align)
    return function(wanted, device.type)


def _heads_per_cta(items: int, heads: int, device: torch.device) -> int:
    """Heads that a CTA folds one after the other; bits do not depend on it.

    Starting a CTA costs in proportion to their number, so as 1 / heads; SMs that idle at the end cost
    as heads / (all heads an SM). The sum is least at a square root.
    """
    if device.type != "cuda":
        return min(heads, _emulated_ctas())
    best = math.isqrt(items * heads // (_processors(device) * _END_TO_START))
    parts = -(-heads // max(1, min(best, heads, _MOST_HEADS)))
    return -(-heads // parts)


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _dense_inside(x: torch.Tensor) -> bool:
    """Whether rows are contiguous, and start on the alignment of bulk copies."""
    step = x.stride(0) * x.element_size() if x.shape[0] > 1 else 0
    return x[:1].is_contiguous() and x.data_ptr() % _ALIGNMENT == 0 and step % _ALIGNMENT == 0


# ---- Verify.


class CuteRecoverSSMVerify:
    """The fused verify of layers of one shape: convolution, roll and verify in one launch."""

    def __init__(
        self,
        *,
        num_heads: int,
        window: int,
        conv_dim_first: bool,
        conv_weight_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_heads = num_heads
        self.window = window
        self.conv_dim_first = conv_dim_first
        self.conv_weight_dtype = conv_weight_dtype
        self.device = torch.device(device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        """Tickets taken of a launch's work; 0 between launches."""
        self.path = ""
        """The kernel of the last launch: plain, warp-specialised, or nothing."""
        self._compiled: dict[bool, tuple[Launch, int]] = {}
        self._checked: set[tuple[Any, ...]] = set()

    def compile(self) -> None:
        """Compile the kernels that calls may choose from; before a graph is captured.

        ``UnavailableError``: no kernel for this device. ``ValueError``: no such window.
        """
        f32_taps = self.conv_weight_dtype == torch.float32
        arch = architecture(self.device)
        found = {
            False: variant(
                "verify", arch, self.window, token_major=not self.conv_dim_first, f32_taps=f32_taps
            )
        }
        if self.conv_dim_first:
            found[True] = variant("verify_ws", arch, self.window, f32_taps=f32_taps)
        self._compiled = {
            special: (function(each, self.device.type), _most_ctas(each, self.device))
            for special, each in found.items()
        }

    def __call__(
        self,
        *,
        mixed_qkv: torch.Tensor,
        raw_gate: torch.Tensor,
        raw_beta: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float,
        state: torch.Tensor,
        records: Any,
        query_start_loc: torch.Tensor,
        state_indices: torch.Tensor,
        num_accepted_tokens: torch.Tensor,
        conv_state: torch.Tensor,
        conv_weight: torch.Tensor,
        out: torch.Tensor,
    ) -> bool:
        """Verify N rows; False, with nothing written, if a tensor of the step is not aligned to 16 bytes.

        mixed_qkv ``[T, 3HK]``, raw_gate ``[T, HK]``, raw_beta ``[T, H]`` (logits), out ``[T, HV]``,
        state ``[S, H, V, K]``, conv_state ``[S, 3HK, Q+2]`` or ``[S, Q+2, 3HK]`` as stored,
        conv_weight ``[3HK, 4]``; records as ``KDARecoverSSMRecords``; index vectors int32.
        ``ValueError`` for state, records or parameters of a layout that the kernels do not take.
        ``RuntimeError`` before ``compile``.
        """
        if not self._compiled:
            raise RuntimeError("the fused verify is not compiled; call compile() once before the first call")
        static = (state, A_log, dt_bias, records.correction, records.key_gate, conv_state, conv_weight)
        self._check_static(static)
        index = (query_start_loc, state_indices, num_accepted_tokens)
        rows, tokens = state_indices.shape[0], mixed_qkv.shape[0]
        if rows == 0 or tokens == 0:
            return True
        dense = all(x.stride(0) == 1 or x.shape[0] == 1 for x in index)
        if not (dense and _aligned(mixed_qkv, raw_gate, raw_beta, out, *index)):
            return False
        special = self.conv_dim_first and _copies_in_bulk(
            mixed_qkv, raw_gate, conv_state, conv_weight, self.window + CONV_WIDTH - 2
        )
        launch, ctas = self._compiled[special]
        launch(
            mixed_qkv,
            raw_gate,
            raw_beta,
            A_log,
            dt_bias.flatten(),
            state,
            records.correction,
            records.key_gate,
            out,
            query_start_loc,
            state_indices,
            conv_state,
            conv_weight,
            num_accepted_tokens,
            self.counter,
            float(lower_bound),
            ctas or _emulated_ctas(),
        )
        self.path = "warp-specialised" if special else "plain"
        return True

    def _check_static(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Layouts of what stays in place from step to step; each is checked once."""
        key = tuple((x.data_ptr(), x.stride()) for x in tensors)
        if key in self._checked:
            return
        state = tensors[0]
        if state.stride()[1:] != (K * K, K, 1) or state.stride(0) * state.element_size() % _ALIGNMENT:
            raise ValueError(
                f"the fused verify needs states of dense heads, {_ALIGNMENT}-byte aligned slots apart; "
                f"found strides {state.stride()}"
            )
        if not _aligned(*tensors):
            raise ValueError(
                f"the fused verify needs state, conv state, records and parameters on {_ALIGNMENT} bytes; "
                f"found addresses {[hex(x.data_ptr()) for x in tensors]}"
            )
        self._checked.add(key)


def _aligned(*tensors: torch.Tensor) -> bool:
    return all(x.data_ptr() % _ALIGNMENT == 0 for x in tensors)


def _copies_in_bulk(
    qkv: torch.Tensor, gate: torch.Tensor, conv_state: torch.Tensor, weight: torch.Tensor, columns: int
) -> bool:
    """Whether the rows that the warp-specialised kernel copies are whole multiples of 16 bytes."""
    return (
        qkv.stride(0) % 8 == 0
        and gate.stride(0) % 8 == 0
        and weight.stride() == (CONV_WIDTH, 1)
        and conv_state.stride()[1:] == (columns, 1)
        and conv_state.stride(0) * conv_state.element_size() % _ALIGNMENT == 0
    )


def _most_ctas(wanted: Variant, device: torch.device) -> int:
    """Persistent CTAs that a GPU holds at once; 0 on the emulator, whose settings say it at the call."""
    if device.type != "cuda":
        return 0
    return _processors(device) * KERNELS[wanted.kernel].ctas_per_sm[wanted.window - 1]


def _emulated_ctas() -> int:
    from impl.cute.emulator import settings

    return settings.current().ctas
