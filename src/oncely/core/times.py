"""Times that have a text of ISO 8601; Arrow writes a wrong one for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

YEARS = "a time outside of the years 1 to 9999"
OF_DAY = "a time outside of the day"

_FIRST_DAY, _AFTER_LAST_DAY = -719_162, 2_932_897  # of these years, from 1970
_OF_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}


def without_text(times: Any) -> np.ndarray:
    """True for values outside of the years 1 to 9999, or of a day.

    Arrow's own year has 16 bits: beyond the year 32,767 its texts show another one.

    Args:
        times: an array, or a chunked one, of dates, times or timestamps.
    """
    first, end = _FIRST_DAY, _AFTER_LAST_DAY
    if pa.types.is_time(times.type):
        first, end = 0, _OF_A_DAY[times.type.unit]
    elif pa.types.is_timestamp(times.type):
        first, end = (one * _OF_A_DAY[times.type.unit] for one in (first, end))
    elif pa.types.is_date64(times.type):
        first, end = (one * _OF_A_DAY["ms"] for one in (first, end))
    bits = pa.int32() if times.type.bit_width == 32 else pa.int64()
    limits = (max(first, -(1 << 63)), min(end - 1, (1 << 63) - 1))
    number = times.cast(bits).cast(pa.int64())
    other = pc.or_(pc.less(number, limits[0]), pc.greater(number, limits[1]))
    return np.asarray(other.fill_null(False).to_numpy(zero_copy_only=False), dtype=bool)


def require_text(times: Any) -> None:
    """Refuse values that :func:`without_text` finds.

    Raises:
        ValueError: there is one.
    """
    if without_text(times).any():
        raise ValueError(OF_DAY if pa.types.is_time(times.type) else YEARS)
