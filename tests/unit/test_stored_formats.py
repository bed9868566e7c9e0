"""What is stored stays as it is, byte for byte: names, encoders and statements."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.golden.compare import FILES, assert_golden
from tests.golden.writers import PLAIN, Golden


@pytest.mark.parametrize("build", PLAIN.values(), ids=PLAIN)
def test_what_is_built_is_what_was_stored(build: Callable[[], Golden]) -> None:
    assert_golden(build())


def test_a_changed_byte_is_noticed() -> None:
    (name,) = PLAIN["names"]()
    with pytest.raises(AssertionError, match="what is stored is a promise"):
        assert_golden({name: (FILES / name).read_text() + " "})
