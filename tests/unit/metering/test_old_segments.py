"""A segment that an older version wrote is still read: new fields of a record have defaults."""

import zlib
from pathlib import Path

import msgspec

from modelyard.domain.usage import Intent, Mark, Price, Settle, Unit, UsageStatus
from modelyard.metering.journal import read_records

INTENT = [1, "r1", 1.0, "t", "k", "ep", "m", "v", "/v1/chat/completions", True, 3, 50, [1, 2, 3]]
MARK = [2, "r1", 3, 4]
SETTLE = [3, "r1", 2.0, 3, 0, 4, "success", 200, "", 5.0, 9.0, "rep", 1, False]


def test_records_without_units_are_read_as_used_no_units(tmp_path: Path) -> None:
    bodies = [msgspec.msgpack.encode(record) for record in (INTENT, MARK, SETTLE)]
    segment = tmp_path / "0000000001.journal"
    segment.write_bytes(
        b"".join(len(b).to_bytes(4, "little") + zlib.crc32(b).to_bytes(4, "little") + b for b in bodies)
    )
    records, end = read_records(segment, 0)
    assert end == segment.stat().st_size
    intent, mark, settle = records
    assert isinstance(intent, Intent)
    assert isinstance(mark, Mark)
    assert isinstance(settle, Settle)
    assert intent.price == Price(1, 2, 3, 0)
    assert (settle.units, settle.unit, settle.status) == (0.0, Unit.NONE, UsageStatus.SUCCESS)
