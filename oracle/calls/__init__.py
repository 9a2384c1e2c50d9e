"""The calls that a case can describe, one module per family; ``CALLS`` lists them by operation."""

from oracle.calls.commit import Commit
from oracle.calls.conv import ConvPrefill, ConvUpdate, PackedConv
from oracle.calls.fused_verify import FusedVerify
from oracle.calls.serve import Serve
from oracle.calls.verify import Verify

AnyCall = Verify | ConvUpdate | ConvPrefill | PackedConv | Commit | FusedVerify | Serve

CALLS = {
    "verify": Verify,
    "conv_update": ConvUpdate,
    "conv_prefill": ConvPrefill,
    "packed_conv": PackedConv,
    "commit": Commit,
    "fused_verify": FusedVerify,
    "serve": Serve,
}
"""Per operation, as ``--op`` names it, the struct that describes a call of it."""
