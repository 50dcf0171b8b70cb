"""A tenant that asks for little does not wait behind one that asks for everything: somebody of those makes way."""

import threading

from tests.support.waiting import eventually
from tests.support.yard import Yard

SLOTS = 4
SETTINGS = {"gateway.queue_wait_s": 60}
LONG = "[[sim: tokens=250 slow=20]]"
"""Five seconds of an answer, and never less: a slot is not free by chance."""


def body_of(text: str) -> dict[str, object]:
    return {"model": "sim", "messages": [{"role": "user", "content": text}]}


def test_who_asks_for_little_gets_the_place_of_a_flood_and_nobody_of_it_is_lost(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": SLOTS, "ttft_ms": 1, "itl_ms": 1}, shared=True)
    flood, quiet = yard.new_tenant("flood"), yard.new_tenant("quiet")
    answers: list[int] = []

    def ask(number: int) -> None:
        text = body_of(f"{LONG} {number}")
        answers.append(yard.call("POST", "/v1/chat/completions", text, key=flood, within_s=60.0).status)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3 * SLOTS)]
    for thread in threads:
        thread.start()

    def begun() -> set[str]:
        return {record["rid"] for record in yard.journal() if record["event"] == "token"}

    eventually(lambda: len(begun()) >= SLOTS, 20, "all slots are taken")
    answer = yard.call("POST", "/v1/chat/completions", body_of("now"), key=quiet, within_s=60.0)
    assert answer.status == 200
    assert answers == [], "it was answered while all that came before it were under way or in line"
    for thread in threads:
        thread.join()
    assert answers == [200] * 3 * SLOTS
    eventually(lambda: len(yard.rows()) >= 3 * SLOTS + 1, 20, "all are in the ledger")
    assert len(yard.rows()) == 3 * SLOTS + 1, "one that began anew is one request, and one row"
    stories = [yard.get(f"/v1/requests/{row.request_id}/why") for row in yard.rows()]
    assert sum("made way for a tenant that asks for little" in str(story) for story in stories) == 1
