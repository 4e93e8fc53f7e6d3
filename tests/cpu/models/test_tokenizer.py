"""Tokenizers from files that nobody can trust: one ValueError with the file, and no code is run."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.damage import damaged

from sparrow import models
from sparrow.engine.language import Language
from sparrow.models.sources import SHIPPED
from sparrow.models.tokenizer import library_errors

TEXT = "countdown 23 25 47 reach 94 <think>"
CONFIG = "tokenizer_config.json"
ODD: list[Any] = [None, True, -1, 1e300, 10**30, "", "x", [], [1], [None], {}, {"a": 1}, [[[]]]]
MALICE = """
import pathlib
pathlib.Path({!r}).touch()
class Tokenizer:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny, without digests: as somebody else would send it."""
    copy = shutil.copytree(SHIPPED / "tiny", tmp_path / "tiny")
    (copy / "SHA256SUMS").unlink()
    return copy


def edit(file: Path, change: Callable[[Any], Any]) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(change(content)))


def problem(work: Callable[[], object]) -> str:
    """What a ValueError says; nothing else may be raised."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def attempt(file: Path) -> None:
    """Load, encode and decode; what fails names the file, once it is loaded the folder."""
    folder = file.parent
    said = problem(lambda: models.load_tokenizer(folder))
    assert said == "" or file.name in said
    if not said:
        language = Language(models.load_tokenizer(folder), str(folder))
        said = problem(lambda: language.decode(language.encode(TEXT)))
        assert said == "" or str(folder) in said


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list) and path[-1:] != ("vocab",):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


def replaced(content: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    part = content
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return content


def test_damaged_files_and_values_of_another_kind_are_named(folder: Path) -> None:
    draw, keys = random.Random(2), ("chat_template", "added_tokens_decoder", "init_inputs")
    for name in ("tokenizer.json", CONFIG):
        whole = (folder / name).read_bytes()
        paths = [*places(json.loads(whole)), *((key,) for key in (*keys, "auto_map"))]
        odd = (replaced(json.loads(whole), path, draw.choice(ODD)) for path in paths)
        contents = [b"", b"[" * 100_000, *(damaged(whole, seed) for seed in range(15))]
        for content in (*contents, *(json.dumps(value).encode() for value in odd)):
            (folder / name).write_bytes(content)
            attempt(folder / name)
        (folder / name).write_bytes(whole)


def test_a_file_names_no_other_class_and_no_other_file(folder: Path) -> None:
    whole = (folder / CONFIG).read_text()
    classes = ("AutoTokenizer", "AutoModelForCausalLM", "RagTokenizer", ["TokenizersBackend"])
    other_files = {"fast_tokenizer_files": ["../other/1.json"], "gguf_file": "../other.gguf"}
    for key, value in (*(("tokenizer_class", name) for name in classes), *other_files.items()):
        (folder / CONFIG).write_text(json.dumps({**json.loads(whole), key: value}))
        with pytest.raises(ValueError, match=key) as refused:
            models.load_tokenizer(folder)
        assert str(folder / CONFIG) in str(refused.value)
    (folder / CONFIG).write_text(whole)
    edit(folder / "config.json", lambda config: {**config, "tokenizer_class": "AutoModel"})
    with pytest.raises(ValueError, match=r"config\.json: tokenizer_class"):
        models.load_tokenizer(folder)


def test_code_of_the_folder_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does anybody ask on the terminal whether to."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (folder / "code.py").write_text(MALICE.format(str(tmp_path / "ran")))
    code = {"AutoTokenizer": ["code.Tokenizer"] * 2, "AutoConfig": "code.Tokenizer"}
    changes = {"auto_map": code, "model_type": "own", "tokenizer_class": None}
    for name in (CONFIG, "config.json"):
        edit(folder / name, lambda config: {**config, **changes})
    with pytest.raises(ValueError, match=str(folder)):
        models.load_tokenizer(folder)
    assert not (tmp_path / "ran").exists()


BAD_TEMPLATES = [
    "{{ 1 / 0 }}",
    "{{ 'a' + 1 }}",
    "{{ messages.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
    "{{ range(10 ** 9) | list }}",
    "{{ 'a' * 10 ** 18 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no') }}",
    "{% for %}",
    "{{ messages[5].content }}",
    "{{ 10.0 ** 400 }}",
    "{{ strftime_now(5) }}",
]


def test_chat_templates() -> None:
    """The ids that transformers gives; a bad template is a ValueError with the model."""
    tokenizer = models.load_tokenizer("tiny")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": TEXT}]
    theirs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert Language(tokenizer, "tiny").encode(chat) == theirs
    assert Language(tokenizer, "tiny").encode(TEXT) == theirs
    for template in BAD_TEMPLATES:
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match="some-model"):
            Language(tokenizer, "some-model").encode(chat)


def test_a_librarys_error_is_a_value_error_but_the_end_of_the_program() -> None:
    class Panic(BaseException):
        pass

    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind), library_errors("reading"):
            raise kind
    with pytest.raises(ValueError, match="Panic"), library_errors("reading"):
        raise Panic("in Rust")


def test_the_digest_is_of_all_files_and_their_names(folder: Path) -> None:
    first = models.tokenizer_digest(folder)
    assert first == models.tokenizer_digest(SHIPPED / "tiny")
    (folder / "README.md").write_text("not part of it")
    assert models.tokenizer_digest(folder) == first
    seen = {first}
    for name in ("chat_template.jinja", "additional_chat_templates/rag.jinja", "merges.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("the same")
        seen.add(models.tokenizer_digest(folder))
        (folder / name).unlink()
    edit(folder / CONFIG, lambda config: {**config, "pad_token": "<eos>"})
    assert len({*seen, models.tokenizer_digest(folder)}) == 5
