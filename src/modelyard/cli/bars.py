"""How far something is, on stderr: a bar that is redrawn on a terminal, a line now and then in a pipe."""

import os
import sys
from threading import Lock

from modelyard.cli.output import Item, ProgressLine, clean, progress_text
from modelyard.clock import SystemClock

BAR_WIDTH = 24
REDRAW_S = 0.1
STEP_PERCENT = 10
"""A pipe gets a line every so many percent."""
STEP_S = 0.5
"""And not more often than this."""
_RATE_S = 10.0
"""Speed is that of the last so many seconds."""


def is_terminal() -> bool:
    """Say whether somebody watches stderr."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def bar_text(percent: float) -> str:
    """Return ``[######------]``."""
    full = round(BAR_WIDTH * min(max(percent, 0.0), 100.0) / 100)
    return f"[{'#' * full}{'-' * (BAR_WIDTH - full)}]"


def size_text(count: float) -> str:
    """Return bytes as people say them: ``386.4 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def time_text(seconds: float) -> str:
    """Return ``45 s``, ``3:07`` or ``1:02:30``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


class ByteBar:
    """Bytes done of a whole, with speed and the time that is left; several threads may add to it."""

    def __init__(self, label: str, whole: int, *, done: int = 0) -> None:
        self._label = label
        self._whole = max(whole, 1)
        self._done = done
        self._clock = SystemClock()
        self._line = ProgressLine()
        self._is_terminal = is_terminal()
        self._lock = Lock()
        self._seen: list[tuple[float, int]] = [(self._clock.monotonic_s(), done)]
        self._shown_s = float("-inf")
        self._step = -1

    def add(self, count: int) -> None:
        """Count bytes; a negative count takes back what has to be done again."""
        with self._lock:
            self._done += count
            now_s = self._clock.monotonic_s()
            if self._is_due(now_s):
                self._shown_s = now_s
                self._line.show(self.text(now_s))

    def text(self, now_s: float) -> str:
        """Return the line."""
        self._seen = [one for one in self._seen if now_s - one[0] <= _RATE_S] or self._seen[-1:]
        first_s, first = self._seen[0]
        self._seen.append((now_s, self._done))
        rate = (self._done - first) / max(now_s - first_s, 0.001)
        percent = 100 * self._done / self._whole
        parts = [
            self._label,
            bar_text(percent),
            f"{int(percent)} %",
            f"{size_text(self._done)}/{size_text(self._whole)}",
        ]
        if rate > 0:
            parts += [f"{size_text(rate)}/s", f"ETA {time_text((self._whole - self._done) / rate)}"]
        return "  ".join(parts if self._is_terminal else [part for part in parts if not part.startswith("[")])

    def close(self) -> None:
        """Leave a clean line behind."""
        self._line.clear()

    def _is_due(self, now_s: float) -> bool:
        if self._is_terminal:
            return now_s - self._shown_s >= REDRAW_S or self._done >= self._whole
        step = 100 * self._done // self._whole // STEP_PERCENT
        is_whole = self._done >= self._whole
        if step <= self._step or (now_s - self._shown_s < STEP_S and not is_whole):
            return False
        self._step = step
        return True


class StageBar:
    """The stages of a deployment: all of them in one bar on a terminal; in a pipe a line for each news."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line = ProgressLine()
        self._is_terminal = is_terminal()
        self._told: tuple[object, ...] = ()

    def show(self, progress: Item | None) -> None:
        """Show a ``progress`` of the API."""
        progress = progress or {}
        percent = progress.get("percent")
        if self._is_terminal:
            drawn = "" if percent is None else f"{bar_text(percent)}  "
            self._line.show(clean(f"{self._name}  {drawn}{progress_text(progress)}"))
            return
        # A number alone is news only in steps: a log of one line a percent hides what matters in it.
        news = (progress.get("stage"), progress.get("reason"), None if percent is None else percent // STEP_PERCENT)
        if news != self._told:
            self._told = news
            self._line.show(f"{self._name}: {progress_text(progress)}")

    def clear(self) -> None:
        """Leave a clean line behind."""
        self._line.clear()
