"""The CuTe kernels' host side: what can be used, which kernel a call takes, what is refused or declined."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from impl.contract import Records, UnavailableError
from impl.cute import compile as kernels
from impl.cute import host
from impl.cute.host import CuteRecoverSSMVerify, can_use_cute_recoverssm

H, Q, K, N, T, SLOTS = 2, 4, 128, 3, 7, 5
C = 3 * H * K
BF16 = torch.bfloat16

LAYER: dict[str, Any] = {
    "head_dim": 128,
    "window": 4,
    "conv_width": 4,
    "has_conv_bias": False,
    "activation_dtype": BF16,
    "conv_state_dtype": BF16,
    "state_dtype": BF16,
    "conv_weight_dtype": torch.float32,
    "lower_bound": -5.0,
}
UNFIT: list[tuple[dict[str, Any], str]] = [
    ({"head_dim": 64}, "head_dim 128"),
    ({"conv_width": 3}, "4 taps"),
    ({"has_conv_bias": True}, "without bias"),
    ({"window": 0}, "1 to 8"),
    ({"window": 9}, "1 to 8"),
    ({"lower_bound": None}, "lower bound"),
    ({"activation_dtype": torch.float16}, "bfloat16 activations"),
    ({"conv_state_dtype": torch.float32}, "bfloat16 activations"),
    ({"state_dtype": torch.float32}, "bfloat16 activations"),
    ({"conv_weight_dtype": torch.float16}, "convolution weight"),
]


@pytest.fixture(params=[(9, 0), (10, 3), (8, 0), (12, 0), None])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int] | None:
    """A machine with a GPU of that kind, or none."""
    found: tuple[int, int] | None = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found)
    return found


def test_the_gpu_is_asked_first(capability: tuple[int, int] | None) -> None:
    fits = capability is not None and capability[0] in (9, 10)
    assert can_use_cute_recoverssm(**LAYER)[0] == fits
    usable, reason = can_use_cute_recoverssm(**LAYER | {"head_dim": 64, "lower_bound": None})
    assert not usable
    assert reason is not None
    assert ("SM90 or SM10x" in reason) != fits


def test_a_gpu_names_its_architecture(capability: tuple[int, int] | None) -> None:
    if capability is None:
        return
    if capability[0] not in (9, 10):
        with pytest.raises(UnavailableError, match="SM90 or SM10x"):
            kernels.architecture(torch.device("cuda"))
        return
    wanted = "".join(map(str, capability))
    assert kernels.architecture(torch.device("cuda")) == f"sm_{wanted}a"


@pytest.mark.parametrize(("change", "text"), UNFIT)
def test_the_first_failing_test_gives_the_reason(
    change: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    assert can_use_cute_recoverssm(**LAYER) == (True, None)
    usable, reason = can_use_cute_recoverssm(**LAYER | change)
    assert not usable
    assert reason is not None
    assert text in reason
    later = [c for c, _ in UNFIT[UNFIT.index((change, text)) + 1 :] if c.keys().isdisjoint(change)]
    for other in later:
        assert can_use_cute_recoverssm(**LAYER | other | change) == (False, reason)


@pytest.mark.parametrize(
    ("rows", "heads", "wanted"),
    [(4, 16, 1), (64, 16, 1), (256, 16, 2), (1024, 16, 4), (99999, 16, 8), (99999, 12, 6), (4096, 3, 3)],
)
def test_ctas_take_more_heads_as_work_grows(
    rows: int, heads: int, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of 132 SMs; ``rows`` are rows times layers."""
    monkeypatch.setattr(host, "_processors", lambda _: 132)
    assert host._heads_per_cta(rows, heads, torch.device("cuda")) == wanted


@dataclass
class Launches:
    """Stands in for compiled kernels: what was compiled, and called with what."""

    compiled: list[str] = field(default_factory=list)
    calls: list[tuple[str, tuple[object, ...]]] = field(default_factory=list)

    def function(self, wanted: kernels.Variant, device_type: str) -> Callable[..., None]:
        """A kernel that only notes its calls."""
        self.compiled.append(wanted.name)
        return lambda *arguments: self.calls.append((wanted.kernel, arguments))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(host, "function", found.function)
    monkeypatch.setenv(kernels.ARCHITECTURE_VARIABLE, "sm_100a")
    return found


def at(*shape: int, dtype: torch.dtype = BF16, offset: int = 0, pad: int = 0) -> torch.Tensor:
    """Zeros that start ``offset`` elements past an aligned address, rows ``pad`` elements apart."""
    inner = torch.Size(shape[1:]).numel()
    flat = torch.zeros(shape[0] * (inner + pad) + 64 + offset, dtype=dtype)
    first = -flat.data_ptr() % 64 // flat.element_size() + offset
    rows = flat[first : first + shape[0] * (inner + pad)].view(shape[0], -1)
    found: torch.Tensor = rows[:, :inner].unflatten(1, shape[1:])
    return found


def tensors(*, dim_first: bool = True) -> dict[str, Any]:
    """A call that the warp-specialised kernel takes, if conv rows are stored dim-first."""
    return {
        "mixed_qkv": at(T, C),
        "raw_gate": at(T, H * K),
        "raw_beta": at(T, H),
        "A_log": at(H, 1, dtype=torch.float32)[:, 0],
        "dt_bias": at(1, H * K, dtype=torch.float32)[0],
        "lower_bound": -5.0,
        "state": at(SLOTS, H, K, K),
        "records": Records(at(N, H, Q, K, dtype=torch.float32), at(N, H, Q, 2 * K)),
        "query_start_loc": vector(N + 1),
        "state_indices": vector(N),
        "num_accepted_tokens": vector(N),
        "conv_state": at(SLOTS, C, Q + 2) if dim_first else at(SLOTS, Q + 2, C),
        "conv_weight": at(C, 4, dtype=torch.float32),
        "out": at(T, H * K),
    }


def vector(size: int, offset: int = 0) -> torch.Tensor:
    return at(1, size, dtype=torch.int32, offset=offset)[0]


def verify(launches: Launches, *, dim_first: bool = True) -> CuteRecoverSSMVerify:
    made = CuteRecoverSSMVerify(
        num_heads=H,
        window=Q,
        conv_dim_first=dim_first,
        conv_weight_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    made.compile()
    return made


def test_every_kernel_a_call_may_take_is_compiled(launches: Launches) -> None:
    made = verify(launches)
    assert launches.compiled == ["verify_sm_100a_q4_f32_taps", "verify_ws_sm_100a_q4_f32_taps"]
    assert (made.num_heads, made.window, made.conv_dim_first) == (H, Q, True)
    assert made.counter.dtype == torch.int32
    assert made.counter.tolist() == [0]
    launches.compiled.clear()
    verify(launches, dim_first=False)
    assert launches.compiled == ["verify_sm_100a_q4_token_major_f32_taps"]


PATHS: list[tuple[str, dict[str, Any], str]] = [
    ("all aligned", {}, "verify_ws"),
    ("rows of qkv", {"mixed_qkv": at(T, C, pad=4)}, "verify"),
    ("padded rows of qkv", {"mixed_qkv": at(T, C, pad=8)}, "verify_ws"),
    ("rows of gates", {"raw_gate": at(T, H * K, pad=12)}, "verify"),
    ("padded taps", {"conv_weight": at(C, 4, dtype=torch.float32, pad=4)}, "verify"),
    ("padded conv rows", {"conv_state": at(SLOTS, C, Q + 3)[:, :, : Q + 2]}, "verify"),
    ("conv slots", {"conv_state": at(SLOTS, C, Q + 2, pad=4)}, "verify"),
    ("rows of beta and out", {"raw_beta": at(T, H, pad=1), "out": at(T, H * K, pad=3)}, "verify_ws"),
    ("qkv's start", {"mixed_qkv": at(T, C, offset=4)}, ""),
    ("gate's start", {"raw_gate": at(T, H * K, offset=1)}, ""),
    ("beta's start", {"raw_beta": at(T, H, offset=2)}, ""),
    ("out's start", {"out": at(T, H * K, offset=4)}, ""),
    ("starts", {"query_start_loc": vector(N + 1, 2)}, ""),
    ("slots", {"state_indices": vector(N, 1)}, ""),
    ("accepted counts", {"num_accepted_tokens": vector(N, 3)}, ""),
    ("strided slots", {"state_indices": vector(2 * N)[::2]}, ""),
    ("strided counts", {"num_accepted_tokens": vector(2 * N)[::2]}, ""),
]


@pytest.mark.parametrize(("change", "kernel"), [x[1:] for x in PATHS], ids=[x[0] for x in PATHS])
def test_a_call_takes_one_of_three_ways(change: dict[str, Any], kernel: str, launches: Launches) -> None:
    """Warp-specialised, plain, or declined without a launch."""
    made, given = verify(launches), tensors() | change
    assert made(**given) is bool(kernel)
    assert [name for name, _ in launches.calls] == ([kernel] if kernel else [])


def test_arguments_come_in_the_kernels_order(launches: Launches) -> None:
    made, given = verify(launches, dim_first=False), tensors(dim_first=False)
    assert made(**given)
    ((kernel, arguments),) = launches.calls
    records = given.pop("records")
    named = {**given, "correction": records.correction, "key_gate": records.key_gate}
    wanted = {**named, "counter": made.counter, "ctas": 3}
    for name, found in zip(kernels.KERNELS[kernel].arguments, arguments, strict=True):
        if isinstance(found, torch.Tensor):
            assert (found.data_ptr(), found.shape) == (wanted[name].data_ptr(), wanted[name].shape), name
        else:
            assert found == wanted[name], name


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("heads apart", {"state": at(SLOTS, H, K, K + 8)[..., :K]}, "dense heads"),
    ("slots apart", {"state": at(SLOTS, H, K, K, pad=4)}, "dense heads"),
    ("state's start", {"state": at(SLOTS, H, K, K, offset=4)}, "on 16 bytes"),
    ("A_log's start", {"A_log": at(1, H, dtype=torch.float32, offset=1)[0]}, "on 16 bytes"),
    ("bias's start", {"dt_bias": at(1, H * K, dtype=torch.float32, offset=2)[0]}, "on 16 bytes"),
    ("conv state's start", {"conv_state": at(SLOTS, C, Q + 2, offset=1)}, "on 16 bytes"),
    ("weight's start", {"conv_weight": at(C, 4, dtype=torch.float32, offset=3)}, "on 16 bytes"),
    (
        "records' start",
        {"records": Records(at(N, H, Q, K, dtype=torch.float32), at(N, H, Q, 2 * K, offset=2))},
        "on 16 bytes",
    ),
]


@pytest.mark.parametrize(("change", "text"), [x[1:] for x in REFUSED], ids=[x[0] for x in REFUSED])
def test_static_tensors_off_their_layout_are_an_error(
    change: dict[str, Any], text: str, launches: Launches
) -> None:
    """Before a call is declined, and again at each call; the good ones are remembered."""
    made = verify(launches)
    for given in (tensors() | change, tensors() | change | {"out": at(T, H * K, offset=4)}):
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                made(**given)
    assert made(**tensors())
    assert len(launches.calls) == 1


def test_nothing_to_do_is_done_at_once(launches: Launches) -> None:
    made, given = verify(launches), tensors()
    empty = {name: given[name][:0] for name in ("state_indices", "num_accepted_tokens")}
    assert made(**given | empty | {"query_start_loc": given["query_start_loc"][:1]})
    assert made(**given | {name: given[name][:0] for name in ("mixed_qkv", "raw_gate", "raw_beta", "out")})
    assert launches.calls == []


def test_a_call_before_compile_says_so() -> None:
    made = CuteRecoverSSMVerify(
        num_heads=H,
        window=Q,
        conv_dim_first=True,
        conv_weight_dtype=BF16,
        device=torch.device("cpu"),
    )
    with pytest.raises(RuntimeError, match=r"call compile\(\) once"):
        made(**tensors())


def test_variants_are_named_by_what_they_are() -> None:
    found = kernels.variant("commit", "sm_90a", 4, align=True, by_slot=False)
    assert found == kernels.variant("commit", "sm_90a", 4, by_slot=False, align=True)
    assert (found.name, found["align"], found["by_slot"]) == ("commit_sm_90a_q4_align", True, False)
    with pytest.raises(ValueError, match="window of 1 to 8"):
        kernels.variant("commit", "sm_90a", 9, by_slot=False, align=True)
    with pytest.raises(ValueError, match="needs the options"):
        kernels.variant("commit", "sm_90a", 4, by_slot=False)
    names = [x.name for kernel in kernels.KERNELS for x in kernels.variants(kernel, "sm_90a", range(1, 9))]
    assert len(names) == len(set(names)) == 8 * (4 + 4 + 2)


def test_an_unknown_architecture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(kernels.ARCHITECTURE_VARIABLE, "sm_80")
    with pytest.raises(UnavailableError, match="sm_90a or sm_100a"):
        kernels.architecture(torch.device("cpu"))
