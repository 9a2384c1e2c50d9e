"""Reports of runs as a reader sees them, and an agent of Buildkite that writes down what it is told."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

READ = MarkdownIt("commonmark", {"html": True, "linkify": False}).enable(["table", "strikethrough"])


def plain(words: str) -> str:
    """What a reader shall see of a text: one line, and no control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in " ".join(words.split()))


def content(token: Token) -> str:
    """The words of a paragraph or cell, which must hold nothing but words and our own bold."""
    words = []
    for child in token.children or ():
        assert child.type in ("text", "text_special", "strong_open", "strong_close"), child
        words.append(child.content)
    return "".join(words)


def inline(report: str) -> list[str]:
    """Every piece of text of a report, as it is read."""
    return [content(token) for token in READ.parse(report) if token.type == "inline"]


def rows(report: str) -> list[list[str]]:
    """The cells of the report's table."""
    found: list[list[str]] = []
    tokens = READ.parse(report)
    for before, token in pairwise(tokens):
        if token.type == "tr_open":
            found.append([])
        elif before.type in ("th_open", "td_open"):
            found[-1].append(content(token))
    return found


def fences(report: str) -> list[str]:
    return [token.content for token in READ.parse(report) if token.type == "fence"]


AGENT = f"""#!{sys.executable}
import json, sys
with open("told.json", "a") as file:
    file.write(json.dumps([sys.argv[1:], sys.stdin.read()]) + "\\n")
"""


def install_agent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the agent first on PATH, and go to ``folder``, where it writes; returns its file."""
    path = folder / "bin" / "buildkite-agent"
    path.parent.mkdir()
    path.write_text(AGENT)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)
    monkeypatch.chdir(folder)
    return path


def told(folder: Path) -> list[list[object]]:
    """Arguments and standard input of each call of the agent."""
    path = folder / "told.json"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
