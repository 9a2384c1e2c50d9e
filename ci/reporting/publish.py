"""Takes a run's report to where CI shows it: GitHub's step summary, an annotation in Buildkite."""

import os
import shutil
import subprocess
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

from ci.reporting.summary import Summary, markdown
from impl.contract import one_line

GITHUB = "GITHUB_STEP_SUMMARY"
BUILDKITE = "BUILDKITE"
AGENT = "buildkite-agent"
_SECONDS = 60.0
"""For the agent to take an annotation."""


@dataclass(frozen=True)
class Outlets:
    """Where a report goes: a file to append it to, and the context of an annotation."""

    github: str = ""
    context: str = ""

    @classmethod
    def claimed(cls, environment: MutableMapping[str, str] = os.environ) -> "Outlets":
        """What the environment offers, taken out of it: what this run starts must not speak for it.

        Two steps of one Buildkite build would overwrite one context, so its name has the step's key.
        """
        github = environment.pop(GITHUB, "")
        told = environment.pop(BUILDKITE, "") == "true" and shutil.which(AGENT) is not None
        step = environment.get("BUILDKITE_STEP_KEY", "")
        return cls(github, f"kdafuzz{'-' if step else ''}{step}" if told else "")

    def publish(self, summary: Summary) -> list[str]:
        """Show the report; returns a warning for each place that did not take it."""
        if not (self.github or self.context):
            return []
        report = markdown(summary).encode(errors="backslashreplace")
        warnings = [self._append(report)] if self.github else []
        warnings += [self._annotate(report, "success" if summary.ok else "error")] if self.context else []
        return [warning for warning in warnings if warning]

    def _append(self, report: bytes) -> str:
        try:
            with Path(self.github).open("ab") as file:
                file.write(report + b"\n")
        except OSError as error:
            return f"{GITHUB}: {one_line(error)}; the report was not written"
        return ""

    def _annotate(self, report: bytes, style: str) -> str:
        command = [AGENT, "annotate", "--style", style, "--context", self.context]
        try:
            done = subprocess.run(command, input=report, capture_output=True, timeout=_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"{AGENT}: {one_line(error)}; the report was not shown"
        if done.returncode:
            said = one_line(done.stderr.decode(errors="replace")) or "nothing"
            return f"{AGENT} ended with {done.returncode}, said {said}; the report was not shown"
        return ""
