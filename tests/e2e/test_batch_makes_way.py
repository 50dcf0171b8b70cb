"""Lines of batches fill what is idle, and give it up the moment somebody comes who does not wait for hours."""

from tests.support.batches import chat_line, check_whole, client_of, look, submit, until
from tests.support.waiting import eventually
from tests.support.yard import Yard

SLOTS = 2
LONG = "[[sim: tokens=300 slow=20]]"
"""Six seconds of an answer, and never less: a slot is not free by chance."""


def test_a_request_in_real_time_gets_the_slot_of_a_line_that_then_begins_anew(yard: Yard) -> None:
    yard.deploy("sim", options={"slots": SLOTS, "ttft_ms": 1, "itl_ms": 1})
    client = client_of(yard)
    ids = [f"line-{at}" for at in range(3)]
    batch = submit(client, [chat_line(one, f"{LONG} {one}") for one in ids])

    def begun() -> set[str]:
        return {record["rid"] for record in yard.journal() if record["event"] == "token"}

    eventually(lambda: len(begun()) >= SLOTS, 20, "lines fill all slots")
    lines = begun()
    answer = client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "now"}])
    now = look(client, batch.id)
    assert now is not None
    assert now.request_counts is not None
    assert now.request_counts.completed == 0, "it was answered while lines that came before it were under way"
    over = until(client, batch.id, within_s=90)
    output, errors = check_whole(client, over, ids)
    assert (len(output), errors) == (3, [])
    stories = [yard.get(f"/v1/requests/{rid}/why") for rid in lines]
    assert "made way" in str(stories), stories
    eventually(lambda: len(yard.rows()) >= 4, 20, "all are in the ledger")
    rows = {row.request_id: row for row in yard.rows()}
    assert answer._request_id in rows
    assert len(rows) == 4, "a line that began anew is one request, and one row"
