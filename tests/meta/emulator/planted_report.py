"""Plant every mutation in the kernels of an implementation and print what finds it.

python -m tests.meta.emulator.planted_report vllm@0.33.0:cute [PATH ...] [--sample N]
"""

import time
from collections import Counter

import click
from rich.console import Console
from rich.table import Table

from tests.meta.emulator.mutations import Mutation, sites
from tests.meta.emulator.planted import Finding, Subject

SUBJECTS = (("commit", "cute"), ("fused_verify", "plain"), ("fused_verify", "warp-specialised"))


@click.command()
@click.argument("implementation")
@click.argument("paths", nargs=-1)
@click.option("--every", default=1, help="Only every N-th mutation.")
def main(implementation: str, paths: tuple[str, ...], every: int) -> None:
    """Print, for every mutation, the case that finds it and how; then the share found."""
    for operation, path in SUBJECTS:
        if paths and path not in paths:
            continue
        subject = Subject(implementation, operation, path)
        rows = []
        started = time.monotonic()
        text = max(subject.texts, key=len)
        for mutation in list(sites(text))[::every]:
            rows.append((mutation, subject.find(text, mutation)))
        _print(subject, rows, time.monotonic() - started)


def _print(subject: Subject, rows: list[tuple[Mutation, Finding | None]], seconds: float) -> None:
    table = Table("mutation", "line", "statement", "cases", "kind", "first words", title=str(subject))
    for mutation, found in rows:
        words = (
            (found.kind, found.text.splitlines()[0][:70] if found.text else "") if found else ("MISSED", "")
        )
        cases = str(found.cases) if found else ""
        table.add_row(mutation.label, str(mutation.line), mutation.old[:50], cases, *words)
    console = Console(width=200)
    console.print(table)
    caught = [found for _, found in rows if found]
    kinds = Counter(found.kind for found in caught)
    console.print(
        f"{len(caught)} of {len(rows)} found in {seconds:.0f} s, {len(subject.cases)} cases; {dict(kinds)}"
    )


if __name__ == "__main__":
    main()
