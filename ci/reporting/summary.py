"""The report of a run as Markdown, the same for GitHub's step summary and for a Buildkite annotation.

Names, messages of kernels and test ids come from outside: in text every letter that Markdown or
HTML could take for markup becomes a character reference, and what is shown as it stands is fenced
by more backticks than it holds.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SHOWN = 20
"""Failures, or lines of any other list, that are shown; CI takes a report of a megabyte at most."""
LETTERS = 2000
"""How much is shown of one failure; of one line in a list, a quarter."""
_MARKUP = re.compile(r"[^\w .,;:/=+%()-]|:(?=\S)|(?<![^\W_])_|_(?![^\W_])|(?:^\d*)[-+=.)]")
"""What may be markup: all but letters, digits, blanks and harmless punctuation. Underscores are harmless
within a word, colons at its end, and what may begin a list or underline a title is so after the beginning."""
COLUMNS = (
    "implementation",
    "operation",
    "examples",
    "examples/s",
    "largest ratio",
    "known",
    "failures",
    "skipped",
)


@dataclass(frozen=True)
class Failed:
    """A failure: which, what was said of it, and the command that repeats it (or nothing)."""

    title: str
    text: str
    replay: str = ""


@dataclass
class Line:
    """One line of the table: an implementation on an operation; ``skipped`` counts by reason."""

    implementation: str
    operation: str
    version: str = ""
    examples: int = 0
    rate: float = 0.0
    ratio: float = 0.0
    known: int = 0
    failures: list[Failed] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Summary:
    """A run: what it was, whether it passed, the table, and what else there is to say.

    ``problems`` are why a run failed beside its failures, ``others`` failures of no
    implementation, ``stale`` entries of ``known.toml`` to narrow.
    """

    title: str
    ok: bool
    facts: Sequence[str] = ()
    lines: Sequence[Line] = ()
    problems: Sequence[str] = ()
    others: Sequence[Failed] = ()
    stale: Sequence[str] = ()


def markdown(summary: Summary) -> str:
    """The whole report."""
    blocks = [f"### {text(summary.title)}: {'passed' if summary.ok else 'failed'}"]
    if summary.facts:
        blocks.append(", ".join(map(text, summary.facts)))
    if summary.lines:
        rule = "|---|---|" + "--:|" * (len(COLUMNS) - 2)
        blocks.append("\n".join([_row(COLUMNS), rule, *(_row(_cells(line)) for line in summary.lines)]))
    blocks += _listed("Problems", summary.problems)
    failures = [failed for line in summary.lines for failed in line.failures]
    blocks += _failures("Failures", failures) + _failures("Other failures", summary.others)
    skipped = [
        f"{line.implementation} {line.operation}: {reason}" + (f" ({count} times)" if count > 1 else "")
        for line in summary.lines
        for reason, count in line.skipped.items()
    ]
    blocks += _listed("Skipped", skipped)
    blocks += _listed("Stale known findings", summary.stale)
    return "\n\n".join(blocks) + "\n"


def text(words: str) -> str:
    """Words on one line, in which nothing is markup."""
    return _MARKUP.sub(_reference, " ".join(words.split()))


def fenced(words: str) -> str:
    """Words as they stand, in a block of their own."""
    shown = "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in words.strip())
    longest = max((len(ticks) for ticks in re.findall("`+", shown)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{shown}\n{fence}"


def _reference(match: re.Match[str]) -> str:
    letter = match[0][-1]
    return match[0][:-1] + (f"&#{ord(letter)};" if letter.isprintable() else "?")


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(line: Line) -> tuple[str, ...]:
    told = line.version and line.version not in line.implementation
    name = f"{line.implementation} ({line.version})" if told else line.implementation
    ran = bool(line.examples)
    return (
        text(name),
        text(line.operation) or "-",
        str(line.examples) if ran else "-",
        f"{line.rate:.1f}" if ran else "-",
        f"{line.ratio:.3f}" if ran else "-",
        str(line.known) if ran else "-",
        f"**{len(line.failures)}**" if line.failures else "0" if ran else "-",
        str(line.skipped.total() or "-"),
    )


def _listed(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    shown = [text(line[: LETTERS // 4]) for line in lines[:SHOWN]]
    return [f"**{title}**", "\n".join(f"* {line}" for line in (*shown, *_more(lines)))]


def _failures(title: str, failures: Sequence[Failed]) -> list[str]:
    if not failures:
        return []
    blocks = [f"**{title}**"]
    for failed in failures[:SHOWN]:
        said = failed.text if len(failed.text) <= LETTERS else f"{failed.text[:LETTERS]} .."
        replay = "" if failed.replay in said else f"\n{failed.replay}"
        blocks += [text(failed.title[: LETTERS // 4]), fenced(said + replay)]
    return [*blocks, *_more(failures)]


def _more(all_of_them: Sequence[object]) -> list[str]:
    return [f"and {len(all_of_them) - SHOWN} more"] if len(all_of_them) > SHOWN else []
