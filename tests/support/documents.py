"""What a document tells its reader to do: commands, files to write, scripts to run.

Steps come out of the fenced blocks, in order. `sh`: every line is a command; lines that end in a
backslash go on, and a line that is a comment is none. `python`: a script. A block of any language
whose first line is a comment with a file's name (`# mine.py`) is that file, which the reader
writes; a script is also run.
"""

import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOG = ROOT / "docs/log.md"  # a lab log: what was once run, not what a reader is to run
DOCUMENTS = tuple(
    path
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(ROOT.glob("docs/*.md")),
        *sorted(ROOT.glob("docs/results/*.md")),
    )
    if path != LOG
)
MARKS = ("needs a GPU", "needs a network", "takes minutes")
WRITES = ("-o", "--out", "--run.out", ">", ">>", "-p", "-C")  # also of mkdir and tar
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"""^(?:'[^']*'|"[^"]*"|[^'"#]|(?<=\S)\#)*(\#.*)$""", flags=re.DOTALL)
FILE = re.compile(r"^# ([\w.-]+\.\w+)$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One thing to do. kind: "sh", "python", or "file" for what is only written."""

    line: int
    kind: str
    text: str
    file: str | None = None  # the name under which the text is written first

    @property
    def marks(self) -> tuple[str, ...]:
        """What stands in its comment (of a script: in its first line) of MARKS."""
        first = self.text.split("\n", 1)[0]
        comment = comment_of(self.text) if self.kind == "sh" else first
        return tuple(mark for mark in MARKS if mark in comment)


def fences(text: str) -> Iterator[tuple[int, str, str]]:
    """Every fenced block: the line of its first line, its language, what stands in it."""
    for found in FENCE.finditer(text):
        yield text.count("\n", 0, found.start(2)) + 1, found[1], found[2]


def steps(text: str) -> list[Step]:
    """Commands, scripts and files of a document, in order."""
    found: list[Step] = []
    for line, language, body in fences(text):
        name = FILE.match(body)
        if language == "sh":
            found += _commands(line, body)
        elif language == "python" or name:
            kind = "python" if language == "python" else "file"
            found.append(Step(line=line, kind=kind, text=body, file=name[1] if name else None))
    return found


def _commands(line: int, body: str) -> Iterator[Step]:
    for found in re.finditer(r"(?:[^\n]*\\\n)*[^\n]+", body):
        if not found[0].lstrip().startswith("#"):
            at = line + body.count("\n", 0, found.start())
            yield Step(line=at, kind="sh", text=found[0])


def comment_of(command: str) -> str:
    found = COMMENT.match(command)
    return found[1] if found else ""


def stages(command: str) -> list[list[str]]:
    """The words of every part of a pipeline or list, without settings of the environment,
    redirections and comments."""
    parts: list[list[str]] = [[]]
    words = iter(_words(command))
    for word in words:
        if set(word) <= set("|&;"):
            parts.append([])
        elif set(word) <= set("<>"):
            next(words)
        elif parts[-1] or not re.match(r"\w+=", word):
            parts[-1].append(word)
    return [part for part in parts if part]


def inputs(command: str) -> list[str]:
    """Paths under runs/ that a command reads: all that it names, but for where it writes."""
    paths, before = [], ""
    for word in _words(command):
        found = re.match(r"(?:([^=]*)=)?(runs/.*)", word)
        if found and (found[1] or before) not in WRITES:
            paths.append(found[2])
        before = word
    return paths


def _words(command: str) -> list[str]:
    plain = command.removesuffix(comment_of(command)).replace("\\\n", " ")
    lexer = shlex.shlex(plain, posix=True, punctuation_chars="|&;<>")
    lexer.commenters, lexer.whitespace_split = "", True
    return list(lexer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder like the root of a fresh clone, with `sparrow` and `python` on the path."""

    folder: Path
    environment: dict[str, str]

    @classmethod
    def make(cls, folder: Path) -> "Place":
        """bench/ and docs/ are there, runs/ is not; no GPU, network or fetched model."""
        for name in ("bench", "docs"):
            (folder / name).symlink_to(ROOT / name)
        tools = folder / ".tools"
        tools.mkdir()
        _program(tools / "sparrow", f'exec "{sys.executable}" -m sparrow "$@"')
        _program(tools / "python", f'exec "{sys.executable}" "$@"')
        settings = {
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "SPARROW_HOME": str(folder / ".home"),
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "PIP_NO_INDEX": "1",
            "TERM": "dumb",
        }
        return cls(folder=folder, environment={**os.environ, **settings})

    def do(self, step: Step, *, timeout: float) -> str | None:
        """Do a step; None where it went well, else what it said. Raises TimeoutExpired."""
        words = ["bash", "-e", "-o", "pipefail", "-c", step.text]
        if step.kind != "sh":
            file = self.folder / (step.file or f"line_{step.line}.py")
            file.write_text(step.text, encoding="utf-8")
            words = [sys.executable, file.name]
        if step.kind == "file":
            return None
        done = subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        said = f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return said if done.returncode else None

    def lacks(self, step: Step) -> list[str]:
        """What a command reads under runs/ that is not there."""
        read = inputs(step.text) if step.kind == "sh" else []
        return [path for path in read if not (self.folder / path).exists()]


def _program(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
