"""docs/troubleshooting.md quotes the program: every quoted message stands in the source.

A message is a line that begins with "> "; an ellipsis stands for what differs from case to case.
Each piece between ellipses must be part of a text in one folder of the package, where adjacent
literals count as the one text that they are, and so do the fixed parts of an f-string.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^> (.+)$", PAGE, flags=re.MULTILINE)
TELLING = 8  # letters that some piece of a message has, at least


def pieces(message: str) -> list[str]:
    """What is fixed in a message, without blanks and marks of single characters."""
    return [piece for part in message.split("…") if len(piece := part.strip()) > 1]


def texts(file: Path) -> Iterator[str]:
    """All literal texts of a file; those of an f-string with a mark where a value goes."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "\0" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield node.value.decode() if isinstance(node.value, bytes) else node.value


@cache
def folders() -> dict[Path, str]:
    """The texts of every folder of the package, joined by what no message has."""
    found: dict[Path, list[str]] = defaultdict(list)
    for file in sorted([*ROOT.glob("sparrow/**/*.py"), *ROOT.glob("recipes/**/*.py")]):
        found[file.parent] += texts(file)
    return {folder: "\0\0".join(said) for folder, said in found.items()}


def said_somewhere(message: str) -> bool:
    wanted = pieces(message)
    return any(all(piece in text for piece in wanted) for text in folders().values())


def assigned(file: str, name: str) -> ast.expr:
    """What a module assigns to a name, also as one of several names at once."""
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign):
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = dict(zip(map(ast.unparse, target.elts), value.elts, strict=True))
        else:
            pairs = {ast.unparse(target): value}
        if name in pairs:
            return pairs[name]
    raise AssertionError(f"{file} does not assign {name}")


def test_quoted_messages_are_of_the_program() -> None:
    assert len(MESSAGES) > 15
    for message in MESSAGES:
        assert max(map(len, pieces(message)), default=0) >= TELLING, "too little to search for"
        assert said_somewhere(message), message


def test_every_gate_action_has_an_entry() -> None:
    kinds = assigned("sparrow/schema/gate.py", "Kind")
    assert isinstance(kinds, ast.Subscript)
    for kind in ast.literal_eval(kinds.slice):
        assert re.search(rf"^\*\*{kind}\*\*", PAGE, flags=re.MULTILINE), kind


def test_every_fault_that_a_run_counts_has_an_entry() -> None:
    faults = ast.literal_eval(assigned("sparrow/dataflow/local/ledger.py", "FAULTS"))
    for fault in ("left_out_rows", *faults):
        assert f"`faults/{fault}`" in PAGE, fault


def test_every_exit_code_of_a_run_has_an_entry() -> None:
    train = [assigned("sparrow/cli/train.py", name) for name in ("GATED", "DIVERGED", "UNJUDGED")]
    for code in (*train, assigned("sparrow/cli/output.py", "STOPPED")):
        assert re.search(rf"^\| {ast.literal_eval(code)} \|", PAGE, flags=re.MULTILINE)


def test_links_and_files_that_pages_name_exist() -> None:
    for page in ("method", "schedules", "troubleshooting"):
        text = (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")
        links = [f"docs/{link}" for link in re.findall(r"\]\(([^)#:]+)\)", text)]
        for path in links + re.findall(r"`((?:sparrow|recipes)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), f"{page}.md: {path}"
