"""How ``kdafuzz bisect-step`` ends where it gives no verdict."""

import sys
import traceback
from typing import Any

import click

from ci.processes import TerminatedError
from impl.contract import UnavailableError, one_line
from oracle.codec import CaseError

BROKEN = 255
"""The suite, or how it was called, is at fault: ``git bisect run`` stops there."""


class StepCommand(click.Command):
    """A command whose every error is exit 255: to ``git bisect run`` a smaller number is a verdict."""

    def make_context(self, *given: Any, **named: Any) -> click.Context:
        """Read the options."""
        try:
            return super().make_context(*given, **named)
        except click.ClickException as error:
            raise SystemExit(_told(error)) from None

    def invoke(self, context: click.Context) -> Any:
        """Run."""
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, SystemExit, TerminatedError, KeyboardInterrupt):
            raise  # a verdict, help, or 130 and 143, which stop it too
        except BaseException as error:
            raise SystemExit(_told(error)) from None


def _told(error: BaseException) -> int:
    expected = (click.ClickException, CaseError, UnavailableError, OSError)
    if isinstance(error, expected):
        said = error.format_message() if isinstance(error, click.ClickException) else str(error)
        print(f"kdafuzz: {one_line(said, 1000)}", file=sys.stderr)
    else:
        trace = "".join(traceback.format_exception(error))
        print(f"kdafuzz: the suite itself failed; please report this:\n{trace}", file=sys.stderr)
    return BROKEN
