"""Instructor in its ways to get an object out of a model: tools, JSON by schema, and in parts while it streams."""

import instructor
from checks import BASE, KEY, MODEL, check, run
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


MESSAGES = [{"role": "user", "content": "the Person please"}]
sdk = OpenAI(base_url=BASE, api_key=KEY, max_retries=0, timeout=20)


def asked(mode: instructor.Mode) -> Person:
    client = instructor.from_openai(sdk, mode=mode)
    found = client.chat.completions.create(model=MODEL, response_model=Person, messages=MESSAGES, max_retries=0)
    assert isinstance(found, Person)
    return found


@check
def fills_an_object_by_tools() -> None:
    assert asked(instructor.Mode.TOOLS).name


@check
def fills_an_object_by_schema() -> None:
    assert asked(instructor.Mode.JSON_SCHEMA).name


@check
def fills_an_object_by_responses() -> None:
    client = instructor.from_openai(sdk, mode=instructor.Mode.RESPONSES_TOOLS)
    found = client.responses.create(model=MODEL, response_model=Person, input="the Person please", max_retries=0)
    assert isinstance(found, Person)


@check
def fills_an_object_in_parts() -> None:
    client = instructor.from_openai(sdk, mode=instructor.Mode.TOOLS)
    parts = list(client.chat.completions.create_partial(model=MODEL, response_model=Person, messages=MESSAGES))
    assert len(parts) > 1
    assert parts[-1].age is not None


run()
