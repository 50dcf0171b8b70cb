"""How far something is: a bar with speed and time on a terminal, a few lines in a pipe."""

import pytest

from modelyard.cli import bars
from modelyard.cli.bars import ByteBar, StageBar, bar_text, size_text, time_text
from modelyard.clock import ManualClock


def test_sizes_and_times_are_short() -> None:
    assert [size_text(size) for size in (0, 999, 1000, 386_404_992, 4.2e10, 3e12)] == [
        "0 B", "999 B", "1.0 kB", "386.4 MB", "42.0 GB", "3.0 TB",
    ]  # fmt: skip
    assert [time_text(seconds) for seconds in (0.4, 59, 60, 187, 3750)] == ["0 s", "59 s", "1:00", "3:07", "1:02:30"]
    assert bar_text(50) == "[############------------]"
    assert bar_text(-3) == bar_text(0)
    assert bar_text(900) == bar_text(100)


def a_bar(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> tuple[ByteBar, ManualClock]:
    clock = ManualClock()
    monkeypatch.setattr(bars, "SystemClock", lambda: clock)
    monkeypatch.setattr(bars, "is_terminal", lambda: is_terminal)
    return ByteBar("uploading m.gguf", 1_000_000, done=100_000), clock


def test_a_terminal_sees_bytes_speed_and_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bar, clock = a_bar(monkeypatch, is_terminal=True)
    clock.advance(2)
    bar.add(400_000)
    text = capsys.readouterr().err
    assert "[############------------]  50 %  500.0 kB/1.0 MB  200.0 kB/s  ETA 2 s" in text


def test_a_pipe_gets_a_line_every_tenth(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bar, clock = a_bar(monkeypatch, is_terminal=False)
    for _ in range(900):
        clock.advance(0.01)
        bar.add(1000)
    bar.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert "[" not in "".join(lines)
    assert lines[-1].startswith("uploading m.gguf  100 %  1.0 MB/1.0 MB")


def test_stages_are_news_once_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bars, "is_terminal", lambda: False)
    bar = StageBar("chat")
    bar.show({"stage": "queued", "reason": "needs 3 GiB"})
    for percent in range(40, 50):
        bar.show({"stage": "downloading", "percent": percent, "eta_s": 50 - percent})
    bar.show({"stage": "loading", "percent": 50})
    bar.show(None)
    assert capsys.readouterr().err.splitlines() == [
        "chat: queued (needs 3 GiB)", "chat: downloading 40%, ~10 s", "chat: loading 50%", "chat: ",
    ]  # fmt: skip


def test_stages_are_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bars, "is_terminal", lambda: True)
    bar = StageBar("chat")
    bar.show({"stage": "downloading", "percent": 25, "eta_s": 8})
    assert "chat  [######------------------]  downloading 25%, ~8 s" in capsys.readouterr().err
