"""Detection of NUL characters, which text columns do not accept, before rows are sent.

PostgreSQL refuses a NUL in any text, and the escape ``\\u0000`` in jsonb, and names no row if the
value is cast by the server. SQLite accepts a NUL, but its functions end the text there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oncely.clients.sql.connection import ColumnFit

_NUL = "\x00"
# An even number of backslashes before it: an escaped backslash and the text u0000 is no NUL.
_ESCAPED = r"(?:^|[^\\])(?:\\\\)*\\u0000"


def rows_with_nul(column: pa.ChunkedArray, fit: ColumnFit) -> dict[int, str]:
    """The rows whose value contains a NUL, and the reason for each; empty for columns of other
    types.

    Args:
        column: cast to the fit's type already.
        fit: shows if the server casts the text to jsonb.
    """
    within = pa.types.is_list(column.type)
    texts = pc.list_flatten(column) if within else column
    if not pa.types.is_string(texts.type):
        return {}
    found = []
    if any(_has_zero_byte(chunk) for chunk in texts.chunks):
        found.append((pc.match_substring(texts, _NUL), "a text contains a NUL (0x00)"))
    if fit.cast == "jsonb":
        escaped = pc.match_substring_regex(texts, _ESCAPED)
        found.append(
            (
                escaped,
                r"jsonb accepts no NUL (0x00), and the JSON contains the escape "
                "\u0000",
            )
        )
    reasons: dict[int, str] = {}
    for matches, reason in found:
        rows = pc.indices_nonzero(matches.fill_null(False))
        rows = pc.list_parent_indices(column).take(rows) if within else rows
        for row in rows.to_pylist():
            reasons.setdefault(row, f"column {fit.name!r}: {reason}")
    return reasons


def _has_zero_byte(texts: pa.StringArray) -> bool:
    """Search the bytes of all texts at once: a tenth of the time of matching each text."""
    _, offsets, data = texts.buffers()
    if not len(texts) or data is None:
        return False
    ends = np.frombuffer(offsets, np.int32)
    first, last = ends[texts.offset], ends[texts.offset + len(texts)]
    return not np.frombuffer(data, np.uint8)[first:last].all()
