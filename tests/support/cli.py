"""The command line in this process, as a user meets it."""

import io
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import sparrow
from sparrow.cli import main, output
from sparrow.models import ModelSpec


class Ended(NamedTuple):
    """How a command ended. Lines are wide: what is said stands in one piece."""

    code: Any
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Everything, without the line breaks that a terminal makes."""
        return " ".join(f"{self.stdout} {self.stderr}".split())


def run(*words: str | Path, stdin: str = "", columns: int = 1000) -> Ended:
    """`sparrow WORDS`; an error that is no message is raised."""
    out, err = io.StringIO(), io.StringIO()
    environment = patch.dict("os.environ", {"COLUMNS": str(columns), "TERM": "dumb"})
    keyboard = patch("sys.stdin", io.StringIO(stdin))
    with ExitStack() as stack:
        for console in (output.console, output.notes):  # made at import, maybe for fewer columns
            stack.enter_context(patch.object(console, "_width", columns))
        for context in (environment, keyboard, redirect_stdout(out), redirect_stderr(err)):
            stack.enter_context(context)
        try:
            main([*map(str, words)])
        except SystemExit as end:
            return Ended(end.code or 0, out.getvalue(), err.getvalue())
    raise AssertionError("main() exits always")


def passed(*words: str | Path, **settings: Any) -> Ended:
    """`sparrow WORDS`, which must end well."""
    ended = run(*words, **settings)
    assert ended.code == 0, ended.stderr
    return ended


def refused(*words: str | Path) -> str:
    """What is said of a mistake: one message, exit code 2."""
    ended = run(*words)
    assert ended.code == 2, ended
    assert ended.stderr.count("error:") == 1, ended.stderr
    return ended.said


def byte_model(folder: Path) -> Path:
    """A random model that speaks bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.chat_template = "{% for m in messages %}Q: {{ m.content }} A: {% endfor %}"
    sizes = {"hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2, "head_size": 8}
    spec = ModelSpec(
        family="qwen3", layers=3, vocabulary=257, max_positions=512, eos_ids=(256,), **sizes
    )
    return sparrow.save(sparrow.random(spec), folder, tokenizer=fast)
