"""litellm against a server. Arguments: key, address, model."""

import importlib.metadata
import json
import sys
from typing import Any

import litellm

KEY, URL, MODEL = sys.argv[1:]
GIVEN: dict[str, Any] = {"base_url": URL, "api_key": KEY, "temperature": 0, "max_tokens": 12}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]

chat = f"openai/{MODEL}"
whole = litellm.completion(model=chat, messages=QUESTION, **GIVEN)
said, usage, streamed = whole.choices[0].message.content, None, ""
options = {"include_usage": True}
for chunk in litellm.completion(
    model=chat, messages=QUESTION, stream=True, stream_options=options, **GIVEN
):
    streamed += (chunk.choices[0].delta.content or "") if chunk.choices else ""
    usage = getattr(chunk, "usage", None) or usage
assert streamed == said
assert usage.completion_tokens == whole.usage.completion_tokens
text = litellm.text_completion(
    model=f"text-completion-openai/{MODEL}", prompt="The capital of France is", logprobs=2, **GIVEN
)
assert len(text.choices[0].logprobs.tokens) == text.usage.completion_tokens
for kind, changes in (
    (litellm.NotFoundError, {"model": "openai/another"}),
    (litellm.AuthenticationError, {"api_key": "wrong"}),
    (litellm.BadRequestError, {"response_format": {"type": "json_object"}}),
):
    try:
        litellm.completion(**{"model": chat, "messages": QUESTION, **GIVEN} | changes)
    except kind:
        continue
    raise AssertionError(f"not refused: {changes}")
print(json.dumps({"version": importlib.metadata.version("litellm"), "said": said}))
