"""How many requests a replica takes at once after others like it ran out of memory."""

FORGIVEN = 1
"""One may have been the fault of somebody else on the machine."""


def slots_after(slots: int, ooms: int) -> int:
    """Return the slots of the next replica, after ``ooms`` in a row that the kernel killed for memory.

    From the second on each halves them: the same load on the same settings would end the same way.
    """
    return max(1, slots >> max(0, ooms - FORGIVEN))
