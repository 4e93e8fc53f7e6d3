"""openai-agents with a function tool against a server. Arguments: key, address, model."""

import asyncio
import importlib.metadata
import json
import sys
from typing import Any

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool

KEY, URL, MODEL = sys.argv[1:]
# With a round of another question before it: without one, SmolLM2 makes no call.
CALL = {"call_id": "call_0", "name": "weather", "arguments": '{"city": "Rome"}'}
QUESTION: Any = [
    {"role": "user", "content": "What is the weather in Rome?"},
    {"type": "function_call", **CALL},
    {"type": "function_call_output", "call_id": "call_0", "output": "It is sunny in Rome."},
    {"role": "assistant", "content": "It is sunny in Rome."},
    {"role": "user", "content": "What is the weather in Paris?"},
]


def weather(city: str) -> str:
    """Say what the weather is like."""
    return f"It is raining in {city}."


def agent(*, strict: bool) -> Any:
    client = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    return Agent(
        name="weather",
        instructions="Be brief.",
        model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        tools=[function_tool(weather, strict_mode=strict)],
        model_settings=ModelSettings(max_tokens=48, temperature=0),
    )


async def main() -> dict[str, Any]:
    whole = await Runner.run(agent(strict=False), QUESTION, max_turns=3)
    streamed = Runner.run_streamed(agent(strict=False), QUESTION, max_turns=3)
    async for _ in streamed.stream_events():
        pass
    assert whole.final_output
    assert streamed.final_output == whole.final_output
    assert whole.raw_responses[0].usage.output_tokens > 0
    try:
        await Runner.run(agent(strict=True), QUESTION)
    except openai.BadRequestError as error:
        assert error.param == "tools[0].function.strict"
    else:
        raise AssertionError("a strict tool was not refused")
    assert sum(item.type == "tool_call_item" for item in whole.new_items) == 1
    return {"said": whole.final_output}


made = asyncio.run(main())
print(json.dumps({"version": importlib.metadata.version("openai-agents"), **made}))
