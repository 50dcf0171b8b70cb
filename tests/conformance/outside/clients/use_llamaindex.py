"""LlamaIndex's classes for servers that are like OpenAI's; it is built on the SDK's older line (openai < 3)."""

from checks import BASE, KEY, MODEL, TEXT, check, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

COMMON = {"model": MODEL, "api_base": BASE, "api_key": KEY, "max_retries": 0, "timeout": 20}
chatter = OpenAILike(**COMMON, is_chat_model=True, is_function_calling_model=True, context_window=4096)
messages = [ChatMessage(role="user", content=TEXT)]


@check
def chats() -> None:
    assert chatter.chat(messages).message.content == TEXT


@check
def streams() -> None:
    assert list(chatter.stream_chat(messages))[-1].message.content == TEXT


@check
def completes_text() -> None:
    completer = OpenAILike(**COMMON, is_chat_model=False, context_window=4096, max_tokens=50)
    assert completer.complete(TEXT).text.strip() == TEXT
    assert list(completer.stream_complete(TEXT))[-1].text.strip() == TEXT


@check
def calls_tools() -> None:
    def get_weather(city: str) -> str:
        """Tell the weather of a city."""
        return city

    answer = chatter.chat_with_tools([FunctionTool.from_defaults(get_weather)], user_msg="please get_weather")
    [call] = chatter.get_tool_calls_from_response(answer)
    assert (call.tool_name, set(call.tool_kwargs)) == ("get_weather", {"city"})


@check
def embeds() -> None:
    embedder = OpenAILikeEmbedding(model_name=MODEL, api_base=BASE, api_key=KEY, max_retries=0)
    assert [len(vector) for vector in embedder.get_text_embedding_batch(["first", "second"])] == [16, 16]


run()
