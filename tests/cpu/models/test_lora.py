"""Adapters: what merged weights would compute, per token; PEFT's files in and out, or a refusal."""

import copy
import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.specs import TINY

from sparrow import models
from sparrow.models.attention import Packed
from sparrow.models.lora import FUSED, MODULES, Adapter, AdapterBank, MergedDecoder
from sparrow.models.spec import ModelSpec

CPU: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
LENGTH = 40
Q0 = "model.layers.0.self_attn.q_proj"


def spec_of(family: str) -> ModelSpec:
    return replace(TINY, family=family)


def model_of(family: str) -> models.Decoder:
    """Weights and biases large enough that mistakes show."""
    model = models.random(spec_of(family), seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, view in models.hf_views(model).items():
        view.normal_(1.0 if "norm" in name else 0.0, 0.1, generator=generator)
    return model


@pytest.fixture(params=["qwen3", "qwen2", "llama"])
def model(request: pytest.FixtureRequest) -> models.Decoder:
    return model_of(request.param)


@pytest.fixture
def spec() -> ModelSpec:
    return TINY


def forward(model: models.Decoder, lora: Any = None, lengths: Iterable[int] = (LENGTH,)) -> Any:
    """Hidden states of equal prompts, cut to the lengths and packed."""
    tokens = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(7))
    ids = torch.cat([tokens[:length] for length in lengths])
    positions = torch.cat([torch.arange(length) for length in lengths])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return model(ids, positions, Packed(bounds=bounds), lora)


def merge(model: models.Decoder, adapter: Adapter) -> models.Decoder:
    """The model with W + scale B A, written by Hugging Face names from PEFT's names alone."""
    views, tensors = models.hf_views(model), adapter.tensors()
    for name, a in tensors.items():
        if ".lora_A." in name:
            b = tensors[name.replace("lora_A", "lora_B")]
            scale = adapter.alpha / (math.sqrt(len(a)) if adapter.rslora else len(a))
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            views[target] += scale * (b @ a)
    return model


def bank_of(*adapters: Adapter, capacity: int = 3, max_rank: int = 8) -> AdapterBank:
    bank = AdapterBank(adapters[0].spec, capacity, max_rank, torch.float32, "cpu")
    for slot, adapter in enumerate(adapters, start=1):
        assert bank.put(f"adapter {slot}", adapter).slot == slot
    return bank


def rows(*counts: int) -> torch.Tensor:
    """counts[i] tokens of slot i."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def mixed(spec: ModelSpec) -> Adapter:
    """An adapter of several ranks: 4 on q and up, 2 on the last layer's down."""
    wide = Adapter.random(spec, 4, modules=("q_proj", "up_proj"), seed=3, b_std=0.1)
    narrow = Adapter.random(spec, 2, modules=("down_proj",), layers=[2], seed=4, b_std=0.1)
    return Adapter.from_state(spec, wide.tensors() | narrow.tensors(), alpha=6, **CPU)


SUBSETS: list[dict[str, Any]] = [
    {},
    {"modules": ("q_proj", "v_proj")},
    {"modules": ("k_proj", "down_proj"), "layers": [1]},
    {"modules": ("o_proj", "up_proj"), "layers": [0, 2]},
    *({"modules": (module,)} for module in MODULES),
]


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_equals_merged_weights(family: str) -> None:
    """Any subset of modules and layers, ranks that differ within an adapter, both scales."""
    spec = spec_of(family)
    tensors = mixed(spec).tensors()
    adapters = [Adapter.random(spec, 4, alpha=6, b_std=0.1, **subset) for subset in SUBSETS]
    adapters += [
        Adapter.from_state(spec, tensors, alpha=6, rslora=rslora, **CPU) for rslora in (False, True)
    ]
    for adapter in adapters:
        model = model_of(family)
        plain = forward(model)
        alone = forward(model, adapter)
        banked = forward(model, bank_of(adapter).rows(rows(0, LENGTH)))
        merged = forward(merge(model, adapter))
        assert (merged - plain).abs().max() > 0.01  # the comparison has something to compare
        torch.testing.assert_close(alone, merged, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(banked, merged, atol=2e-5, rtol=1e-5)


@torch.no_grad()
def test_rows_without_adapter_are_untouched(model: models.Decoder) -> None:
    bank = bank_of(Adapter.random(model.spec, 4, b_std=0.1))
    nobody = forward(model, bank.rows(rows(LENGTH)))
    assert torch.equal(nobody, forward(model))
    unused = AdapterBank(model.spec, 10**6, 10**6, torch.float32, "cpu")  # takes no memory
    assert unused.rows(rows(LENGTH)) is None
    new = Adapter.random(model.spec, 4, b_std=0.0)
    assert torch.equal(forward(model, new), forward(model))
    beside = forward(model, bank.rows(rows(LENGTH, 25)), (LENGTH, 25))[:LENGTH]
    assert torch.equal(beside, forward(model, None, (LENGTH, 25))[:LENGTH])


@torch.no_grad()
def test_slots_are_replaced_and_dropped_in_place() -> None:
    model = model_of("qwen3")
    first, second = (Adapter.random(model.spec, 4, seed=seed, b_std=0.1) for seed in (1, 2))
    bank = bank_of(first, mixed(model.spec))
    lora = bank.rows(rows(0, LENGTH))
    assert lora is not None
    addresses = [t.data_ptr() for stacks in lora.stacks.values() for t in stacks]

    assert all(lora.update(0, name).rank == 16 for name in FUSED)  # room for 8, whole blocks
    bank.put("adapter 1", mixed(model.spec))  # smaller: nothing of the first may stay behind
    torch.testing.assert_close(forward(model, lora), forward(model, mixed(model.spec)))
    bank.put("adapter 1", second)
    torch.testing.assert_close(forward(model, lora), forward(model, second), atol=2e-5, rtol=1e-5)
    bank.drop("adapter 1")
    assert torch.equal(forward(model, lora), forward(model))
    other = forward(model, bank.rows(rows(0, 0, LENGTH)))
    torch.testing.assert_close(other, forward(model, mixed(model.spec)), atol=2e-5, rtol=1e-5)
    assert addresses == [t.data_ptr() for stacks in lora.stacks.values() for t in stacks]


def test_bank_refuses(spec: ModelSpec) -> None:
    bank, halves = (AdapterBank(spec, 2, 4, t, "cpu") for t in (torch.float32, torch.float16))
    broken = Adapter.random(spec, 4)
    broken.tensors()[f"base_model.model.{Q0}.lora_B.weight"][0, 0] = math.nan
    for field, call in (
        ("max_rank", lambda: bank.put("a", Adapter.random(spec, 5))),
        ("spec", lambda: bank.put("a", Adapter.random(spec_of("llama"), 4))),
        ("rows", lambda: bank.rows(torch.tensor([0, 1]))),
        ("lora_B", lambda: bank.put("a", broken)),
        ("capacity", lambda: AdapterBank(spec, 0, 4, torch.float32, "cpu")),
        ("lora_B.*float16", lambda: halves.put("a", Adapter.random(spec, 4, alpha=1e9))),
    ):
        with pytest.raises(ValueError, match=field):
            call()


def test_gradients_are_those_of_merged_weights(model: models.Decoder) -> None:
    """dL/dB = scale dL/dW A^T and dL/dA = scale B^T dL/dW, with dL/dW of the merged model."""
    adapter = Adapter.random(model.spec, 4, alpha=6, b_std=0.1)
    for tensor in adapter.tensors().values():
        assert tensor.is_leaf
        tensor.requires_grad_()
    model.logits(forward(model, adapter)).square().mean().backward()

    with torch.no_grad():
        merge(model, adapter)
    model.zero_grad()
    model.logits(forward(model)).square().mean().backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad  # so that the Hugging Face views show gradients
    dense = models.hf_views(model)
    for place, (a, b) in adapter.pairs.items():
        grad = dense[f"model.{place.path}.weight"] * 1.5
        close = {"atol": 1e-4 * float(grad.abs().max()), "rtol": 1e-3}
        torch.testing.assert_close(b.grad, grad @ a.detach().T, **close)
        torch.testing.assert_close(a.grad, b.detach().T @ grad, **close)


def test_save_and_load(spec: ModelSpec, tmp_path: Path) -> None:
    """By PEFT's names; a module that not all layers have is named whole."""
    place = "layers.1.self_attn.o_proj"
    single = Adapter.random(spec, 4, modules=["o_proj"], layers=[1])
    assert single.tensors().keys() == {
        f"base_model.model.model.{place}.lora_{matrix}.weight" for matrix in "AB"
    }
    adapters = (single, Adapter.random(spec, 4), mixed(spec))
    for adapter, rslora in product(adapters, (False, True)):
        tensors = adapter.tensors()
        saved = Adapter.from_state(spec, tensors, alpha=6, rslora=rslora, **CPU)
        for tensor in saved.tensors().values():
            tensor.requires_grad_()
        folder = saved.save(tmp_path / "adapter")
        config = json.loads((folder / "adapter_config.json").read_text())
        assert adapter is not single or config["target_modules"] == [place]
        assert load_file(folder / "adapter_model.safetensors").keys() == tensors.keys()
        loaded = Adapter.load(folder, spec, **CPU)
        assert (loaded.alpha, loaded.rslora, loaded.rank) == (6, rslora, 4)
        for name, tensor in loaded.tensors().items():
            assert torch.equal(tensor, tensors[name])


def test_names_as_peft_writes_them(spec: ModelSpec) -> None:
    tensors = Adapter.random(spec, 4).tensors()
    for prefix, suffix in product(("", "base_model.model."), ("", ".default")):
        renamed = {
            name.replace("base_model.model.", prefix).replace(".weight", f"{suffix}.weight"): tensor
            for name, tensor in tensors.items()
        }
        got = Adapter.from_state(spec, renamed, alpha=4, **CPU).tensors()
        assert got.keys() == tensors.keys()
        assert all(torch.equal(got[name], tensors[name]) for name in tensors)


A, B = (f"{Q0}.lora_{matrix}.weight" for matrix in "AB")
GOOD = {A: torch.zeros(4, 32), B: torch.zeros(64, 4)}
WRONG_TENSORS: list[tuple[dict[str, Any], str]] = [
    ({}, "no tensors"),
    ({A: GOOD[A]}, B),
    ({B: GOOD[B]}, A),
    ({**GOOD, A: torch.zeros(4, 31)}, A),
    ({**GOOD, A: torch.zeros(32)}, A),
    ({A: torch.zeros(0, 32), B: torch.zeros(64, 0)}, A),
    ({**GOOD, B: torch.zeros(64, 3)}, B),
    ({**GOOD, B: torch.zeros(32, 4)}, B),
    ({**GOOD, A: torch.zeros(4, 32, dtype=torch.int8)}, A),
    ({**GOOD, f"base_model.model.{A}": GOOD[A]}, A),
    ({**GOOD, A.replace("layers.0", "layers.3"): GOOD[A]}, "layers.3"),
    ({**GOOD, f"{Q0}.lora_magnitude_vector": GOOD[A]}, "lora_magnitude_vector"),
    ({**GOOD, f"{Q0}.bias": GOOD[A]}, "q_proj.bias"),
    ({"lm_head.lora_A.weight": GOOD[A]}, "lm_head.lora_A.weight"),
    ({A.replace("self_attn", "mlp"): GOOD[A]}, "mlp.q_proj.lora_A.weight"),
]


def test_wrong_tensors_and_numbers_are_named(spec: ModelSpec) -> None:
    for tensors, field in WRONG_TENSORS:
        with pytest.raises(ValueError, match=field):
            Adapter.from_state(spec, tensors, alpha=4, **CPU)
    for alpha in (math.nan, math.inf, True, "4", None):
        with pytest.raises(ValueError, match="alpha"):
            Adapter.from_state(spec, GOOD, alpha=alpha, **CPU)


WRONG_KEYS: list[tuple[str, Any]] = [
    ("peft_type", "LOHA"),
    ("bias", "all"),
    ("modules_to_save", ["lm_head"]),
    ("use_dora", True),
    ("kasa_config", {"beta": 1.0}),
    ("alpha_pattern", {"q_proj": 3}),
    ("init_lora_weights", "pissa"),
    ("lora_alpha", None),
    ("lora_alpha", 10**400),
    ("r", None),
    ("r", 8),
    ("rank_pattern", {"q_proj": [4]}),
    ("target_modules", ["q_proj", None]),
    ("target_modules", ["q_proj", "lm_head"]),
    ("target_modules", ["q_proj", "v_proj"]),
    ("use_rslora", "no"),
]


def test_a_folder_with_nan_is_refused_by_name(spec: ModelSpec, tmp_path: Path) -> None:
    adapter = Adapter.random(spec, 4)
    next(iter(adapter.tensors().values()))[0, 0] = torch.nan
    adapter.save(tmp_path / "broken")
    with pytest.raises(ValueError, match=r"broken.*not finite"):
        Adapter.load(tmp_path / "broken", spec, dtype=torch.float32, device="cpu")


def test_what_is_not_plain_lora_is_refused(spec: ModelSpec, tmp_path: Path) -> None:
    """By key, or by file where one cannot be read; settings that change nothing are accepted."""
    folder = Adapter.random(spec, 4, modules=["q_proj"]).save(tmp_path)
    (folder / "SHA256SUMS").unlink()
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    config, content = json.loads(file.read_text()), weights.read_bytes()
    nothing = {"lora_dropout": 0.1, "init_lora_weights": "gaussian"}
    file.write_text(json.dumps({**config, "target_modules": ".*q_proj", **nothing}))
    assert len(Adapter.load(folder, spec, **CPU).pairs) == 3
    for key, value in WRONG_KEYS:
        file.write_text(json.dumps({**config, key: value}))
        with pytest.raises(ValueError, match=key.removeprefix("lora_")) as caught:
            Adapter.load(folder, spec, **CPU)
        assert str(folder) in str(caught.value)
    file.write_text(json.dumps(config))
    for damaged, damage in (
        (weights, lambda: weights.write_bytes(content[:-8])),
        (weights, weights.unlink),
        (file, lambda: file.write_text("[]")),
        (file, file.unlink),
    ):
        damage()
        with pytest.raises(ValueError, match=damaged.name):
            Adapter.load(folder, spec, **CPU)


def test_bf16_rows_follow_the_fp32_adapter() -> None:
    """bf16 weights and bank, fp32 adapter: the error is bf16's, not a lost adapter."""
    model = model_of("qwen3")
    adapter = Adapter.random(model.spec, 4, alpha=6, b_std=0.1)
    bank = AdapterBank(model.spec, 2, 8, torch.bfloat16, "cpu")
    bank.put("one", Adapter.random(model.spec, 4))
    bank.put("two", adapter)
    with torch.no_grad():
        exact, plain = forward(model, adapter), forward(model)
        got = forward(model.bfloat16(), bank.rows(rows(0, 0, LENGTH))).float()
    assert (got - exact).abs().mean() < 0.1 * (plain - exact).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merged_decoder_shares_what_the_adapter_leaves_alone(dtype: torch.dtype) -> None:
    """W + scale B A is rounded once; renewed in place, after the weights or the adapter changed."""
    model = model_of("qwen2").to(dtype)
    adapter = Adapter.random(model.spec, 4, b_std=0.3, modules=("k_proj", "down_proj"), layers=[1])
    merged = MergedDecoder(model, adapter)
    assert sum(weight.nbytes for weight in merged.decoder.layers[1].mlp.down.parameters()) == 0
    merged.allocate()
    own = {id(weight) for weight in merged.decoder.parameters()}
    assert len(own - {id(weight) for weight in model.parameters()}) == 2  # qkv and down
    places = [weight.data_ptr() for weight in merged.decoder.parameters()]
    zero = Adapter.random(model.spec, 4, b_std=0.0, modules=("k_proj", "down_proj"), layers=[1])
    for one, edition in ((adapter, 0), (zero, 0), (adapter, 1)):
        if edition != model.edition:
            model.edition = edition
            for view in models.hf_views(model).values():
                view.mul_(1.5)
        assert merged.load(one)
        merged.renew()
        expected = models.hf_views(merge(copy.deepcopy(model).float(), one).to(dtype))
        for name, view in models.hf_views(merged.decoder).items():
            assert torch.equal(view, expected[name]), name
        assert [weight.data_ptr() for weight in merged.decoder.parameters()] == places
    assert not merged.load(Adapter.random(model.spec, 4, modules=("q_proj",)))
    merged.free()
    assert model.layers[1].mlp.down.weight.numel()


def test_peft_reads_what_we_save_and_agrees(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = model_of("qwen3")
    models.save(model, tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(64, (LENGTH,), generator=torch.Generator().manual_seed(7))
    for number, adapter in enumerate((Adapter.random(model.spec, 4, alpha=6), mixed(model.spec))):
        folder = adapter.save(tmp_path / f"adapter{number}")
        wrapped = peft.PeftModel.from_pretrained(theirs, folder).eval()
        with torch.no_grad():
            expected = wrapped(tokens[None]).logits[0]
            torch.testing.assert_close(
                model.logits(forward(model, adapter)), expected, atol=1e-4, rtol=1e-4
            )
        wrapped.save_pretrained(tmp_path / f"again{number}")
        again = Adapter.load(tmp_path / f"again{number}", model.spec, **CPU).tensors()
        assert all(torch.equal(again[name], t) for name, t in adapter.tensors().items())
        theirs = wrapped.unload()
