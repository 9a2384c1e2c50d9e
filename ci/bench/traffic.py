"""How many bytes a call must move between a GPU's memory and its SMs: the floor under its time.

Every input element is read once and every output element written once; what a kernel reads again,
or writes and reads back in between, does not count. With N rows of Q tokens (T = N Q), H heads of K
key and V value channels, C = 3 H K convolution channels, W = 4 taps; b, f and i are the bytes of bf16, fp32
and int32, 2, 4 and 4:

verify        read    state N H K V b;  q, k, gate 3 T H K b;  v T H V b;  beta T H b
              write   corrections T H V f;  keys and gates T 2 H K b;  out T H V b
conv_update   read    x T C b;  history N C (W-1) b;  taps C W b
              write   out T C b;  the rolled row N C (W-2+Q) b, new in every column
fused_verify  read    what update reads;  state, gate, beta;  write  the rolled row; corrections, records, out
              (q, k and v after the convolution need never leave the SM)
commit        per layer: read and write the state 2 N H K V b;  read corrections T H V f, keys and gates
              T 2 H K b;  move the history 2 N C (W-1) b, unless one token was accepted: it stays then
              once: write the plan 4 N i
its fold      per layer the state, corrections, keys and gates; once: read slots and plan 5 N i
prefills      x and out 2 T C b;  taps C W f;  history of those that continue, and of all R sequences
              the new one, C (W-1) f each
all           parameters A_log H f and dt_bias H K f of each layer;  the index vectors
"""

from math import prod

from oracle.calls import AnyCall
from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.verify import Verify
from oracle.layout import DTYPES, TensorSpec

BF16, F32, I32 = 2, 4, 4


def moved(call: AnyCall) -> int:
    """Bytes of a call whose rows are all live and full, and accept all their tokens."""
    match call:
        case Verify():
            return _state(call) + _tokens_of_verify(call) + _indices(call) + _parameters(call.heads)
        case FusedVerify():
            rows = _history(call.rows, call.channels) + _rolled(call.rows, call.channels, call.window)
            H, T = call.heads, call.tokens
            tokens = T * H * (3 * 128 + 128 + 1) * BF16 + T * H * (128 * F32 + 2 * 128 * BF16 + 128 * BF16)
            taps = call.channels * 4 * DTYPES[call.taps].itemsize
            return _state(call) + rows + tokens + taps + _indices(call) + _parameters(H)
        case ConvUpdate():
            rows = _history(call.rows, call.channels) + _rolled(call.rows, call.channels, call.window)
            taps = call.channels * call.width * BF16
            return 2 * call.tokens * call.channels * BF16 + rows + taps + _indices(call)
        case Commit():
            shifted = 2 * _history(call.rows, call.channels) if call.window > 1 else 0
            plan = 4 * call.rows * I32
            return call.layers * (_folded(call) + shifted) + plan + _indices(call)
        case ConvPrefill():
            C, columns = call.channels, call.width - 1
            stored = (sum(call.initial) + call.rows) * C * columns * F32
            return 2 * call.tokens * C * BF16 + stored + C * call.width * F32 + _indices(call)
    raise ValueError(f"nobody counted the bytes of {type(call).__name__}")


def moved_by_fold(call: AnyCall) -> int:
    """Bytes of the fold of a commit alone, which finds its plan made."""
    assert isinstance(call, Commit)
    return call.layers * _folded(call) + 5 * call.rows * I32


def _state(call: Verify | FusedVerify | Commit) -> int:
    return call.rows * call.heads * call.key_dim * call.value_dim * BF16


def _tokens_of_verify(call: Verify) -> int:
    K, V = call.key_dim, call.value_dim
    read = (3 * K + V + 1) * BF16
    return call.tokens * call.heads * (read + V * F32 + 2 * K * BF16 + V * BF16)


def _history(rows: int, channels: int) -> int:
    return rows * channels * 3 * BF16


def _rolled(rows: int, channels: int, window: int) -> int:
    return rows * channels * (2 + window) * BF16


def _folded(call: Commit) -> int:
    records = call.tokens * call.heads * (call.value_dim * F32 + 2 * call.key_dim * BF16)
    return 2 * _state(call) + records + _parameters(call.heads)


def _parameters(heads: int) -> int:
    return heads * (1 + 128) * F32


def _indices(call: AnyCall) -> int:
    return sum(_bytes(spec) for spec in call.tensors().values() if spec.role == "index")


def _bytes(spec: TensorSpec) -> int:
    return prod(spec.shape) * DTYPES[spec.dtype].itemsize
