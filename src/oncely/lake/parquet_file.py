"""Arrow to Parquet and back, with the same schema as the Avro file of the same rows."""

from __future__ import annotations

import pyarrow as pa

from oncely.decode.avro_names import arrow_schema_of, avro_schema_of, schema_id, storable
from oncely.errors import InvariantViolation, TableMismatch
from oncely.lake.avro_file import SCHEMA_ID
from oncely.lake.conform import conform

_AVRO = "oncely.schema"


class ParquetFiles:
    """Files of one schema; see :class:`oncely.lake.avro_file.AvroFiles`.

    Raises:
        TableMismatch: a type that files do not support, or no column at all.
    """

    extension = "parquet"
    overhead = 0

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = storable(schema)
        if not self.schema:
            raise TableMismatch("Parquet has no rows without columns", way_out='format = "avro"')
        self.avro = avro_schema_of(self.schema)
        self.id = schema_id(self.avro)
        self._head = self.schema.with_metadata({SCHEMA_ID: self.id, _AVRO: self.avro})

    def prepare(self, rows: pa.Table, _count: int) -> Prepared:
        """Rows from which many files will be written, converted to the schema once."""
        return Prepared(conform(rows, self.schema).cast(self._head))


class Prepared:
    """Rows of which any part can be written as a file."""

    def __init__(self, rows: pa.Table) -> None:
        self._rows = rows

    def file(self, start: int, rows: int) -> pa.Buffer:
        """The content of a file."""
        import pyarrow.parquet as pq

        out = pa.BufferOutputStream()
        pq.write_table(self._rows.slice(start, rows), out, compression="snappy")
        return out.getvalue()


def read(data: bytes) -> pa.Table:
    """The rows of a file that Oncely wrote, in its own schema.

    Raises:
        InvariantViolation: it is not such a file, or it is damaged.
    """
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(pa.BufferReader(data))
        avro = (rows.schema.metadata or {})[_AVRO.encode()].decode()
    except (pa.ArrowException, OSError, KeyError) as error:
        raise InvariantViolation(f"this is no Parquet file of ours: {error}") from None
    return rows.cast(arrow_schema_of(avro))
