"""config.resolved.toml: complete, exact, written whole."""

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("tomli_w")
pytest.importorskip("hypothesis")

from hypothesis import given
from hypothesis import strategies as st

from sparrow.config import (
    GenerateConfig,
    GenerateSampling,
    ModelConfig,
    RunConfig,
    load_config,
    save_resolved,
)

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)
devices = st.sampled_from(["auto", "cpu", "cuda", "cuda:3"])


@st.composite
def samplings(draw: st.DrawFn) -> GenerateSampling:
    max_tokens = draw(st.integers(1, 2**31 - 1))
    return GenerateSampling(
        n=draw(st.integers(1, 100)),
        temperature=draw(st.floats(0.001, 1e6)),
        top_k=draw(st.just(0) | st.integers(2, 100)),
        top_p=draw(st.floats(1e-6, 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple)),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
    )


configs = st.builds(
    GenerateConfig,
    model=st.builds(ModelConfig, name=texts, device=devices),
    sampling=samplings(),
    run=st.builds(RunConfig, dir=st.none() | texts.map(Path)),
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
    assert set(table["sampling"]) == {field.name for field in fields(GenerateSampling)} - {"seed"}
    assert table["model"] == {"name": "smollm2-135m", "dtype": "auto", "device": "auto"}
    assert table["run"] == {}


def test_a_failed_write_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_resolved(GenerateConfig(), tmp_path)
    before = path.read_bytes()

    def full_disk(self: Path, data: Any) -> None:
        self.touch()
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    with pytest.raises(OSError, match="no space left"):
        save_resolved(GenerateConfig(sampling=GenerateSampling(n=2)), tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before
