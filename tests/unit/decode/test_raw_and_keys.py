from __future__ import annotations

import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from oncely.decode.base import Decoded
from oncely.decode.json import JsonDecoder
from oncely.decode.metadata import RawDecoder, TextDecoder, WithKey
from oncely.decode.schema import parse_schema
from oncely.errors import ConfigError


def records(*pairs: tuple[bytes | None, bytes | None]) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([key for key, _ in pairs], pa.binary()),
            "value": pa.array([value for _, value in pairs], pa.binary()),
        }
    )


def outcome(decoded: Decoded, n: int) -> list[Any]:
    """For each record its row, ("deletes", key) or the reason of its rejection."""
    found: list[Any] = [None] * n
    rows = zip(decoded.row_record.to_pylist(), decoded.rows.to_pylist(), strict=True)
    assert decoded.tombstones is not None
    dead = zip(decoded.tombstone_record.to_pylist(), decoded.tombstones.to_pylist(), strict=True)
    outcomes = [*rows, *((at, ("deletes", key)) for at, key in dead)]
    for at, what in [*outcomes, *((r.record, r.reason) for r in decoded.rejections)]:
        assert found[at] is None
        found[at] = what
    return found


class TestRaw:
    def test_every_record_is_a_row_of_the_chosen_columns(self) -> None:
        headers = pa.array(
            [[{"key": "a", "value": b"1"}, {"key": "a", "value": None}], None],
            pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
        )
        table = records((b"k", b"\xff\x00"), (None, None))
        table = table.append_column("headers", headers)
        at = datetime(2013, 1, 1, 5, tzinfo=UTC)
        stamps = pa.array([at, None], pa.timestamp("us", "America/New_York"))
        table = table.append_column("timestamp", stamps)
        decoder = RawDecoder(("value", "headers", "timestamp", "key"))
        assert decoder.needs == {"key", "value", "headers", "timestamp"}
        decoded = pickle.loads(pickle.dumps(decoder)).decode(table)
        assert decoded.rows.schema == decoder.schema
        assert decoded.rows.schema.names == ["value", "headers", "timestamp", "key"]
        assert decoded.rows.slice(0, 1).to_pylist() == [
            {
                "value": b"\xff\x00",
                "headers": [{"key": "a", "value": b"1"}, {"key": "a", "value": None}],
                "timestamp": at,
                "key": b"k",
            }
        ]
        assert set(decoded.rows.to_pylist()[1].values()) == {None}
        assert decoded.row_record.to_pylist() == [0, 1]
        assert list(decoded.rejections) == []

    def test_slices_large_types_and_no_records(self) -> None:
        table = records(*((b"%d" % n, None) for n in range(10))).slice(3, 4)
        table = table.set_column(0, "key", table["key"].cast(pa.large_binary()))
        decoded = RawDecoder(("key",)).decode(table)
        assert decoded.rows["key"].to_pylist() == [b"3", b"4", b"5", b"6"]
        assert decoded.rows.schema.field("key").type == pa.binary()
        assert RawDecoder(("key",)).decode(table.slice(0, 0)).rows.num_rows == 0


def json_decoder(ddl: str, column: str = "value") -> JsonDecoder:
    return JsonDecoder(parse_schema(ddl), column)


def text_key(name: str) -> TextDecoder:
    return TextDecoder(pa.schema({name: pa.string()}), "key")


def test_a_key_may_be_text() -> None:
    decoded = text_key("carrier").decode(
        records(("ö".encode(), None), (b"\xff", None), (None, None), (b"", None))
    )
    assert decoded.rows.to_pylist() == [{"carrier": "ö"}, {"carrier": None}, {"carrier": ""}]
    assert decoded.row_record.to_pylist() == [0, 2, 3]
    assert [(r.record, r.reason) for r in decoded.rejections] == [
        (1, "the key is not UTF-8: byte 0xff at 0")
    ]


class TestWithKey:
    decoder = WithKey(
        json_decoder("n INT NOT NULL"), json_decoder("id BIGINT NOT NULL, part STRING", "key")
    )

    def test_values_and_keys_become_rows_tombstones_and_rejections(self) -> None:
        pairs: list[tuple[bytes | None, bytes | None]] = [
            (b'{"id": 1, "part": "a"}', b'{"n": 10}'),
            (b'{"id": 2}', None),
            (b'{"id": "x"}', b'{"n": 30}'),
            (b'{"id": 4}', b'{"n": "x"}'),
            (b"{}", b"{}"),
            (None, None),
            (None, b'{"n": 70}'),
            (b"[]", None),
            (b'{"id": 9}', b'{"n": 90}'),
        ]
        decoded = self.decoder.decode(records(*pairs))
        assert outcome(decoded, len(pairs)) == [
            {"n": 10, "id": 1, "part": "a"},
            ("deletes", {"id": 2, "part": None}),
            'id: expected BIGINT, found the text "x"',
            'n: expected INT, found the text "x"',
            "n: found nothing, but it is NOT NULL",
            "value and key are null: a tombstone that names nothing",
            "the key is null",
            "the key is not a JSON object but an array of 0",
            {"n": 90, "id": 9, "part": None},
        ]
        assert [r.record for r in decoded.rejections] == [2, 3, 4, 5, 6, 7]
        assert decoded.rows.schema == self.decoder.schema
        assert decoded.tombstones is not None
        assert decoded.tombstones.schema.names == ["id", "part"]

    def test_chunks_slices_pickle_and_no_records(self) -> None:
        pairs = [(b'{"id": %d}' % n, None if n % 3 else b'{"n": %d}' % n) for n in range(20)]
        whole = pa.concat_tables([records(*pairs[:7]), records(*pairs[7:])]).slice(2, 15)
        again = pickle.loads(pickle.dumps(self.decoder))
        for decoder in (self.decoder, again):
            decoded = decoder.decode(whole)
            assert decoded.row_record.to_pylist() == [n - 2 for n in range(2, 17) if not n % 3]
            assert decoded.rows["id"].to_pylist() == [n for n in range(2, 17) if not n % 3]
            assert decoded.tombstone_record.to_pylist() == [n - 2 for n in range(2, 17) if n % 3]
            for none in (whole.slice(0, 0), pa.Table.from_batches([], whole.schema)):
                nothing = decoder.decode(none)
                assert (len(nothing.rows), len(nothing.tombstones)) == (0, 0)
                assert nothing.rows.schema == decoder.schema

    def test_a_shared_column_is_one_and_must_agree(self) -> None:
        decoder = WithKey(json_decoder("id STRING, n INT"), text_key("id"))
        assert decoder.schema == pa.schema([("id", pa.string()), ("n", pa.int32())])
        five = b"5"
        pairs: list[tuple[bytes | None, bytes | None]] = [
            (five, b'{"id": "5", "n": 1}'),
            (five, b'{"n": 2}'),
            (five, b'{"id": "6", "n": 3}'),
            (None, b'{"id": "7", "n": 4}'),
            (None, b'{"n": 5}'),
            (five, None),
            (None, None),
        ]
        assert outcome(decoder.decode(records(*pairs)), len(pairs)) == [
            {"id": "5", "n": 1},
            {"id": "5", "n": 2},
            "id: '5' in the key, '6' in the value",
            {"id": "7", "n": 4},
            {"id": None, "n": 5},
            ("deletes", {"id": "5"}),
            "value and key are null: a tombstone that names nothing",
        ]

    @pytest.mark.parametrize(("value", "key"), [("", " NOT NULL"), (" NOT NULL", "")])
    def test_a_shared_column_is_not_null_when_either_says_so(self, value: str, key: str) -> None:
        decoder = WithKey(
            json_decoder(f"id INT{value}, n INT"), json_decoder(f"id INT{key}", "key")
        )
        assert not decoder.schema.field("id").nullable
        assert decoder.schema.names == ["id", "n"]

    @pytest.mark.parametrize(
        ("value", "key", "problem"),
        [
            ("id STRING", "id BIGINT", "column 'id' is BIGINT in the key and STRING in the value"),
            ("id ARRAY<INT>", "id ARRAY<INT>", "ARRAY<INT> has no ="),
        ],
    )
    def test_columns_that_can_not_be_one_are_a_configuration_error(
        self, value: str, key: str, problem: str
    ) -> None:
        with pytest.raises(ConfigError) as caught:
            WithKey(json_decoder(value), json_decoder(key, "key"))
        assert caught.value.key == "decode.key"
        assert problem in caught.value.message

    def test_raw_values_may_have_keys_too(self) -> None:
        decoder = WithKey(RawDecoder(("value",)), text_key("id"))
        assert decoder.needs == {"key", "value"}
        pairs: list[tuple[bytes | None, bytes | None]] = [(b"a", b"1"), (b"b", None)]
        assert outcome(decoder.decode(records(*pairs)), 2) == [
            {"value": b"1", "id": "a"},
            ("deletes", {"id": "b"}),
        ]


def test_without_a_key_decoder_a_null_value_is_a_rejection() -> None:
    decoded = json_decoder("n INT").decode(records((b"k", None)))
    assert decoded.tombstones is None
    assert [r.reason for r in decoded.rejections] == ["the value is null"]


@pytest.mark.parametrize(
    ("kind", "texts", "values"),
    [
        ("BIGINT", [b"7", b"-1", None, b"7.0"], [7, -1, None, "expected BIGINT, found 7.0"]),
        ("INT", [b"x", b"", b"007", b"9999999999"], ['"x"', '""', '"007"', "out of range of INT"]),
        ("DECIMAL(4,2)", [b"1.5", b"123"], [Decimal("1.50"), "does not fit"]),
        ("BOOLEAN", [b"true", b"1"], [True, "expected BOOLEAN, found 1"]),
        ("DATE", [b"2026-01-31", b"2026-02-30"], [date(2026, 1, 31), "expected DATE"]),
        ("DOUBLE", [b"1", b"1e3", b"nan"], [1.0, 1000.0, "expected DOUBLE"]),
        ("STRING", [b"7", b"\xff"], ["7", "not UTF-8"]),
    ],
)  # fmt: skip
def test_the_text_of_a_key_spells_a_value_of_its_type(
    kind: str, texts: list[bytes | None], values: list[Any]
) -> None:
    schema = pa.schema({"id": parse_schema(f"x {kind}").field(0).type})
    decoded = TextDecoder(schema, "key").decode(records(*((one, b"") for one in texts)))
    found: dict[int, Any] = dict(zip(decoded.row_record.to_pylist(), decoded.rows["id"].to_pylist(),
                                     strict=True))  # fmt: skip
    reasons = {one.record: one.reason for one in decoded.rejections}
    for at, value in enumerate(values):
        if at in reasons:
            assert str(value) in reasons[at]
        else:
            assert found[at] == value
