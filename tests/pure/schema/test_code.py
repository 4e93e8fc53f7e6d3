"""Settings that name code: every one of them, and nothing else."""

from typing import Any, get_args, get_origin

from sparrow.schema.options import bare, section_fields, takes_text
from sparrow.schema.train import DATA, TrainConfig, code_settings

BASE: dict[str, dict[str, Any]] = {"model": {"name": "tiny"}, "data": {"file": "rows.jsonl"}}
CODE = {
    "data.code.sandbox",  # unsafe: programs are run without one
    "data.reward",
    "rollout.episode",
    "rollout.attention.flow",
    "algorithm.advantage",
    "algorithm.surrogate.use",
    "algorithm.aggregate",
    "algorithm.corrections.use",
    "dispatch.group_filter",
    "dispatch.order",
    "dispatch.prompt_filter",
}


def text_settings(kind: Any, key: str = "") -> set[str]:
    """Every setting that takes a text, by dotted key; those of lists without a number."""
    kind = bare(kind)
    if get_origin(kind) is tuple:
        return text_settings(get_args(kind)[0], key)
    fields = {name: inner for name, inner in section_fields(kind).items() if name != "settings"}
    if fields:
        dotted = {f"{key}.{name}" if key else name: inner for name, inner in fields.items()}
        parts = (text_settings(inner, place) for place, inner in dotted.items())
        return set().union(*parts)
    return {key} if takes_text(kind) else set()


def test_every_setting_that_takes_text_is_known_as_code_or_data() -> None:
    """A new one is added to DATA, or to CODE above, where its import path is tried below."""
    assert text_settings(TrainConfig) == CODE | DATA
    assert not CODE & DATA


def config(**changes: dict[str, Any]) -> TrainConfig:
    sections = {key: BASE.get(key, {}) | changes.get(key, {}) for key in {*BASE, *changes}}
    return TrainConfig.model_validate(sections)


def test_import_paths_are_listed() -> None:
    for path in ("module:function", "some/file.py:function", "flow.py"):
        found = code_settings(
            config(
                data={"reward": path, "code": {"sandbox": "unsafe"}},
                rollout={"episode": path, "attention": {"schedule": "a.json", "flow": path}},
                algorithm={
                    "advantage": path,
                    "surrogate": {"use": path},
                    "aggregate": path,
                    "corrections": ({"use": "token-tis"}, {"use": path}),
                },
                dispatch=dict.fromkeys(("prompt_filter", "group_filter", "order"), path),
            )
        )
        assert {key.replace("[1]", "") for key in found} == CODE
        assert "algorithm.corrections[1].use" in found
        assert set(found.values()) == {path, "unsafe"}


def test_names_of_the_package_and_data_are_no_code() -> None:
    odd = config(
        model={"name": "owner/name", "device": "cuda:1"},
        data={"file": "owner/rows:train", "reward": "math"},
        rollout={"attention": {"schedule": "odd:name.py", "flow": "fine_means(2)"}},
        algorithm={"surrogate": {"use": "ppo", "settings": {"mode": "a:b"}}},
        validation={"every": 1, "file": "held:out.py"},
        run={"name": "a.py"},
        dispatch={"prompt_filter": "greso", "prompt_settings": {"mode": "a:b"}},
        chat={"system": "Answer as: a module:function", "template": {"style": "a:b"}},
    )
    assert code_settings(odd) == {}
