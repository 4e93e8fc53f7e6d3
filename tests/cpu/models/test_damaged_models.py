"""Folders with any damage load or raise a ValueError that names file and key: nothing else."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sparrow.models.checkpoint import load, save
from sparrow.models.sources import SHIPPED
from sparrow.models.spec import Rope, spec_from_hf

CONFIG = json.loads((SHIPPED / "tiny" / "config.json").read_text())
KEYS = [*CONFIG, "rope_parameters", "layer_types", "torch_dtype", "mlp_bias", "quantization_config"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
NAN, INFINITE = float("nan"), float("inf")
ODD: list[Any] = [
    *(None, True, False, 0, -1, 3, 10**12, 10**30, 10**400, 0.5, 1e300, NAN, INFINITE),
    *("", "x", "2", [], [1.5], [None], [[]], {}, {"a": 1}, {"rope_type": ["x"]}, {"rope_type": 5}),
    *({**YARN, "truncate": "no"}, {**YARN, "factor": 10**400}, {**YARN, "rope_theta": 1}),
    json.loads("[" * 900 + "]" * 900),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """tiny, without digests: as somebody else would send it."""
    copy = shutil.copytree(SHIPPED / "tiny", tmp_path / "tiny")
    (copy / "SHA256SUMS").unlink()
    return copy


def problem(folder: Path) -> str:
    """What the ValueError says, or nothing where the model loads; nothing else is raised."""
    try:
        load(folder, device="cpu")
    except ValueError as error:
        return str(error)
    return ""


def test_values_of_another_kind_or_size_are_refused_by_key() -> None:
    """The file alone is read: a config that passes still meets its weights in `load`."""
    for key in KEYS:
        for value in ODD:
            said = ""
            try:
                spec_from_hf({**CONFIG, key: value}, "some file")
            except ValueError as error:
                said = str(error)
            assert said == "" or "some file" in said, (key, value)
            if isinstance(value, str | list | dict) and value not in ("", "x", "2", [], {}):
                assert ("rope" if "rope" in key else key) in said, (key, value)


def test_numbers_that_would_take_all_memory_are_refused_by_key() -> None:
    for key in KEYS[3:11]:
        for value in (10**9, 10**12, 10**30, 10**400):
            with pytest.raises(ValueError, match=f"some file: {key}"):
                spec_from_hf({**CONFIG, key: value}, "some file")


def test_rope_stays_within_numbers() -> None:
    llama = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    kinds: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "yarn": {"factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 32},
        "llama3": {**llama, "original_max_position_embeddings": 64},
    }
    for kind, scaling in kinds.items():
        for name in ("rope_theta", *scaling):
            for value in (1e-300, 1e-5, 1, 1.0000001, 5, 1e14, 1e300, 10**400, NAN, True, "1"):
                given = {"rope_type": kind, "rope_theta": 1e4, **scaling, name: value}
                numbers = frequencies_of(given)
                assert all(0 < number < 1e12 for number in numbers), given


def frequencies_of(rope: dict[str, Any]) -> list[float]:
    """All numbers that are computed; none where the rope is refused."""
    try:
        frequencies, factor = Rope.from_hf({"rope_parameters": rope}).frequencies(64)
    except ValueError:
        return []
    return [*frequencies, factor]


def test_damaged_weights_are_refused_by_name(folder: Path) -> None:
    draw = random.Random(3)
    whole = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for number in range(30):
        place = draw.randrange(header)
        cut = whole[: draw.randrange(len(whole))]
        flipped = bytes([whole[place] ^ 1 << draw.randrange(8)])
        content = cut if number % 3 == 0 else whole[:place] + flipped + whole[place + 1 :]
        (folder / "model.safetensors").write_bytes(content)
        said = problem(folder)
        assert said == "" or str(folder) in said
        assert said or number % 3


def test_an_index_names_files_of_its_folder(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    (folder / "model.safetensors").rename(folder / "x.safetensors")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "x.safetensors"}}))
    load(folder, device="cpu")
    outside = ("/etc/x.safetensors", "../x.safetensors", "a/x.safetensors", "..", "x.bin", "")
    for name in (*outside, 5, [], {}):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        with pytest.raises(ValueError, match="weight_map") as refused:
            load(folder, device="cpu")
        assert str(index) in str(refused.value)


def test_json_that_is_too_deep_is_refused(folder: Path) -> None:
    for name in ("config.json", "generation_config.json", "model.safetensors.index.json"):
        whole = (folder / name).read_bytes() if (folder / name).exists() else None
        if "index" in name:
            (folder / "model.safetensors").unlink()
        (folder / name).write_text('{"weight_map":' + "[" * 100_000)
        assert str(folder / name) in problem(folder)
        (folder / name).unlink() if whole is None else (folder / name).write_bytes(whole)


KILLED = """
import os, signal, sys
from sparrow import models
from sparrow.models import checkpoint
checkpoint.write_sums = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
models.save(models.load("tiny", device="cpu"), sys.argv[1])
"""


def test_what_a_killed_save_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    target = tmp_path / "model"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(target)], check=False)
    assert killed.returncode == -signal.SIGKILL
    (leftover,) = tmp_path.iterdir()
    other = tmp_path / leftover.name.replace(".model.", ".other.")
    other.mkdir()
    running = tmp_path / f".model.{os.getppid()}.unfinished"
    running.mkdir()
    save(load("tiny", device="cpu"), target)
    assert set(tmp_path.iterdir()) == {target, other, running}


def test_a_full_disk_is_an_os_error(tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys; from sparrow import models\n"
        "model = models.load('tiny', device='cpu')\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))\n"
        "try: models.save(model, sys.argv[1])\n"
        "except OSError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model")]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "model.safetensors" in said
    assert not list(tmp_path.iterdir())
