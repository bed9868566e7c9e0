"""Durations of the command line."""

from __future__ import annotations

from oncely.config.values import parse_seconds
from oncely.errors import WrongInput


def seconds(option: str, text: str) -> float:
    """A duration of the command line: ``30``, or ``"5 minutes"``.

    Raises:
        WrongInput: it is no duration.
    """
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_seconds(text)
    except ValueError:
        raise WrongInput(
            f"{option}: {text!r} is no duration", way_out='write 30, or "5 minutes"'
        ) from None
