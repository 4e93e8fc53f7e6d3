"""inspect-ai with a task of one sample against a server. Arguments: key, address, model."""

import importlib.metadata
import json
import sys

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import get_model
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import Tool, tool

KEY, URL, MODEL = sys.argv[1:]


@tool
def weather() -> Tool:
    async def execute(city: str) -> str:
        """Say what the weather is like.

        Args:
            city: Name of the city.
        """
        return f"It is sunny in {city}."

    return execute


# By default it asks for strict tools, which the server refuses: decoding is not constrained.
model = get_model(f"openai-api/sparrow/{MODEL}", base_url=URL, api_key=KEY, strict_tools=False)
sample = Sample(input="What is the capital of France?", target="Paris")
settings = {"temperature": 0.0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2}
answers, calls = [], 0
for solver in ([generate()], [use_tools(weather()), generate()]):
    task = Task(dataset=[sample], solver=solver, scorer=includes())
    (log,) = eval(task, model=model, display="none", log_dir="logs", max_retries=0, **settings)
    assert log.status == "success", log.error
    answers.append(log.samples[0].output.completion)
    calls += sum(message.role == "tool" for message in log.samples[0].messages)
    assert log.samples[0].output.choices[0].logprobs.content
made = {"version": importlib.metadata.version("inspect-ai"), "said": answers[0], "calls": calls}
print(json.dumps(made))
