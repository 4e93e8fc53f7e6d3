"""Every command of README, CONTRIBUTING and docs is executed, or says why it is not.

The rules, for whoever writes a document (docs/log.md is a lab log of past commands and is not
read here):

- Every line of every ```sh block is a command; a backslash at the end continues it, and `# ...`
  at the end is a comment. ```python blocks are scripts. A block whose first line is `# mine.py`
  (or `# mine.toml`, any language) is a file that the reader writes before going on.
- All are executed as written, in order, in one folder that is like the root of a fresh clone:
  no GPU, no network, no fetched model.
- A comment (of a script: its first line) may say `needs a GPU` or `needs a network`: never
  executed. `takes minutes`: executed by `make test-all` alone. After such a command, those that
  read something under runs/ which is not there are left out along with it.
- What begins with a word of NOT_HERE is not executed, for the reason that stands there.
- Whether or not it is executed, the verb, options, settings and configuration files of every
  `sparrow ...` must exist, and so must every target of `make ...`; also inside of sentences.
"""

import re
from pathlib import Path

import pytest
from support.documents import DOCUMENTS, MARKS, ROOT, Place, Step, fences, stages, steps

from sparrow.cli import split_verb
from sparrow.cli.verbs import VERBS
from sparrow.schema.loading import parse, resolve

TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in DOCUMENTS}
LANGUAGES = {"sh", "python", "toml", "json", "text", "mermaid", "bibtex"}
NOT_HERE = {
    "make": "installs; CI runs lint and tests, test_demo_cli.py the demo; targets must exist",
    "git clone": "needs a network, and the clone is what the test runs in",
    "cd": "goes into the clone, where the test is already",
    ". .venv/bin/activate": "the test has its own environment",
    "pip install": "needs a network, and changes the environment of the test",
    "pytest": "would be the tests themselves",
    "sparrow serve": "serves until it is stopped: test_serve_cli.py",
    "sparrow worker": "works until a run ends: test_remote_workers.py",
}
LONGEST = 240.0  # seconds of one command; only so that what hangs ends
LONGEST_SLOW = 1500.0


def not_here(step: Step) -> bool:
    first = "|".join(map(re.escape, NOT_HERE))
    return step.kind == "sh" and re.match(rf"({first})(\s|$)", step.text) is not None


def execute(text: str, place: Place, unless: tuple[str, ...], longest: float) -> str | None:
    """Do the steps of a text in order, but for those with a mark of `unless` and those that then
    lack something; what the first that fails said, None where none did."""
    left_out = False
    for step in steps(text):
        if not_here(step):
            continue
        if set(step.marks) & set(unless) or (left_out and place.lacks(step)):
            left_out = True
            continue
        said = place.do(step, timeout=longest)
        if said is not None:
            return f"line {step.line}\n{step.text}\n{said}"
    return None


SLOW = [
    name for name, text in TEXTS.items() if any("takes minutes" in s.marks for s in steps(text))
]
WITH_STEPS = [(name, MARKS, LONGEST) for name, text in TEXTS.items() if steps(text)]
WITH_MINUTES = [  # left to `make test-all`
    pytest.param(name, MARKS[:2], LONGEST_SLOW, id=f"{name}-take_minutes") for name in SLOW
]


@pytest.mark.slow
@pytest.mark.parametrize(("document", "unless", "longest"), [*WITH_STEPS, *WITH_MINUTES])
def test_commands_work(
    document: str, unless: tuple[str, ...], longest: float, tmp_path: Path
) -> None:
    said = execute(TEXTS[document], Place.make(tmp_path), unless, longest)
    assert said is None, f"{document}, {said}"


def configure(words: list[str]) -> None:
    """Read a verb's configuration, but for files that are not of this repository.

    Nothing is run; a mistake raises.
    """
    name, rest = split_verb(words)
    if name not in VERBS:
        raise ValueError(f"{' '.join(words[:2])}: no such verb")
    verb = VERBS[name]
    parsed = parse(verb.config, rest, verb.extras)
    known = [file for file in parsed.files if not file.endswith(".toml")]  # shipped, by name
    resolve(verb.config, known, parsed.layers)


def sparrow_words(words: list[str]) -> list[str] | None:
    """What follows `sparrow` in `sparrow ...`, `python -m sparrow ...`, `torchrun ... sparrow`."""
    started = words[0] in ("sparrow", "python", "torchrun") and "sparrow" in words
    return words[words.index("sparrow") + 1 :] if started else None


def test_verb_options_and_settings_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARROW_ADMIN_KEY", "a-key-of-its-own")
    blocks = [step.text for text in TEXTS.values() for step in steps(text) if step.kind == "sh"]
    given = [sparrow_words(words) for block in blocks for words in stages(block)]
    for words in given:
        if words is not None and "--help" not in words:
            configure(words)


def sentences(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("document", TEXTS)
def test_verbs_and_options_inside_of_sentences_exist(document: str) -> None:
    for said in re.findall(r"`sparrow ([a-z][^`]*)`", sentences(TEXTS[document])):
        name, words = split_verb(said.split())
        assert name, f"{document}: sparrow {said}"
        known = {"--help", "--config", "-c"}
        for option in VERBS[name].options if name in VERBS else ():
            known |= {option.long, f"-{option.letter}", f"--no-{option.long[2:]}"}
        options = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        unknown = {option for option in options - known if "." not in option}
        assert not unknown, f"{document}: sparrow {said}"


@pytest.mark.parametrize("document", TEXTS)
def test_targets_of_make_exist_and_blocks_are_of_known_languages(document: str) -> None:
    """A block of another name (bash, console) would not be executed."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, flags=re.MULTILINE))
    said = [words.split() for words in re.findall(r"`make ([^`]+)`", sentences(TEXTS[document]))]
    blocks = [step.text for step in steps(TEXTS[document]) if step.kind == "sh"]
    said += [words[1:] for text in blocks for words in stages(text) if words[0] == "make"]
    for words in said:
        assert {word for word in words if "=" not in word} <= targets, words
    assert {language for _, language, _ in fences(TEXTS[document])} <= LANGUAGES
    assert TEXTS[document].count("```") == 2 * len(list(fences(TEXTS[document])))
