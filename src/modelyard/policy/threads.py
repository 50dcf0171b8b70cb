"""How many CPU threads an engine may use."""


def threads_for(*, cores: int, most: int, kind: str, count: int, accelerators: int) -> int:
    """Return the threads of a replica with ``count`` of a node's ``accelerators``; ``most`` is the operator's, 0: none.

    On the CPU it may use every core: those that compute at the same time share them, and one that is alone is not held
    back. Beside a GPU the CPU only feeds it, so each gets its share of the cores.
    """
    allowed = min(cores, most) if most else cores
    if kind == "cpu" or not accelerators:
        return max(1, allowed)
    return max(1, allowed * count // accelerators)
