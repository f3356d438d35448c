"""DeepSeek's calls, V3 (the arguments in a code block) and V3.1 (bare).

V3:   <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\\n```json\\nARGUMENTS\\n```<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
V3.1: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from octavo.frontend.parsing.machine import MAX_NAME, Machine

CALLS_BEGIN = "<｜tool▁calls▁begin｜>"
CALLS_END = "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```json"


class DeepSeekCalls(Machine):
    """See the module.

    Args:
        guarded: calls are those of known tools, which the grammar of strict tools guards.
    """

    def __init__(self, names: Container[str], *, guarded: bool = False) -> None:
        super().__init__(self._free_text)
        self._guarded = guarded
        self._names = names
        self._header = ""

    def _free_text(self) -> bool:
        markers = (CALLS_BEGIN, CALL_BEGIN, CALLS_END)
        marker, moved = self._up_to_marker(markers)
        if marker is None:
            return moved
        if marker == CALLS_END:
            self._take(len(marker))
            return True
        self._begin_region()
        self._take(len(marker))
        self._state = self._in_header if marker == CALL_BEGIN else self._before_call
        return True

    def _before_call(self) -> bool:
        """Between <｜tool▁calls▁begin｜> and the first call."""
        if self._buffer.startswith(CALL_BEGIN):
            self._take(len(CALL_BEGIN))
            self._state = self._in_header
        elif CALL_BEGIN.startswith(self._buffer):
            return False
        elif self._buffer[0].isspace():
            self._take(1)
        else:
            self._give_up()
        return True

    def _in_header(self) -> bool:
        at = self._buffer.find(SEPARATOR)
        if at < 0:
            if len(self._buffer) > MAX_NAME + len(SEPARATOR):
                self._give_up()
                return True
            return False
        if at > MAX_NAME:
            self._give_up()
            return True
        self._header = self._take(at).strip()
        self._take(len(SEPARATOR))
        self._state = self._behind_separator
        return True

    def _behind_separator(self) -> bool:
        """Arguments (V3.1), or the name and a code block (V3)."""
        if self._buffer[0].isspace():
            self._take(1)
            return True
        if self._buffer[0] == "{":
            if self._guarded and self._header not in self._names:
                self._give_up()
            else:
                self._begin_json(self._header, self._behind_arguments)
            return True
        at = self._buffer.find("{")
        if at < 0:
            if len(self._buffer) > MAX_NAME + len(_FENCE) + 8:
                self._give_up()
                return True
            return False
        name, fence, _ = self._buffer[:at].partition(_FENCE)
        if not fence or not name.strip() or len(name) > MAX_NAME or (self._guarded and name.strip() not in self._names):
            self._give_up()
            return True
        self._take(at)
        self._begin_json(name.strip(), self._behind_arguments)
        return True

    def _behind_arguments(self) -> bool:
        """Up to the call's end: the rest of the code block, and whatever else is there."""
        markers = (CALL_END, CALLS_END, CALL_BEGIN)
        marker = next((m for m in markers if self._buffer.startswith(m)), None)
        if marker is not None:
            if marker == CALL_END:
                self._take(len(marker))
            self._state = self._free_text
        elif not self._final and any(m.startswith(self._buffer) for m in markers):
            return False
        else:
            self._take(1)
        return True

    def _cut_name(self) -> str | None:
        if self._state != self._behind_separator:
            return None
        line, ended, _ = self._buffer.partition("\n")
        written = line.strip() if ended else ""
        return next((name for name in (written, self._header) if name in self._names), None)


def deepseek(names: Container[str], *, guarded: bool = False, **_: Any) -> Machine:
    return DeepSeekCalls(names, guarded=guarded)
