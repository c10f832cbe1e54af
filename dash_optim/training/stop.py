# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C and termination signals: a run ends after its step, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

Handler = Callable[[int, FrameType | None], Any]

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A run has ended because it was asked to, and has written what there is."""


class Stop:
    """Turns the first signal into a wish that the loop sees after its step; a second interrupts at once.

    Args:
        also: asked as well, for a process that is told in another way.
    """

    def __init__(self, also: Callable[[], bool] | None = None) -> None:
        self._asked = False
        self._also = also

    @property
    def requested(self) -> bool:
        """Whether the run is to end."""
        return self._asked or (self._also is not None and self._also())

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen while the body runs."""
        with handling(self._ask):
            yield

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True


def ignore_signals() -> None:
    """Hear neither of them any more, for a process that is about to end."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def handling(handler: Handler) -> Iterator[None]:
    """Handle both signals while the body runs, as far as they are not ignored; in the main thread, which alone can."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.getsignal(number) for number in SIGNALS}
    listened = [number for number, old in before.items() if old not in (signal.SIG_IGN, None)]
    try:
        for number in listened:
            signal.signal(number, handler)
        yield
    finally:
        for number in listened:
            signal.signal(number, before[number])
