"""The numbers that `make check` compares with their records, on code whose size is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import size

_STORE = '''"""A docstring
of two lines."""

from __future__ import annotations
from package import run


def store(sink: object, kind: str) -> str:
    """What it does."""
    # a comment
    if kind == "delta":
        import package.inner.deep
    match sink:
        case SqlSink():
            return """text,
            two lines"""
'''
_TEST = """import pytest

TABLE = 1


class TestAll:
    @pytest.mark.long
    def test_it(self):
        assert TABLE


def helper(): ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "src/package/__init__.py": "from package.store import store\n",
        "src/package/run.py": "import package.store\n",
        "src/package/store.py": _STORE,
        "src/package/inner/__init__.py": "",
        "src/package/inner/deep.py": "X = 1\n",
        "src/package/kinds/delta.py": 'if kind == "delta": ...\n',
        "tests/test_it.py": _TEST,
        "models/check.py": "A = 1\nB = 2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_number(project: Path) -> None:
    assert size.measure(project) == {
        "code lines of src": 1 + 1 + 9 + 0 + 1 + 1,
        "files of src": 6,
        "places that ask for a kind outside its folder": 2,
        "modules in import circles": 3 - 1,  # run and store; the package imports them
        "lines of tests and lanes": 12 + 2,
        "lines of tests outside test functions": 12 - 3,
    }


def test_a_number_that_grows_fails_and_one_that_shrinks_is_recorded(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(size, "ROOT", project)
    monkeypatch.setattr(size.measure, "__defaults__", (project,))
    record = project / "tests/size.json"
    most = {name: {"at most": number, "reason": "r"} for name, number in size.measure().items()}
    most["files of src"]["at most"] = 7
    record.write_text(json.dumps(most))
    assert size.main([]) == 0
    assert json.loads(record.read_text()) == most
    assert size.main(["--record"]) == 0
    most["files of src"]["at most"] = 6
    assert json.loads(record.read_text()) == most
    (project / "src/package/more.py").touch()
    capsys.readouterr()
    assert size.main(["--record"]) == 1
    assert json.loads(record.read_text()) == most
    assert "7 files of src, 6 recorded  LARGER" in capsys.readouterr().out
