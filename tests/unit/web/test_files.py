"""Files and inferred columns, from a manifest."""

from __future__ import annotations

import json
from pathlib import Path

from oncely.cli.web import Subject
from oncely.kinds.data_file import Scope
from oncely.kinds.files.manifest import Contents
from oncely.kinds.files.records import ManifestFile, ScopeSchema
from oncely.pipeline.status import Judgement
from oncely.web.model import Detail, Overview, Problem, files_of
from oncely.web.page import pipeline


def file(path: str, rows: int, scope: Scope, schema: str) -> ManifestFile:
    return ManifestFile(
        path, "avro", rows, rows * 100, "00", {}, None, [], scope, schema, "p", 1, 0
    )


def schema(scope: Scope, *names: str) -> ScopeSchema:
    fields = [{"name": name, "type": ["null", "long"], "default": None} for name in names]
    avro = json.dumps({"type": "record", "name": "row", "fields": fields})
    return ScopeSchema("s2", scope, avro)


ANN: Scope = ("<b>ann</b>",)
FILES = [
    file("user=ann/date=1/a.avro", 10, ANN, "s1"),
    file("user=ann/date=1/b.avro", 5, ANN, "s2"),
    file("user=ann/date=2/c.avro", 1, ANN, "s2"),
    file("user=bob/date=1/d.avro", 7, ("bob",), "s2"),
]
CONTENTS = Contents(
    {one.path: one for one in FILES},
    schemas={ANN: schema(ANN, "id", "total"), ("bob",): schema(("bob",), "id")},
)


def test_files_by_directory_and_columns_by_scope() -> None:
    found = files_of(CONTENTS)
    assert (found.files, found.rows, found.bytes) == (4, 23, 2_300)
    assert list(found.directories) == [
        ("user=ann/date=1", 2, 15),
        ("user=ann/date=2", 1, 1),
        ("user=bob/date=1", 1, 7),
    ]
    scopes = [(one.scope, one.files, one.versions, len(one.columns)) for one in found.scopes]
    assert scopes == [("<b>ann</b>", 3, 2, 2), ("bob", 1, 1, 1)]
    assert (found.more, found.more_scopes) == (0, 0)


def test_many_directories_and_scopes_are_counted() -> None:
    many = [file(f"user={n:03}/a.avro", 1, (f"u{n}",), "s") for n in range(70)]
    schemas = {one.scope: schema(one.scope, "id") for one in many}
    found = files_of(Contents({one.path: one for one in many}, schemas=schemas))
    assert (len(found.directories), found.more) == (50, 20)
    assert (len(found.scopes), found.more_scopes) == (20, 50)


def test_their_part_of_the_page() -> None:
    subject = Subject("p", Path("p.toml"))
    reading, none = Overview(Judgement("current", "", "ok")), Problem("none")
    text = pipeline(
        subject, reading, Detail(files=files_of(CONTENTS), problems=[none]), None, None, None
    )
    assert "4 files, 23 rows, 2.2 KiB." in text
    assert "2 columns, 3 files with 2 versions of the schema" in text
    assert "<b>ann" not in text
    assert "&lt;b&gt;ann" in text
