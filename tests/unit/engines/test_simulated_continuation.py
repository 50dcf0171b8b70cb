"""A continued answer is the rest of the same echo; log probabilities follow the text; full KV preempts the newest."""

import asyncio
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.engines.simulated.answers import Choice, chat_choices
from modelyard.engines.simulated.batching import Batch
from modelyard.engines.simulated.faults import Faults
from modelyard.engines.simulated.logprobs import VERY_UNLIKELY, Scores, rated
from modelyard.engines.simulated.requests import ChatRequest, Refused, decode
from modelyard.engines.simulated.stream import Chunks

USER = {"role": "user", "content": "-"}


def answer(text: str, given: str | None = None, *, tokens: int | None = None, **fields: Any) -> Choice:
    body: dict[str, Any] = {"messages": [USER], **fields}
    if given is not None:
        body["messages"] = [USER, {"role": "assistant", "content": given}]
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    request = decode(json.dumps(body).encode(), ChatRequest)
    [choice] = chat_choices(request, text, Faults(tokens=tokens), room=500, by_byte=False)
    return choice


def text_of(choice: Choice) -> str:
    return b"".join(token.data for token in choice.tokens).decode()


@settings(deadline=None, max_examples=60)
@given(st.text(st.characters(codec="utf-8"), min_size=1, max_size=40), st.data(), st.none() | st.integers(1, 60))
def test_an_answer_cut_anywhere_and_continued_is_the_whole_answer(
    text: str, data: st.DataObject, tokens: int | None
) -> None:
    whole = answer(text, tokens=tokens)
    given = text_of(whole)[: data.draw(st.integers(1, len(text_of(whole))))]
    rest = answer(text, given, tokens=tokens)
    assert given + text_of(rest) == text_of(whole)
    assert rest.finish == whole.finish


def test_limits_count_what_is_still_to_come() -> None:
    whole = answer("a b c d e f", max_tokens=4)
    rest = answer("a b c d e f", "a b", max_tokens=2)
    assert text_of(whole) == "a b" + text_of(rest)
    assert (whole.finish, rest.finish) == ("length", "length")
    assert text_of(answer("a b", "a", ignore_eos=True, max_tokens=4)) == " b a b a"
    assert text_of(answer("a b c d", "a b", stop=["d"])) == " c "
    assert answer("a b", "a b").tokens == []
    assert text_of(answer("a b", "something else")) == "a b"


def test_only_a_turn_of_the_assistant_can_be_continued_and_not_also_begun() -> None:
    request = decode(json.dumps({"messages": [USER], "continue_final_message": True}).encode(), ChatRequest)
    with pytest.raises(Refused, match="Cannot set both"):
        request.rendered()
    request.add_generation_prompt = False
    with pytest.raises(Refused, match="assistant"):
        request.rendered()


@given(st.binary(min_size=1, max_size=12), st.integers(0, 20), st.sampled_from(["", "a@1"]))
def test_log_probabilities_fall_and_never_add_up_to_more_than_one(token: bytes, top: int, adapter: str) -> None:
    found = [value for _, value in rated(token, top, adapter=adapter)]
    assert found == sorted(found, reverse=True)
    assert sum(math.exp(value) for value in found) <= 1
    assert len(found) == max(1, top)
    assert all(value == VERY_UNLIKELY for value in found[5:])


@given(st.binary(min_size=1, max_size=12), st.text(min_size=1, max_size=20))
def test_an_adapter_is_always_less_sure_than_its_base(token: bytes, adapter: str) -> None:
    (_, base), (_, own) = (*rated(token, 1), *rated(token, 1, adapter=adapter))
    assert base - own > 0.1


def test_scores_of_a_chat_carry_bytes_and_those_of_a_completion_offsets() -> None:
    chat = Scores(top=2, is_chat=True)
    chat.add("é".encode())
    found = chat.take()
    assert found is not None
    [entry] = found["content"]
    assert (entry["token"], entry["bytes"], len(entry["top_logprobs"])) == ("é", [195, 169], 2)
    assert chat.take() is None, "each score is told once"
    text = Scores(top=1, is_chat=False)
    text.add(b"ab", is_first=True)
    text.add(b" c")
    found = text.take()
    assert found is not None
    assert (found["tokens"], found["text_offset"], found["token_logprobs"][0]) == (["ab", " c"], [0, 2], None)
    assert list(found["top_logprobs"][1]) == [" c"]


def test_scores_without_rivals_are_empty_and_not_null() -> None:
    text = Scores(top=0, is_chat=False)
    text.add(b"ab")
    found = text.take()
    assert found is not None
    assert (len(found["token_logprobs"]), found["top_logprobs"]) == (1, [{}])


def test_what_is_held_back_keeps_its_scores_for_the_next_chunk() -> None:
    request = decode(json.dumps({"messages": [USER]}).encode(), ChatRequest)
    [choice] = chat_choices(request, "é!", Faults(), room=9, by_byte=True)
    chunks = Chunks(is_chat=True, answer_id="a", created=1, model="m", choices=1, top=0)
    made = [chunks.token(0, token, is_last=False) for token in choice.tokens]
    told = [
        chunk["choices"][0]["logprobs"] and len(chunk["choices"][0]["logprobs"]["content"]) for chunk in made if chunk
    ]
    assert told == [2, 1]


async def test_blocks_that_run_out_are_taken_from_who_came_last() -> None:
    batch = Batch(slots=2, blocks=4)
    told: list[str] = []

    async def work(name: str) -> None:
        async with batch.place(1) as place:
            for blocks in (2, 3, 4):
                await asyncio.sleep(0)
                if await place.hold(blocks):
                    told.append(f"{name} lost at {blocks}")
        told.append(f"{name} done")

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for name in "ab":
            group.create_task(work(name))
    assert told[0] == "a done"
    assert any(line.startswith("b lost") for line in told)
    assert not any(line.startswith("a lost") for line in told)
    assert told[-1] == "b done"
    assert batch.preemptions >= 1
    assert repr(batch) == "<Batch 0/2 slots, 0 waiting, 4/4 blocks free>"


async def test_who_leaves_while_preempted_leaves_nothing_behind() -> None:
    batch = Batch(slots=2, blocks=3)

    async def work(blocks: int) -> None:
        async with batch.place(1) as place:
            await asyncio.sleep(0)
            await place.hold(blocks)
            await asyncio.get_running_loop().create_future()

    tasks = [asyncio.create_task(work(blocks)) for blocks in (2, 2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert repr(batch) == "<Batch 1/2 slots, 1 waiting, 1/3 blocks free>"
    for task in reversed(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert repr(batch) == "<Batch 0/2 slots, 0 waiting, 3/3 blocks free>"
