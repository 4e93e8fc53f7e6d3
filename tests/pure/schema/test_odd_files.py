"""Files that are no configuration: each is refused within seconds, and the message names it."""

import os
from pathlib import Path

import pytest

from sparrow.schema.base import Record
from sparrow.schema.common import GenerateConfig
from sparrow.schema.loading import ConfigError, load_config
from sparrow.schema.train import TrainConfig

DEEP = 5000
ODD = {
    "empty": b"",
    "NUL": b"model\x00 = 1",
    "UTF-16": "a = 1".encode("utf-16"),
    "Latin-1": b"a = '\xe9'",
    "arrays in arrays": b"x = " + b"[" * DEEP + b"]" * DEEP,
    "some arrays in arrays": b"x = " + b"[" * 60 + b"]" * 60,
    "tables in tables": b"x = " + b"{a=" * DEEP + b"1" + b"}" * DEEP,
    "dotted key": b"a" + b".a" * 300_000 + b" = 1",
    "quoted dotted key": b'"a\\"b"' + b' . "a\\"b"' * 30_000 + b" = 1",
    "dotted table": b"[a" + b" . a" * DEEP + b"]\nx = 1",
    "a key twice": b"a = 1\na = 2",
    "a date": b"model = 2020-01-01",
    "escape in a key": b'"\\u001b]0;pwned\\u0007" = 1',
    "C1 in a key": '"\x9b31m" = 1'.encode(),
    "5000 digits": b"x = " + b"9" * 5000,
    "4000 digits": b"x = " + b"9" * 4000,
    "hexadecimal digits": b"x = 0x" + b"f" * 9000,
    "many keys": b"\n".join(b"k%d=1" % i for i in range(20_000)),
    "too many keys": b"\n".join(b"k%d=1" % i for i in range(10**6)),
    "many tables": b"\n".join(b"[t%d]" % i for i in range(20_000)),
    "long text": b"x = '" + b"a" * 10**6 + b"'",
    "long key": b"a" * 10**6 + b" = 1",
    "text without an end": b'x = "' + b"a" * 10**6,
    "quotes": b"x = " + b'"' * 10**6,
    "brackets": b"[" * 10**6,
}


@pytest.mark.parametrize("root", [TrainConfig, GenerateConfig])
def test_an_odd_file(root: type[Record], tmp_path: Path) -> None:
    file = tmp_path / "odd.toml"
    for name, content in ODD.items():
        file.write_bytes(content)
        if root is GenerateConfig and name == "empty":
            file.write_bytes(b"\xef\xbb\xbf[sampling]\r\nn = 3\r\n")  # as Windows writes it
            assert load_config(root, [file]).sampling.n == 3
            continue
        with pytest.raises(ConfigError) as error:
            load_config(root, [file])
        text = str(error.value)
        assert "odd.toml" in text, name
        assert len(text) < 20_000, name
        assert text.replace("\n", "").isprintable(), name


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody writes into it: opening it would wait for ever
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/zero"), tmp_path / "gone", "x" * 5000):
        with pytest.raises(ConfigError) as error:
            load_config(TrainConfig, [Path(place)])
        assert str(place)[:40] in str(error.value)


def test_overrides_without_end() -> None:
    for text in (
        "--sampling.n=" + "[" * DEEP,
        "--model=" + "{a=" * DEEP,
        "--a" + ".a" * DEEP + "=1",
        "--sampling.n=" + "9" * DEEP,
        "--sampling.n=0x" + "f" * DEEP,
    ):
        with pytest.raises(ConfigError) as error:
            load_config(GenerateConfig, [], [text])
        assert text[:20] in str(error.value)
        assert len(str(error.value)) < 1000


def test_what_is_missing_names_every_file_that_was_read(tmp_path: Path) -> None:
    files = [tmp_path / "first.toml", tmp_path / "second.toml"]
    for file in files:
        file.write_text("[run]\n", encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        load_config(TrainConfig, files, ["--run.steps=1"])
    lines = error.value.args
    assert [line.partition(":")[0] for line in lines] == ["model", "data.task"]
    assert all(str(file) in line for line in lines for file in files)
