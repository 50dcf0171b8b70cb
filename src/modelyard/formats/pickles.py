"""Recognising a pickle by its content: protocols 2 to 5 by their first bytes, 0 and 1 by walking them.

A pickle is a program, so nothing is gained by looking for bad ones: any is
refused (S7). The walk runs nothing. It follows the stack as a machine would, so
that text which merely begins with letters that are opcodes is not taken for one.
"""

import re

_LINE = re.compile(rb"[^\n]{0,4096}\n")
_NAME = re.compile(rb"[\w.]{1,256}\r?\n")
_NUMBER = re.compile(rb"-?[0-9][0-9.eE+-]{0,400}L?\r?\n")
_QUOTED = re.compile(rb"('[^\n]*'|\"[^\n]*\")\r?\n")
_LINES = {b"I": _NUMBER, b"L": _NUMBER, b"F": _NUMBER, b"S": _QUOTED, b"V": _LINE, b"P": _LINE}
_FIXED = {b"K": 1, b"M": 2, b"J": 4, b"G": 8}
_COUNTED = {b"U": 1, b"T": 4, b"X": 4}
_EMPTY = {b"N", b"]", b"}", b")"}
_FROM_MARK = {b"t", b"l", b"d"}
_NEEDS = {b"a": 2, b"s": 3, b"R": 2, b"b": 2, b"0": 1, b"2": 1}
_LEAVES = {b"a": 1, b"s": 1, b"R": 1, b"b": 1, b"0": 0, b"2": 2}
_OPCODES_MAX = 256


def is_pickle(head: bytes) -> bool:
    """Say whether ``head``, the first kilobytes of a file, is a pickle's of any protocol."""
    if len(head) > 2 and head[0] == 0x80 and head[1] <= 9:
        return True
    return _Walk(head).is_program()


class _Walk:
    """A pickle machine without values: ``stack`` holds only what is a mark and what is not."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._at = 0
        self._stack: list[bool] = []
        self._memo = 0
        self._opcodes = 0

    def is_program(self) -> bool:
        while self._opcodes < _OPCODES_MAX and self._at < len(self._head):
            opcode = self._head[self._at : self._at + 1]
            self._at += 1
            self._opcodes += 1
            if opcode in (b"c", b"i"):
                # Names of a module and of what is in it: from here on anything can be called.
                return self._argument(_NAME) and self._argument(_NAME)
            if opcode == b".":
                return self._opcodes > 1 and self._stack == [False]
            if not self._step(opcode):
                return False
            if self._memo > 1:
                return True
        return self._opcodes >= 8

    def _step(self, opcode: bytes) -> bool:
        stack = self._stack
        if opcode == b"(":
            stack.append(True)
        elif opcode in _EMPTY:
            stack.append(False)
        elif opcode in _LINES or opcode in _FIXED or opcode in _COUNTED:
            stack.append(False)
            return self._value(opcode)
        elif opcode in _FROM_MARK or opcode in (b"e", b"u"):
            return self._collapse(pops_below=opcode in (b"e", b"u"))
        elif opcode in _NEEDS:
            return self._shrink(_NEEDS[opcode], _LEAVES[opcode])
        elif opcode in (b"p", b"q", b"r"):
            return bool(stack) and not stack[-1] and self._put(opcode)
        else:
            return False
        return True

    def _value(self, opcode: bytes) -> bool:
        if opcode in _LINES:
            return self._argument(_LINES[opcode])
        if opcode in _FIXED:
            self._at += _FIXED[opcode]
        else:
            size = _COUNTED[opcode]
            self._at += size + int.from_bytes(self._head[self._at : self._at + size], "little")
        return self._at <= len(self._head)

    def _put(self, opcode: bytes) -> bool:
        self._memo += 1
        if opcode == b"p":
            return self._argument(_NUMBER)
        self._at += 1 if opcode == b"q" else 4
        return True

    def _collapse(self, *, pops_below: bool) -> bool:
        stack = self._stack
        if True not in stack:
            return False
        while not stack.pop():
            pass
        if pops_below:
            return bool(stack) and not stack[-1]
        stack.append(False)
        return True

    def _shrink(self, needs: int, leaves: int) -> bool:
        stack = self._stack
        if len(stack) < needs or any(stack[-needs:]):
            return False
        del stack[len(stack) - needs :]
        stack.extend([False] * leaves)
        return True

    def _argument(self, pattern: re.Pattern[bytes]) -> bool:
        match = pattern.match(self._head, self._at)
        if match is None:
            return False
        self._at = match.end()
        return True
