"""What a job's `events.jsonl` says last, read from its end and then only what is new. The format: `backends/events.py`."""

import json
import os
from typing import Any, Dict, Optional

_WINDOW = 64 * 1024
_LARGEST_EVENT = 16 * 1024
_MOST_SIDES = 8  # a comparison has two; a file that names more and more is none

Event = Dict[str, Any]


class EventCursor:
    """The last event of a file, and the last of the kinds that a job's record shows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.last: Optional[Event] = None
        self.progress: Optional[Event] = None
        self.finished: Optional[Event] = None
        self.sides: Dict[str, Event] = {}
        self._inode = -1
        self._offset = 0

    def update(self) -> None:
        """Reads whole lines that were added; a missing file or a line that is no event changes nothing."""
        try:
            with open(self.path, "rb") as file:
                self._read(file)
        except OSError:
            return

    def _read(self, file: Any) -> None:
        found = os.fstat(file.fileno())
        if found.st_ino != self._inode or found.st_size < self._offset:
            self._inode, self._offset = found.st_ino, 0
        if found.st_size == self._offset:
            return
        skip = found.st_size - self._offset > _WINDOW
        if skip:
            self._offset = found.st_size - _WINDOW
        file.seek(self._offset)
        data = file.read(_WINDOW)
        end = data.rfind(b"\n") + 1
        lines = data[:end].split(b"\n")
        # Where the window starts in the middle of the file its first line is half a line.
        for line in lines[1:] if skip else lines:
            self._take(line)
        if end:
            self._offset += end

    def _take(self, line: bytes) -> None:
        try:
            event = json.loads(line.decode("utf-8"))
        except ValueError:
            return
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            return
        if len(line) > _LARGEST_EVENT:
            event = {"t": event.get("t"), "event": event["event"]}
        self.last = event
        if event["event"] == "progress":
            self.progress = event
        elif event["event"] == "finished":
            self.finished = event
        elif event["event"] == "side" and isinstance(event.get("side"), str):
            self._take_side(event["side"], event)

    def _take_side(self, side: str, event: Event) -> None:
        if side in self.sides or len(self.sides) < _MOST_SIDES:
            # A new mapping: records that were told of before keep theirs.
            self.sides = dict(self.sides, **{side: event})


def last_event(path: str) -> Optional[Event]:
    cursor = EventCursor(path)
    cursor.update()
    return cursor.last
