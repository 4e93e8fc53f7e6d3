"""Loading whole or not at all, saving what transformers loads, and the errors on the way."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sparrow import models
from sparrow.models import weights
from sparrow.models.attention import Packed
from sparrow.models.spec import spec_from_hf, spec_to_hf

IDS = torch.arange(30) % 50
WEIGHTS = "model.safetensors"


@torch.no_grad()
def logits_of(model: models.Decoder) -> torch.Tensor:
    return model.logits(model(IDS, torch.arange(30), Packed(bounds=torch.tensor([0, 30]))))


def tiny(**changes: Any) -> models.Decoder:
    small = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}
    spec = {**small, "head_size": 8, "vocabulary": 64, "max_positions": 128, **changes}
    return models.random("qwen3-0.6b", seed=1, **spec)


def without_digests(folder: Path) -> Path:
    """As other programs write a folder, and as one that is edited by hand has to be."""
    (folder / "SHA256SUMS").unlink()
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return without_digests(models.save(tiny(), tmp_path / "saved"))


def test_save_then_transformers_gives_equal_logits(variant: str, folder: Path, tmp_path) -> None:
    model = models.load(folder, device="cpu")
    place = models.save(model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(IDS[None]).logits[0] - logits_of(model)).abs().max() < 1e-4
    again = models.load(place, device="cpu")
    assert again.spec == model.spec
    assert torch.equal(logits_of(again), logits_of(model))


def test_tokenizer_and_chat_template_travel(saved: Path, tmp_path: Path) -> None:
    (saved / "tokenizer.json").write_text('{"some": "tokenizer"}')
    (saved / "tokenizer_config.json").write_text("{}")
    (saved / "chat_template.jinja").write_text("{{ messages }}")
    (saved / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    model = models.load(saved, device="cpu")
    assert model.spec.eos_ids == (7, 8)
    place = models.save(model, tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (place / name).read_bytes() == (saved / name).read_bytes()


def test_views_share_memory_with_the_fused_weights() -> None:
    model = tiny()
    views = models.hf_views(model)
    before = logits_of(model)
    views["model.layers.1.self_attn.k_proj.weight"].mul_(2)
    views["model.layers.0.mlp.up_proj.weight"][3] = 0
    assert not torch.equal(logits_of(model), before)
    assert sum(view.numel() for view in views.values()) == model.spec.parameters()
    assert sum(weight.numel() for weight in model.parameters()) == model.spec.parameters()


PUBLISHED = {  # millions of weights, from the model cards
    "qwen3-0.6b": 596,
    "qwen3-1.7b": 1721,
    "qwen3-4b": 4022,
    "qwen3-8b": 8191,
    "qwen3-14b": 14768,
    "qwen2.5-0.5b": 494,
    "qwen2.5-1.5b": 1544,
    "qwen2.5-3b": 3086,
    "qwen2.5-7b": 7616,
    "llama-3.2-1b": 1236,
    "llama-3.2-3b": 3213,
    "llama-3.1-8b": 8030,
    "smollm2-135m": 135,
    "smollm2-360m": 362,
    "smollm2-1.7b": 1711,
}


def test_published_shapes_have_their_published_size() -> None:
    assert {name: round(spec.parameters() / 1e6) for name, spec in models.SHAPES.items()} == (
        PUBLISHED
    )
    for name, spec in models.SHAPES.items():
        assert spec_from_hf(spec_to_hf(spec, "bfloat16"), name) == spec


def test_random_weights_follow_the_seed() -> None:
    assert torch.equal(tiny().head, tiny().head)
    assert not torch.equal(tiny().head, models.random(tiny().spec, seed=2).head)
    with pytest.raises(ValueError, match=r"qwen9.*qwen3"):
        models.random("qwen9")


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)

    return edit


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))

    return edit


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
BROKEN_FILES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda f: os.truncate(f / WEIGHTS, (f / WEIGHTS).stat().st_size - 100), WEIGHTS),
    (lambda f: (f / WEIGHTS).write_bytes(b"not a tensor file at all"), WEIGHTS),
    (lambda f: (f / WEIGHTS).unlink(), WEIGHTS),
    (lambda f: (f / "config.json").unlink(), "config.json"),
    (lambda f: (f / "config.json").write_text("{"), "config.json"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json"),
    (edit_tensors(lambda t: t.pop(K_PROJ)), K_PROJ),
    (edit_tensors(lambda t: t.update({K_PROJ: torch.zeros(3, 5)})), K_PROJ),
    (edit_tensors(lambda t: t.update({K_PROJ: torch.zeros(16, 32, dtype=torch.int8)})), K_PROJ),
    (edit_tensors(lambda t: t.update({"model.vision.weight": torch.zeros(1)})), "model.vision"),
]
BROKEN_CONFIGS: list[dict[str, Any]] = [  # the first key is the one that is named
    {"model_type": "mamba"},
    {"num_attention_heads": 4, "num_key_value_heads": 3},
    {"num_attention_heads": 0, "head_dim": None},
    {"architectures": ["Qwen3ForSequenceClassification"]},
    {"num_key_value_heads": None},
    {"eos_token_id": 99},
    {"rope_theta": -4},
    {"hidden_act": "gelu"},
    {"use_sliding_window": True},
    {"layer_types": ["sliding_attention"]},
    {"partial_rotary_factor": 0.5},
]
BROKEN_ROPES = [
    ({"rope_type": "linear", "factor": "2"}, "rope_scaling.factor"),
    ({"rope_type": "dynamic", "factor": 2.0}, "dynamic"),
    ({"type": "linear"}, "factor"),
]


def test_broken_folders_are_refused_by_name(saved: Path, tmp_path: Path) -> None:
    cases = [
        *BROKEN_FILES,
        *((edit_config(**changes), next(iter(changes))) for changes in BROKEN_CONFIGS),
        *((edit_config(rope_scaling=rope), field) for rope, field in BROKEN_ROPES),
    ]
    for number, (breaks, field) in enumerate(cases):
        breaks(place := shutil.copytree(saved, tmp_path / str(number)))
        with pytest.raises(ValueError, match=re.escape(field)) as refused:
            models.load(place, device="cpu")
        assert str(place) in str(refused.value)


def test_a_tied_model_may_store_its_head_again_but_no_other(tmp_path: Path) -> None:
    model = tiny(tied=True)
    place = without_digests(models.save(model, tmp_path / "tied"))
    head = {"lm_head.weight": model.head.detach().clone()}
    edit_tensors(lambda t: t.update(head))(place)
    assert torch.equal(logits_of(models.load(place, device="cpu")), logits_of(model))
    edit_tensors(lambda t: t.update({name: 2 * w for name, w in head.items()}))(place)
    with pytest.raises(ValueError, match="lm_head"):
        models.load(place, device="cpu")


def test_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    model = tiny()
    place = without_digests(models.save(model, tmp_path / "out"))
    assert len(list(place.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(models.load(place, device="cpu")), logits_of(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(IDS[None]).logits[0] - logits_of(model)).abs().max() < 1e-4
    copy = shutil.copytree(place, tmp_path / "copy")
    sorted(copy.glob("*.safetensors"))[0].unlink()
    with pytest.raises(ValueError, match=r"model-0000\d-of"):
        models.load(copy, device="cpu")
    (place / WEIGHTS).touch()
    with pytest.raises(ValueError, match="index"):
        models.load(place, device="cpu")
    (place / WEIGHTS).unlink()
    (place / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="weight_map"):
        models.load(place, device="cpu")


def test_unknown_names_say_what_is_known(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gpt-7.*smollm2"):
        models.load("gpt-7")
    with pytest.raises(ValueError, match="nobody-here"):
        models.load("~nobody-here/x")
    with pytest.raises(ValueError, match="config"):
        models.load(tmp_path)


def test_a_hub_name_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="Qwen/Qwen3"):
        models.load("Qwen/Qwen3-0.6B")


def test_devices_and_dtypes_are_checked(saved: Path) -> None:
    with pytest.raises(ValueError, match="dtype"):
        models.load(saved, device="cpu", dtype="int8")
    with pytest.raises(ValueError, match="abacus"):
        models.load(saved, device="abacus")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="cuda"):
            models.load(saved, device="cuda")


def test_saving_never_overwrites(saved: Path) -> None:
    with pytest.raises(ValueError, match="saved"):
        models.save(tiny(), saved)
    (saved.parent / "empty").mkdir()
    models.save(tiny(), saved.parent / "empty")
    assert not [p for p in saved.parent.iterdir() if p.name.startswith(".")]


MEMORY = """
import sys
from sparrow import models
models.load(sys.argv[1], device="cpu", dtype="float32")  # what is loaded once is loaded
def resident(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
base = resident("VmRSS")
model = models.load(sys.argv[2], device="cpu", dtype="float32")
print(resident("VmHWM") - base, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
def test_loading_holds_no_second_copy(saved: Path, tmp_path: Path) -> None:
    """bf16 files into fp32 memory: beyond the model, the mapped files and less than a quarter."""
    big = tiny(layers=8, hidden=512, intermediate=2048, vocabulary=4096, dtype=torch.bfloat16)
    place = models.save(big, tmp_path / "big")
    code = [sys.executable, "-c", MEMORY, str(saved), str(place)]
    peak, size = map(int, subprocess.run(code, capture_output=True, check=True).stdout.split())
    assert size > 100e6
    assert peak < 1.75 * size
