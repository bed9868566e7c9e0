"""The files of a table in memory: hundreds of thousands of entries, each packed into bytes.

A decoded :class:`ManifestFile` takes 1.8 kB, mostly for its Python objects. As MessagePack, with
its path as the key, it takes less than a third of that, and is decoded in two microseconds at each
access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from oncely.lake.records import ManifestFile

# The path is the first field, and the key. The last one, other files of the message, is not kept.
_KEPT = msgspec.structs.fields(ManifestFile)[1:-1]
_VALUES: Any = tuple[tuple(one.type for one in _KEPT)]  # type: ignore[misc]
FIELDS = [one.name for one in _KEPT]
"""The fields of a packed entry, in order."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_VALUES)


class LiveFiles(Mapping[str, ManifestFile]):
    """Files by path, in the order of insertion. Each access decodes a file again."""

    def __init__(self, packed: dict[str, bytes] | None = None) -> None:
        self._packed: dict[str, bytes] = {} if packed is None else packed

    def __getitem__(self, path: str) -> ManifestFile:
        return ManifestFile(path, *_decoder.decode(self._packed[path]))

    def __contains__(self, path: object) -> bool:
        return path in self._packed

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)

    def put(self, file: ManifestFile) -> None:
        """Add a file, or replace the one with its path."""
        self._packed[file.path] = _encoder.encode(msgspec.structs.astuple(file)[1:-1])

    def remove(self, path: str) -> bool:
        """Remove a file; True if it was present."""
        return self._packed.pop(path, None) is not None

    def copy(self) -> LiveFiles:
        """A copy that later changes do not affect; the packed entries are shared."""
        return LiveFiles(self._packed.copy())

    @property
    def packed(self) -> dict[str, bytes]:
        """The packed entries; see :data:`FIELDS`."""
        return self._packed
