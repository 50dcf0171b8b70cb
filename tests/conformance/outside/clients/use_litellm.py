"""LiteLLM as a client: it rewrites requests per provider, so each that speaks to servers like ours is tried."""

import os

from checks import BASE, KEY, MODEL, TEXT, URL, check, run

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

COMMON = {"api_base": BASE, "api_key": KEY, "num_retries": 0, "timeout": 20}
MESSAGES = [{"role": "user", "content": TEXT}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


@check
def chats() -> None:
    for provider in ("openai", "hosted_vllm"):
        answer = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **COMMON)
        assert answer.choices[0].message.content == TEXT
        assert answer.usage.completion_tokens == 3


@check
def streams_with_usage() -> None:
    stream = litellm.completion(
        model=f"openai/{MODEL}", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **COMMON
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [3]


@check
def calls_tools() -> None:
    asked = [{"role": "user", "content": "please get_weather"}]
    answer = litellm.completion(model=f"openai/{MODEL}", messages=asked, tools=TOOLS, **COMMON)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, answer.choices[0].finish_reason) == ("get_weather", "tool_calls")


@check
def embeds() -> None:
    answer = litellm.embedding(model=f"openai/{MODEL}", input=["first", "second"], **COMMON)
    assert [len(item["embedding"]) for item in answer.data] == [16, 16]


@check
def completes_text() -> None:
    answer = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt=TEXT, **COMMON)
    assert answer.choices[0].text.strip() == TEXT


@check
def answers_responses() -> None:
    answer = litellm.responses(model=f"openai/{MODEL}", input=TEXT, **COMMON)
    assert answer.output[0].content[0].text == TEXT
    assert answer.usage.output_tokens == 3


@check
def speaks_messages() -> None:
    common = {**COMMON, "api_base": URL}
    answer = litellm.completion(model=f"anthropic/{MODEL}", messages=MESSAGES, max_tokens=50, **common)
    assert answer.choices[0].message.content == TEXT


@check
def ranks_as_cohere() -> None:
    documents = ["nothing of it", "the capital of France"]
    common = {**COMMON, "api_base": f"{URL}/v2/rerank"}
    answer = litellm.rerank(model=f"cohere/{MODEL}", query="capital of France", documents=documents, **common)
    assert [entry["index"] for entry in answer.results] == [1, 0]


@check
def errors_become_their_classes() -> None:
    try:
        litellm.completion(model="openai/no-such-model", messages=MESSAGES, **COMMON)
    except litellm.NotFoundError as error:
        told = str(error)
    else:
        told = "nothing"
    assert "no-such-model" in told


run()
