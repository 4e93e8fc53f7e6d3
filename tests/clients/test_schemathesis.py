"""Requests that schemathesis generates from the OpenAPI document of the server.

SCHEMATHESIS_EXAMPLES: of each route, 100 by default.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.serving import Running, serving
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from sparrow import models

pytestmark = pytest.mark.skipif(
    "SPARROW_CLIENTS" not in os.environ, reason="no environments of clients: make test-clients"
)
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_headers_conformance", "response_schema_conformance"),
    *("unsupported_method", "allow_header_conformance", "ignored_auth"),
)
KEY = "a-key-of-the-tests"
TEMPLATE = (
    "{# <think> #}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{{ tools | tojson if tools else '' }}"
)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a random model that reads any text and has a short context."""
    alphabet = ["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    bytewise = Tokenizer(BPE({text: token for token, text in enumerate(alphabet)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")
    tokenizer.chat_template = TEMPLATE
    shape = {"layers": 2, "hidden": 32, "intermediate": 48, "heads": 4, "kv_heads": 2}
    shape |= {"head_size": 16, "vocabulary": len(alphabet), "max_positions": 512}
    model = models.random("qwen3-0.6b", **shape, eos_ids=(0,), seed=3)
    folder = models.save(model, tmp_path_factory.mktemp("made") / "model", tokenizer=tokenizer)
    with serving(str(folder), name="bytes", api_key=KEY, max_n=8, max_context=96) as server:
        yield server


def test_schemathesis(running: Running, tmp_path: Path) -> None:
    program = Path(os.environ["SPARROW_CLIENTS"]) / "schemathesis" / "bin" / "schemathesis"
    if not program.exists():
        pytest.skip(f"no {program}")
    words = [program, "run", f"{running.root}/openapi.json", "--phases", "coverage,fuzzing"]
    words += ["--header", f"Authorization: Bearer {KEY}", "--checks", ",".join(CHECKS)]
    words += ["--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "100"), "--seed", "0"]
    words += ["--continue-on-failure", "--no-color"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    running.wait_until_free()
    answers = re.findall(
        r'sparrow_requests_total{route="(\S+)",status="(\d+)"} (\d+)',
        running.service.metrics.render().decode(),
    )
    print(answers)
    for route in ("/v1/completions", "/v1/chat/completions"):
        assert {status for path, status, _ in answers if path == route} >= {"200", "400"}
