"""The openai package against both servers. Arguments: key, address and model of each."""

import asyncio
import json
import sys
from typing import Any

import openai

KEY, TINY, PUZZLES, SMOLLM2, CHAT = sys.argv[1:]
PROMPT = "assignments mod 97 : x227 = 31 ; x83 = x64 - x227 ; x64 = 60 ; find x83 <think>"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"city": {"type": "string"}}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": CITY}},
}


def refused(kind: type[openai.APIStatusError], act: Any, **given: Any) -> openai.APIStatusError:
    """The error of a request, which must be of this class."""
    try:
        act(**given)
    except openai.APIStatusError as error:
        assert type(error) is kind, error
        return error
    raise AssertionError(f"not refused: {given}")


def check_completions(client: openai.OpenAI) -> None:
    given: dict[str, Any] = {"model": PUZZLES, "prompt": PROMPT, "n": 2, "seed": 3}
    given |= {"max_tokens": 40, "logprobs": 2, "stop": ["</think>"]}
    whole = client.completions.create(**given)
    texts = ["", ""]
    usage = None
    options = {"include_usage": True}
    for chunk in client.completions.create(**given, stream=True, stream_options=options):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert usage == whole.usage
    assert texts == [choice.text for choice in whole.choices]
    for choice in whole.choices:
        assert "</think>" not in choice.text
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs)
        assert all(len(top) == 2 for top in logprobs.top_logprobs)
    scored = client.completions.create(
        model=PUZZLES, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    assert scored.choices[0].text == PROMPT
    assert client.models.list().data[0].id == PUZZLES
    assert client.models.retrieve(PUZZLES).id == PUZZLES


def check_errors(client: openai.OpenAI) -> None:
    create, given = client.completions.create, {"model": PUZZLES, "prompt": PROMPT}
    error = refused(openai.BadRequestError, create, **given, temperature=9.0)
    assert (error.param, error.code) == ("temperature", "invalid_value")
    error = refused(openai.BadRequestError, create, **given, suffix="x")
    assert (error.param, error.code) == ("suffix", "unsupported_parameter")
    error = refused(openai.NotFoundError, create, model="another", prompt=PROMPT)
    assert error.code == "model_not_found"
    wrong = client.with_options(api_key="wrong")
    refused(openai.AuthenticationError, wrong.completions.create, **given)
    full = {"n": 5, "max_tokens": 4000, "extra_body": {"sparrow": {"ignore_eos": True}}}
    stream = client.completions.create(**given, **full, stream=True)
    next(iter(stream))
    error = refused(openai.RateLimitError, create, **given)
    assert error.code == "overloaded"
    stream.close()
    patient = client.with_options(max_retries=5)
    assert patient.completions.create(**given, max_tokens=2).choices


def check_chat(client: openai.OpenAI) -> str:
    create = client.chat.completions.create
    given: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "max_completion_tokens": 12}
    whole = create(**given, temperature=0, logprobs=True, top_logprobs=2)
    text = whole.choices[0].message.content
    entries = whole.choices[0].logprobs.content
    assert len(entries) == whole.usage.completion_tokens
    assert all(entry.top_logprobs[0].token == entry.token for entry in entries)
    chunks = create(**given, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    with client.chat.completions.stream(**given, temperature=0, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason
    two = create(**given, n=2, seed=1, stop=".")
    assert [choice.index for choice in two.choices] == [0, 1]
    assert not any("." in choice.message.content for choice in two.choices)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    turn = [{"role": "assistant", "tool_calls": [call]}]
    turn += [{"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    create(**given | {"messages": [*QUESTION, *turn]}, tools=[TOOL])
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    error = refused(openai.BadRequestError, create, **given, tools=[strict])
    assert error.param == "tools[0].function.strict"
    error = refused(
        openai.BadRequestError, create, **given, response_format={"type": "json_object"}
    )
    assert error.param == "response_format"
    return text


def weather(city: str) -> str:
    return {"Rome": "sunny, 24 degrees", "Paris": "rain, 11 degrees"}[city]


def without_additions(message: Any) -> dict[str, Any]:
    """A message without what the package adds to that of a stream: `parsed`, `index`."""
    calls = [
        call.to_dict() | {"function": call.function.model_dump(include={"name", "arguments"})}
        for call in message.tool_calls or ()
    ]
    for call in calls:
        call.pop("index", None)
    return {"role": "assistant", "content": message.content, "tool_calls": calls}


def use_tool(client: openai.OpenAI, *, stream: bool) -> str:
    """Answer with the tool's results until the model makes no more calls; return what it says.

    The model sees a round of another question first: without one, SmolLM2 makes no call.
    """
    function = {"name": "weather", "arguments": json.dumps({"city": "Rome"})}
    call = {"id": "call_0", "type": "function", "function": function}
    messages: list[Any] = [
        {"role": "user", "content": "What is the weather in Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": weather("Rome")},
        {"role": "assistant", "content": f"The weather in Rome: {weather('Rome')}."},
        {"role": "user", "content": "What is the weather in Paris?"},
    ]
    for turn in range(2):
        given = {"model": CHAT, "messages": messages, "tools": [TOOL], "temperature": 0}
        if stream:
            with client.chat.completions.stream(**given, max_completion_tokens=48) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = client.chat.completions.create(**given, max_completion_tokens=48).choices
        assert choice.finish_reason == ("stop" if turn else "tool_calls"), choice
        calls = choice.message.tool_calls or []
        assert len(calls) == 1 - turn
        messages.append(without_additions(choice.message) if stream else choice.message)
        for called in calls:
            said = weather(**json.loads(called.function.arguments))
            messages.append({"role": "tool", "tool_call_id": called.id, "content": said})
    return str(choice.message.content)


async def check_async(text: str) -> None:
    async with openai.AsyncOpenAI(base_url=SMOLLM2, api_key=KEY, max_retries=0) as client:
        create = client.chat.completions.create
        given: dict[str, Any] = {"model": CHAT, "messages": QUESTION, "max_completion_tokens": 12}
        answers = await asyncio.gather(*[create(**given, temperature=0) for _ in range(3)])
    assert [answer.choices[0].message.content for answer in answers] == [text] * 3


puzzles = openai.OpenAI(base_url=TINY, api_key=KEY, max_retries=0)
check_completions(puzzles)
check_errors(puzzles)
chats = openai.OpenAI(base_url=SMOLLM2, api_key=KEY, max_retries=0)
said = check_chat(chats)
asyncio.run(check_async(said))
after_tools = [use_tool(chats, stream=stream) for stream in (False, True)]
print(json.dumps({"version": openai.__version__, "said": said, "after_tools": after_tools}))
