"""Threads that inherit the context variables of the thread that creates them.

The context contains the secrets in scope, and the pipeline that log entries name. Python 3.14 has
the same as ``sys.flags.thread_inherit_context``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import copy_context


class Thread(threading.Thread):
    """A daemon thread with a copy of its creator's context.

    Args:
        target: called in the thread.
        name: the name of the thread.
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._inherited = copy_context()

    def run(self) -> None:
        """Call the target in the inherited context."""
        self._inherited.run(super().run)
