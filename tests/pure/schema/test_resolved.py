"""config.resolved.toml: complete, exact, written whole."""

import errno
import os
import random
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.schema.common import GenerateConfig, GenerateSampling, ModelConfig, RunConfig
from sparrow.schema.loading import load_config, read_resolved, save_resolved
from sparrow.schema.train import TrainConfig

texts = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs"]), min_size=1)
devices = st.sampled_from(["auto", "cpu", "cuda", "cuda:3"])


samplings = st.builds(
    GenerateSampling,
    n=st.integers(1, 100),
    temperature=st.floats(0.001, 1e6),
    top_k=st.just(0) | st.integers(2, 100),
    top_p=st.floats(1e-6, 1),
    max_tokens=st.integers(100, 2**31 - 1),
    min_tokens=st.integers(0, 100),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1),
)
configs = st.builds(
    GenerateConfig,
    model=st.builds(ModelConfig, name=texts, device=devices),
    sampling=samplings,
    run=st.builds(RunConfig, out=st.none() | texts.map(Path)),
)


@given(config=configs)
def test_loading_it_back_gives_an_equal_configuration(
    tmp_path_factory: pytest.TempPathFactory, config: GenerateConfig
) -> None:
    path = save_resolved(config, tmp_path_factory.getbasetemp() / "resolved")
    assert load_config(GenerateConfig, [path]) == config


def test_complete_with_defaults_and_without_none(tmp_path: Path) -> None:
    path = save_resolved(GenerateConfig(), tmp_path / "made" / "here")
    assert path == tmp_path / "made" / "here" / "config.resolved.toml"
    table = tomllib.loads(path.read_text())
    assert set(table["sampling"]) == set(GenerateSampling.model_fields) - {"seed"}
    assert table["model"] == {"name": "smollm2-135m", "dtype": "auto", "device": "auto"}
    assert table["run"] == {}


def test_what_was_changed_is_refused_as_part_of_a_run_alone(tmp_path: Path) -> None:
    """As a configuration that a user gives it is as good as any other."""
    path = save_resolved(GenerateConfig(), tmp_path)
    assert read_resolved(GenerateConfig, tmp_path) == GenerateConfig()
    text = path.read_text()
    path.write_text(text.replace("smollm2-135m", "smollm2-136m"))
    assert load_config(GenerateConfig, [path]).model.name == "smollm2-136m"
    with pytest.raises(ValueError, match=r"config\.resolved\.toml: .*first line"):
        read_resolved(GenerateConfig, tmp_path)
    with pytest.raises(ValueError, match=r"gone.config\.resolved\.toml"):
        read_resolved(GenerateConfig, tmp_path / "gone")
    path.write_text(path.read_text().partition("\n")[2])  # the edit is meant
    assert read_resolved(GenerateConfig, tmp_path).model.name == "smollm2-136m"


def test_no_damage_passes_silently(tmp_path: Path) -> None:
    path, chance = save_resolved(GenerateConfig(), tmp_path), random.Random(0)
    whole = path.read_bytes()
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"config\.resolved\.toml"):
            read_resolved(GenerateConfig, tmp_path)


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_resolved(GenerateConfig(), tmp_path)
    before = path.read_bytes()

    def full_disk(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match=path.name) as error:
        save_resolved(GenerateConfig(sampling=GenerateSampling(n=2)), tmp_path)
    assert error.value.errno == errno.ENOSPC
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def test_settings_under_their_older_names_open(tmp_path: Path) -> None:
    """`file` is `rows`, `rows` is `prompts`, `dir` is `out`; today's name counts over the older."""
    old = tmp_path / "old.toml"
    text = '[model]\nname = "m"\n[data]\nfile = "a.jsonl"\n[run]\ndir = "old"\n'
    old.write_text(text + '[validation]\nevery = 1\nfile = "b.jsonl"\nrows = 7\n')
    config = load_config(TrainConfig, [old])
    assert (config.data.rows, config.data.prompts, config.run.out) == ("a.jsonl", None, Path("old"))
    assert (config.validation.rows, config.validation.prompts) == ("b.jsonl", 7)
    config = load_config(TrainConfig, [old], ["--out=new", "--rows=c.jsonl"])
    assert (config.data.rows, config.run.out) == ("c.jsonl", Path("new"))
