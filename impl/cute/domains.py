"""What CuTe kernels of the contract take, ours and vLLM's (contract, section 1.7)."""

from impl.contract import Domain

ADDRESSED = ("state", "correction", "key_gate")
"""Tensors of commit that its kernel finds by address and leading stride."""


def domains(heads: tuple[int, ...], max_window: int = 8) -> dict[str, Domain]:
    """Per operation what is taken; ``heads`` are the counts of heads to draw."""
    windows = tuple(range(1, max_window + 1))
    fused = Domain(records=("row",), heads=heads, windows=windows, bounded_only=True)
    commit = Domain(
        head_dims=((128, 128),),
        heads=heads,
        windows=windows,
        activations=("bfloat16",),
        states=("bfloat16",),
        index_dtypes=("int32",),
        dense_inside=ADDRESSED,
        aligned=ADDRESSED,
        bounded_only=True,
    )
    serve = Domain(
        records=("row",),
        head_dims=((128, 128),),
        heads=heads,
        windows=windows,
        activations=("bfloat16",),
        states=("bfloat16",),
        aligned=ADDRESSED,
        bounded_only=True,
    )
    return {"fused_verify": fused, "commit": commit, "serve": serve}
