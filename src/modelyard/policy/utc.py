"""Days and months of UTC, as quotas and bills count them, without a clock or a time zone.

A day is the number of days since 1970-01-01; the conversion to a date is
"days to civil" of Howard Hinnant, "chrono-compatible low-level date
algorithms" (2014). Every day has 86,400 seconds, as in Unix time.
"""

import math

DAY_S = 86_400


def day_of(unix_s: float) -> int:
    """Return the day of an instant."""
    return math.floor(unix_s / DAY_S)


def civil(day: int) -> tuple[int, int, int]:
    """Return year, month and day of the month."""
    era, day_of_era = divmod(day + 719_468, 146_097)
    year_of_era = (day_of_era - day_of_era // 1460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted = (5 * day_of_year + 2) // 153
    month = shifted + 3 if shifted < 10 else shifted - 9
    year = year_of_era + era * 400 + (1 if month <= 2 else 0)
    return year, month, day_of_year - (153 * shifted + 2) // 5 + 1


def day_name(day: int) -> str:
    """Return a day as ``2026-11-29``."""
    year, month, date = civil(day)
    return f"{year:04}-{month:02}-{date:02}"


def month_name(day: int) -> str:
    """Return the month of a day as ``2026-11``."""
    return day_name(day)[:7]


def first_of_month(day: int) -> int:
    """Return the first day of the month of ``day``."""
    return day - civil(day)[2] + 1


def next_month(day: int) -> int:
    """Return the first day of the month after that of ``day``."""
    return first_of_month(first_of_month(day) + 31)


def day_number(name: str) -> int:
    """Return the day that ``day_name`` wrote."""
    year, month, date = (int(part) for part in name.split("-"))
    year -= month <= 2
    era, year_of_era = divmod(year, 400)
    day_of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + date - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468
