"""Which dtypes come together in a call: the arithmetic of a kernel hangs on all of them."""

from itertools import product

from oracle.calls import AnyCall

_NARROW = ("float32", "bfloat16")
_ACTIVATIONS = (*_NARROW, "float16")
_FIELDS: dict[str, dict[str, tuple[str, ...]]] = {
    "verify": {"activation": _ACTIVATIONS, "state": _NARROW},
    "conv_update": {"activation": _ACTIVATIONS, "conv": _NARROW, "taps": _NARROW},
    "conv_prefill": {"activation": _ACTIVATIONS, "conv": _NARROW, "taps": _NARROW},
    "packed_conv": {"activation": _ACTIVATIONS, "conv": ("float32",), "taps": ("float32",)},
    "commit": {"activation": _ACTIVATIONS, "state": _NARROW, "conv": _NARROW},
    "fused_verify": {"taps": _NARROW},
    "serve": {"activation": _ACTIVATIONS, "state": _NARROW, "conv": _NARROW},
}
"""Per operation, the fields that its arithmetic hangs on, and what strategies draw of them."""
_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def combination(call: AnyCall) -> str:
    """The dtypes of a call, such as ``activation bf16, state fp32``."""
    fields = _FIELDS[str(call.__struct_config__.tag)]
    return ", ".join(f"{field} {_SHORT[getattr(call, field)]}" for field in fields)


def combinations(op: str) -> list[str]:
    """Every combination that there is for an operation."""
    fields = _FIELDS[op]
    return [
        ", ".join(f"{field} {_SHORT[dtype]}" for field, dtype in zip(fields, chosen, strict=True))
        for chosen in product(*fields.values())
    ]
