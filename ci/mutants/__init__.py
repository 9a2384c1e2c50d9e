"""``kdafuzz mutants``: plants many small faults in kernels and counts which of them the suite finds."""

import importlib.util

from impl.contract import UnavailableError


def require_libcst() -> None:
    """Raise ``UnavailableError`` where the syntax trees cannot be had that mutants are made of."""
    if importlib.util.find_spec("libcst") is None:
        raise UnavailableError("kdafuzz mutants needs libcst; install kdafuzz[mutants]")
