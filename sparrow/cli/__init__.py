"""The command line: the options of a verb are the fields of its configuration class."""

import os
import re
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from io import TextIOWrapper

from pydantic import ValidationError

from sparrow import __version__
from sparrow.cli.output import STOPPED, alert, console, write_json
from sparrow.cli.verbs import GROUPS, VERBS, overview, verb_help
from sparrow.schema.base import problems

HELP = ("-h", "--help")


def main(words: Sequence[str] | None = None) -> None:
    """Run the command line and exit; a user error is a one-line message, not a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):  # names that its encoding lacks are escaped
        sys.stdout.reconfigure(errors="backslashreplace")
    words = sys.argv[1:] if words is None else words
    try:
        sys.exit(run(words))
    except KeyboardInterrupt:
        sys.exit(STOPPED)
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except ValidationError as error:
        alert("error:", problems(error))
        if "--json" in words:
            write_json(_as_json(problems(error)))
    except (ValueError, OSError, OverflowError) as error:
        alert("error:", str(error))
        if "--json" in words:
            write_json(_as_json(str(error)))
    except MemoryError as error:
        alert("error:", f"not enough memory: {error}")
    except ModuleNotFoundError as error:
        alert("error:", f"missing package {error.name!r}: pip install it")
    sys.exit(2)


def _as_json(text: str) -> dict[str, object]:
    """An error as data, with the line of the user's code that it names, if it does."""
    place = re.match(r"(.+\.py):(\d+)\b", text)
    where = {"file": place[1], "line": int(place[2])} if place else {}
    return {"error": {"message": text, **where}}


def run(words: Sequence[str]) -> int:
    """Run a command line and return its exit code."""
    name, rest = split_verb(words)
    if name in VERBS:
        options = rest[: rest.index("--")] if "--" in rest else rest
        if not set(HELP).isdisjoint(options):
            console.print(verb_help(VERBS[name]))
            return 0
        return VERBS[name].run(rest) or 0
    if rest and rest[0] == "--version" and not name:
        print(__version__)
        return 0
    if rest and rest[0] not in HELP:
        verbs = [verb.removeprefix(f"{name} ") for verb in (*VERBS, *GROUPS)]
        hint = "".join(f"; did you mean {verb}?" for verb in get_close_matches(rest[0], verbs, 1))
        raise ValueError(f"unknown verb {rest[0][:80]!r}{hint or '; see sparrow --help'}")
    console.print(overview(name))
    return 0 if rest else 2


def split_verb(words: Sequence[str]) -> tuple[str, list[str]]:
    """Split command-line words into the verb or group and the words after it."""
    name = " ".join(words[:2]) if words[:1] and words[0] in GROUPS else " ".join(words[:1])
    if name in VERBS:
        return name, list(words[len(name.split()) :])
    if words[:1] and words[0] in GROUPS:
        return words[0], list(words[1:])
    return "", list(words)
