"""Ctrl-C and kill: the first asks for a clean stop after the step in flight, the next one stops at once."""

import os
import signal
import time
from types import FrameType

_SAME_REQUEST_S = 1.0  # a launcher may repeat to its workers the signal that the terminal already sent them


class StopRequest:
    """While entered, `signal` holds the number of the signal that asked to stop, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._when = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self._when = number, time.monotonic()
        elif time.monotonic() - self._when > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
