"""LangChain's ChatOpenAI, in both of its APIs, and OpenAIEmbeddings."""

from checks import BASE, KEY, MODEL, TEXT, check, run
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

COMMON = {"model": MODEL, "base_url": BASE, "api_key": KEY, "max_retries": 0, "timeout": 20}
model = ChatOpenAI(**COMMON, stream_usage=True)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


@check
def chats() -> None:
    answer = model.invoke([SystemMessage("be brief"), HumanMessage(TEXT)])
    assert answer.content == TEXT
    assert answer.usage_metadata["output_tokens"] == 3
    assert answer.response_metadata["finish_reason"] == "stop"


@check
def streams() -> None:
    chunks = list(model.stream(TEXT))
    assert "".join(chunk.content for chunk in chunks) == TEXT
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) == 3


@check
def goes_round_with_a_tool() -> None:
    bound = model.bind_tools([get_weather])
    asked = [HumanMessage("please get_weather")]
    answer = bound.invoke(asked)
    [call] = answer.tool_calls
    assert call["name"] == "get_weather"
    told = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert "sunny" in bound.invoke([*asked, answer, told]).content


@check
def fills_a_schema() -> None:
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Person, method=method).invoke("a Person please")
        assert isinstance(found, Person)


@check
def speaks_responses() -> None:
    speaker = ChatOpenAI(**COMMON, use_responses_api=True)
    assert speaker.invoke(TEXT).text == TEXT
    assert "".join(chunk.text for chunk in speaker.stream(TEXT)) == TEXT
    [call] = speaker.bind_tools([get_weather]).invoke("please get_weather").tool_calls
    assert call["name"] == "get_weather"


@check
def embeds() -> None:
    # Its default splits texts by OpenAI's tokenizer, which it would have to fetch.
    embedder = OpenAIEmbeddings(**COMMON, check_embedding_ctx_length=False)
    assert [len(vector) for vector in embedder.embed_documents(["first", "second"])] == [16, 16]
    assert len(embedder.embed_query("third")) == 16


run()
