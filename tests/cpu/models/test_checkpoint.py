"""Loading whole or not at all, saving what transformers loads, and the errors on the way."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sparrow import models
from sparrow.models import weights
from sparrow.models.attention import Packed
from sparrow.models.sources import SHIPPED
from sparrow.models.spec import Rope, spec_from_hf, spec_to_hf
from sparrow_recipes.warmup.training import narrowed

IDS = torch.arange(30) % 50
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DEEP = '{"weight_map":' + "[" * 100_000


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


def test_published_shapes_and_random_weights() -> None:
    found = {name: round(spec.parameters() / 1e6) for name, spec in models.SHAPES.items()}
    assert found == PUBLISHED
    for name, spec in models.SHAPES.items():
        assert spec_from_hf(spec_to_hf(spec, "bfloat16"), name) == spec
    assert sum(weight.numel() for weight in tiny().parameters()) == tiny().spec.parameters()
    assert torch.equal(tiny().head, tiny().head)
    assert not torch.equal(tiny().head, models.random(tiny().spec, seed=2).head)


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
    (lambda f: (f / "config.json").write_text(DEEP), "config.json"),
    (lambda f: (f / "generation_config.json").write_text(DEEP), "generation_config.json"),
    (lambda f: (f / INDEX).touch(), INDEX),
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
    """The index names files of its folder, all of which are there; or nothing is loaded."""
    monkeypatch.setattr(weights, "SHARD_BYTES", 20_000)
    model = tiny()
    place = without_digests(models.save(model, tmp_path / "out"))
    files = sorted(place.glob("*.safetensors"))
    assert len(files) > 2
    assert torch.equal(logits_of(models.load(place, device="cpu")), logits_of(model))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    with torch.no_grad():
        assert (theirs(IDS[None]).logits[0] - logits_of(model)).abs().max() < 1e-4
    files[0].unlink()
    with pytest.raises(ValueError, match=files[0].name):
        models.load(place, device="cpu")
    outside = ("/etc/x.safetensors", "../x.safetensors", "a/x.safetensors", "..", "x.bin", "")
    indices = [{"weight_map": {"model.norm.weight": name}} for name in (*outside, 5, [], {})]
    for content in (*map(json.dumps, indices), "{}", DEEP):
        (place / INDEX).write_text(content)
        with pytest.raises(ValueError, match=re.escape(str(place / INDEX))):
            models.load(place, device="cpu")


def test_what_cannot_be_loaded_is_named(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    cases: list[tuple[Any, dict[str, str], str]] = [
        ("gpt-7", {}, r"gpt-7.*smollm2"),
        ("~nobody-here/x", {}, "nobody-here"),
        (tmp_path, {}, "config"),
        ("Qwen/Qwen3-0.6B", {}, "Qwen/Qwen3"),
        (saved, {"device": "cpu", "dtype": "int8"}, "dtype"),
        (saved, {"device": "abacus"}, "abacus"),
    ]
    if not torch.cuda.is_available():
        cases.append((saved, {"device": "cuda"}, "cuda"))
    for name, settings, told in cases:
        with pytest.raises(ValueError, match=told):
            models.load(name, **settings)


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


# Damage.

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


LARGE = [10**9, 10**12, 10**30, 10**400]


def test_values_of_another_kind_or_size_are_refused_by_key() -> None:
    """The file alone is read: a config that passes still meets its weights in `load`."""
    for key in KEYS:
        for value in (*ODD, *LARGE):
            said = ""
            try:
                spec_from_hf({**CONFIG, key: value}, "some file")
            except ValueError as error:
                said = str(error)
            assert said == "" or "some file" in said, (key, value)
            if isinstance(value, str | list | dict) and value not in ("", "x", "2", [], {}):
                assert ("rope" if "rope" in key else key) in said, (key, value)
            if key in KEYS[3:11] and value in LARGE:  # they would take all memory
                assert f"some file: {key}" in said, (key, value)


def test_damaged_weights_are_refused_by_name(saved: Path) -> None:
    draw, file = random.Random(3), saved / WEIGHTS
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for number in range(30):
        place = draw.randrange(header)
        flipped = bytes([whole[place] ^ 1 << draw.randrange(8)])
        cut = number % 3 == 0
        content = whole[:place] + flipped + whole[place + 1 :]
        file.write_bytes(whole[: draw.randrange(len(whole))] if cut else content)
        said = ""
        try:
            models.load(saved, device="cpu")
        except ValueError as error:
            said = str(error)
        assert str(saved) in said or not (said or cut)


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
    models.save(models.load("tiny", device="cpu"), target)
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


# Narrower models.


def test_the_heaviest_channels_stay_in_their_order() -> None:
    """By the product of the three norms; every layer for itself, all else untouched."""
    model = tiny(dtype=torch.bfloat16)
    spec = replace(model.spec, intermediate=20, max_positions=512)
    small = narrowed(model, spec)
    assert (small.spec, small.dtype) == (spec, torch.bfloat16)
    ours, theirs = models.hf_views(small), models.hf_views(model)
    for layer in range(2):
        names = [f"model.layers.{layer}.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
        weight = torch.ones(48, dtype=torch.float64)
        for name in names:
            weight *= theirs[name].double().norm(dim=int("down" not in name))
        keep = weight.topk(20).indices.sort().values
        for name in names:
            theirs[name] = theirs[name].index_select(int("down" in name), keep)
    for name, view in theirs.items():
        assert torch.equal(ours[name], view), name
    changes: list[dict[str, Any]] = [{"intermediate": 49}, {"layers": 1}, {"family": "llama"}]
    for change in changes:
        with pytest.raises(ValueError, match="differ"):
            narrowed(model, replace(spec, max_positions=128, **change))
