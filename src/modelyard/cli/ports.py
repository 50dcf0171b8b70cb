"""Who listens on a port, so that "port taken" can say by whom. Linux only; elsewhere nobody is named."""

import os


def listener_name(port: int) -> str:
    """Return ``name (pid 12)`` of the process that listens on a TCP port of this machine, or "" when it is not told."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _rows(table)
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port
    }
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for pid in filter(str.isdigit, os.listdir("/proc") if inodes else []):  # noqa: PTH208 - a kernel folder
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                if any(os.readlink(entry.path) in wanted for entry in entries):  # noqa: PTH115
                    return f"{_name(pid)} (pid {pid})"
        except OSError:
            continue  # not ours to look into, or gone
    return ""


def _rows(table: str) -> list[list[str]]:
    try:
        with open(table, encoding="ascii") as lines:  # noqa: PTH123 - a kernel file
            return [line.split() for line in lines.readlines()[1:]]
    except OSError:
        return []


def _name(pid: str) -> str:
    with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:  # noqa: PTH123 - a kernel file
        return name.read().strip()
