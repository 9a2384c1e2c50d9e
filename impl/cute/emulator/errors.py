"""What goes wrong in an emulated launch: each error names the PTX line, the CTA and the warp."""

from dataclasses import dataclass

KINDS = (
    "unsupported",  # an instruction, modifier or operand the emulator does not know
    "bounds",  # an access outside every allocation, shared memory or tensor memory
    "misaligned",  # an address that the access size does not divide
    "read-only",  # a store to memory the kernel may only read
    "race",  # two accesses to shared memory, one of them a write, that nothing orders
    "proxy",  # an async read of generic writes without a proxy fence in between
    "deadlock",  # nothing can move any more
    "barrier",  # misuse of a barrier or mbarrier: too many arrivals, none initialised
    "divergence",  # a warp collective without all of the warp's lanes
    "descriptor",  # a matrix or instruction descriptor that the hardware would not take
    "tensor-map",  # a tensor map or its coordinates that the hardware would not take
    "tensor-memory",  # allocation, lane quarter or ordering of tensor memory
    "wgmma",  # a warpgroup product without its fence
    "bulk",  # a bulk store that is not waited for before its CTA ends
    "trap",  # the kernel trapped
    "limit",  # more instructions than a launch may take
    "dependency",  # memory accessed before the kernels that the launch depends on are known to be done
)
"""The kinds of errors; the native engine reports a kind by its index."""


@dataclass
class EmulatorError(RuntimeError):
    """One error: its kind, what happened, and where (line 0: nowhere in particular)."""

    kind: str
    text: str
    line: int = 0
    source: str = ""
    cta: tuple[int, int, int] | None = None
    warp: int | None = None

    def __str__(self) -> str:
        where = f" at PTX line {self.line}: {self.source}" if self.line else ""
        who = f" (CTA {self.cta}, warp {self.warp})" if self.cta is not None else ""
        return f"{self.kind}: {self.text}{where}{who}"


def unsupported(what: str, line: int = 0, source: str = "") -> EmulatorError:
    """The refusal of something that the emulator does not know."""
    return EmulatorError("unsupported", what, line, source)
