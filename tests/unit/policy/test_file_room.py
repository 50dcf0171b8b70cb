"""Room for files: promises count at once, and until what came of them is known."""

from modelyard.policy.file_room import Bounds, FileRoom, Refusal

BOUNDS = Bounds(files=3, size_bytes=100, open=2)


def take(room: FileRoom, name: str, size: int, *, tenant: str = "a", files: int = 0, held: int = 0) -> Refusal | None:
    with room.judging():
        return room.take(name, tenant, size, held_files=files, held_bytes=held, bounds=BOUNDS)


def test_what_fits_is_promised_and_the_rest_is_refused_with_its_reason() -> None:
    room = FileRoom()
    assert take(room, "one", 60) is None
    assert take(room, "two", 41) is Refusal.BYTES
    assert take(room, "two", 40) is None
    assert take(room, "three", 0) is Refusal.OPEN
    assert take(room, "three", 100, tenant="b") is None, "another tenant has a room of its own"


def test_held_and_promised_files_count_together() -> None:
    room = FileRoom()
    assert take(room, "one", 1, files=2) is None
    assert take(room, "two", 1, files=2) is Refusal.FILES
    assert take(room, "two", 50, files=1, held=50) is Refusal.BYTES
    assert take(room, "two", 49, files=1, held=50) is None


def test_what_was_given_back_is_free_again() -> None:
    room = FileRoom()
    take(room, "one", 100)
    room.give_back("one")
    room.give_back("one")
    assert take(room, "two", 100) is None


def test_an_upload_that_ends_while_another_is_judged_still_counts() -> None:
    # What the store told before may not have its row yet.
    room = FileRoom()
    take(room, "one", 100)
    with room.judging():
        room.give_back("one")
        assert room.take("two", "a", 1, held_files=0, held_bytes=0, bounds=BOUNDS) is Refusal.BYTES
    assert take(room, "two", 1) is None


def test_what_is_written_is_not_to_come_and_still_counts_as_the_tenants() -> None:
    room = FileRoom()
    take(room, "one", 60)
    room.wrote("one", 45)
    room.wrote("unknown", 5)
    assert room.to_come_bytes == 15
    assert take(room, "two", 41) is Refusal.BYTES
    room.wrote("one", 1000)
    assert room.to_come_bytes == 0, "never less than nothing"
