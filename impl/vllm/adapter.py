"""vLLM's shipped kernels as implementations."""

from collections.abc import Callable

from impl.contract import Implementation, UnavailableError
from impl.vllm.load import AbsentError, load
from impl.vllm.source import SourceError, resolve, split_flavour


def implementation(text: str) -> Implementation:
    """The kernels of a vLLM source: ``vllm``, ``vllm:PATH``, ``vllm@VERSION`` or ``vllm:REPO@REV``.

    ``UnavailableError`` says in one line why it cannot be had.
    """
    source_text, flavour = split_flavour(text)
    if flavour == "cute":
        raise UnavailableError(f"{text}: the CuTe kernels need the emulator device, which is not built yet")
    try:
        loaded = load(resolve(source_text))
    except SourceError as error:
        raise UnavailableError(f"{text}: {error}") from None
    operations: dict[str, Callable[..., object]] = {}
    absent: dict[str, str] = {}
    try:
        operations["verify"] = loaded.verify()
    except (AbsentError, SourceError) as error:
        absent["verify"] = str(error)
    return Implementation(
        name=text,
        version=loaded.source.version,
        operations=operations,
        arithmetic="sequential-fp32",
        absent=absent,
        path=lambda: "triton",
    )
