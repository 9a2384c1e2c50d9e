"""vLLM's shipped kernels as implementations."""

from collections.abc import Callable
from dataclasses import replace

from impl.contract import Domain, Implementation, UnavailableError
from impl.vllm.load import AbsentError, LoadedVllm, RecordLayout, load
from impl.vllm.source import SourceError, resolve, split_flavour


def implementation(text: str) -> Implementation:
    """The kernels of a vLLM source: ``vllm``, ``vllm:PATH``, ``vllm@VERSION`` or ``vllm:REPO@REV``.

    With ``:cute`` behind it, they are the CuTe kernels. ``UnavailableError`` says in one line why it
    cannot be had.
    """
    source_text, flavour = split_flavour(text)
    try:
        loaded = load(resolve(source_text))
    except SourceError as error:
        raise UnavailableError(f"{text}: {error}") from None
    triton = _triton(source_text, loaded)
    if flavour == "cute":
        from impl.vllm.cute import implementation as cute

        return cute(text, loaded, triton)
    return triton


def _triton(text: str, loaded: LoadedVllm) -> Implementation:
    """A source's Triton kernels."""
    operations: dict[str, Callable[..., object]] = {}
    absent: dict[str, str] = {}
    for operation, find in _finders(loaded).items():
        try:
            operations[operation] = find()
        except (AbsentError, SourceError) as error:
            absent[operation] = str(error)
    layout: tuple[RecordLayout, ...] = (loaded.record_layout(),) if "verify" in operations else ("row",)
    return Implementation(
        name=text,
        version=loaded.source.version,
        operations=operations,
        arithmetic="sequential-fp32",
        domain=Domain(records=layout),
        domains={"conv_update": _CONVOLUTIONS, "conv_prefill": replace(_CONVOLUTIONS, graphs=False)},
        absent=absent,
        path=lambda: "triton",
        set_conv_state_dim_first=loaded.set_conv_state_dim_first,
    )


_CONVOLUTIONS = Domain(
    dense=("query_start_loc", "num_accepted_tokens", "has_initial_state", "bias"), pad_slots=False
)
"""Contract, section 1.5: shipped convolutions read these as contiguous, and slot 0 alone is null.

Without precomputed metadata the prefill waits for the lengths on the host.
"""


def _finders(loaded: LoadedVllm) -> dict[str, Callable[[], Callable[..., object]]]:
    """Per operation, what looks its callable up."""
    return {
        "verify": lambda: _verify(loaded),
        "conv_update": lambda: loaded.conv_function("causal_conv1d_update"),
        "conv_prefill": lambda: loaded.conv_function("causal_conv1d_fn"),
        "packed_conv": loaded.packed_conv_function,
        "commit": loaded.commit_context,
    }


def _verify(loaded: LoadedVllm) -> Callable[..., object]:
    """The source's verify; absent if its record layout is none that we know."""
    loaded.record_layout()
    return loaded.verify()
