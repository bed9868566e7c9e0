"""``oncely audit``: two datasets, the view by identity, the page, and a watch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest

from oncely.testing.processes import await_that
from oncely.testing.servers.process import free_port
from tests.conftest import repository
from tests.prometheus import samples
from tests.scenarios.commands import oncely, oncely_json
from tests.scenarios.world import World


def places(world: World) -> tuple[list[str], dict[str, str]]:
    """The options for a pair, and the environment with its password."""
    to = urlsplit(world.url)
    schema = "id BIGINT, grp STRING"
    left = f"kafka:{world.topic}?brokers={world.brokers}&schema={schema}"
    right = (
        f"jdbc:postgresql://{to.hostname}:{to.port}{to.path}?dbtable=rows"
        f"&user={quote(to.username or '')}&password=${{AUDIT_PW}}"
    )
    return ["--left", left, "--right", right], {"AUDIT_PW": unquote(to.password or "")}


@pytest.mark.usefixtures("spark")
def test_two_datasets(runtime: Any, make_world: Callable[..., World], tmp_path: Path) -> None:
    world = make_world()
    world.publish(40)
    world.run(runtime)
    sides, env = places(world)
    html = tmp_path / "out" / "audit.html"
    outputs = ["--html", html]
    whole = oncely_json("audit", *sides, "--id", "id", "--by", "grp", *outputs, env=env)
    assert (whole["verdict"], whole["records"], len(whole["hours"])) == ("clean", 40, 7)
    assert "All 40 records have arrived, each once" in html.read_text()

    world.sql("DELETE FROM rows WHERE id = 7")
    columns = ["--source-columns", "kafka_topic,kafka_partition,kafka_offset"]
    done = oncely("audit", *sides, *columns, *outputs, env=env, expect=1)
    assert done.stdout.startswith("damaged")
    assert f"{world.topic}-3 offset 1: 1 record, no row" in done.stdout
    assert "Damage was found: 1 lost" in html.read_text()
    password = env["AUDIT_PW"]
    for text in (done.stdout, done.stderr, html.read_text()):
        assert password not in text


def test_the_page_names_the_record_and_what_repairs_it(
    runtime: Any, make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world()
    world.publish(40)
    world.run(runtime)
    world.sql("DELETE FROM rows WHERE id = 7")
    file, html = world.file(), tmp_path / "audit.html"
    whole = oncely_json("audit", file, "--html", html, expect=1)
    (lost,) = whole["lost"]
    assert "record" not in lost
    text = html.read_text()
    place = f'<tr><th scope="row"><bdi>{world.topic}-{lost["partition"]}<'
    row = text.partition(place)[2].partition("</tr>")[0]
    assert "{&quot;id&quot;: 7, &quot;grp&quot;: &quot;g0&quot;" in row
    assert f"oncely repair <bdi>{file}</bdi>" in text
    assert "<bdi>sql " in text


@pytest.mark.usefixtures("spark")
def test_the_view_by_identity_of_a_pipeline(
    runtime: Any, make_world: Callable[..., World], tmp_path: Path
) -> None:
    world = make_world()
    world.publish(40)
    world.run(runtime)
    world.sql("DELETE FROM rows WHERE id IN (7, 8)")
    html = tmp_path / "audit.html"
    whole = oncely_json(
        "audit", world.file(), "--id", "id", "--by", "grp", "--html", html, expect=1
    )
    assert whole["found"] == {"lost": 2, "duplicated": 0, "altered": 0, "unexpected": 0}
    groups = {one["group"]: one["missing"] for one in whole["hours"]}
    assert groups == {f"g{n}": int(n in (0, 1)) for n in range(7)}
    assert "id 7: 1 record, no row" in html.read_text()


@pytest.mark.parametrize(
    ("options", "told", "way_out"),
    [
        ([], "a pipeline file, or --left and --right", "oncely audit FILE"),
        (["x.toml", "--left", "a:b", "--right", "c:d"], "a pipeline file, or --left and --right",
         "oncely audit FILE"),
        (["--left", "parquet:/x"], "--left and --right belong together", ""),
        (["--left", "parquet:/x", "--right", "parquet:/y"], "need an id", "--id"),
        (["x.toml", "--metrics", ":1"], "need --watch", ""),
        (["--left", "parquet:/x", "--right", "parquet:/y", "--id", "a", "--until", "soon"],
         "is no time", "ISO 8601"),
    ],
)  # fmt: skip
def test_wrong_options(runtime: Any, options: list[str], told: str, way_out: str) -> None:
    done = oncely("audit", *options, expect=2)
    assert told in done.stderr
    assert ("way out" in done.stderr) == bool(way_out)
    assert way_out in done.stderr


def test_options_that_a_pipeline_file_answers(make_world: Callable[..., World]) -> None:
    file = make_world().file()
    done = oncely("audit", file, "--id", "id", "--keyed", expect=2)
    assert "need --left and --right" in done.stderr
    assert "--by needs an id" in oncely("audit", file, "--by", "grp", expect=2).stderr
    done = oncely("audit", file, "--watch", "--every", "often", expect=2)
    assert "is no duration" in done.stderr


# -- a watch --------------------------------------------------------------------------------------


@contextmanager
def watching(*options: object) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-m", "oncely.cli", "audit", *map(str, options), "--watch"]
    process = subprocess.Popen(
        words, cwd=repository(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def scraped(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        return str(answer.read().decode())


def test_a_watch_is_scraped_and_ends_on_sigterm(
    runtime: Any, make_world: Callable[..., World]
) -> None:
    world, port = make_world(), free_port()
    world.publish(40)
    world.run(runtime)
    metrics = ["--metrics", f"127.0.0.1:{port}"]
    with watching(world.file(), "--every", "0.2", *metrics, "--json") as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        assert (first["verdict"], first["records"]) == ("clean", 40)
        found, own = samples(scraped(port)), f'pipeline="{world.name}"'
        assert found["oncely_audit_verdict", f'{own},verdict="clean"'] == 1
        assert abs(found["oncely_complete_until_timestamp_seconds", own] - time.time()) < 600

        world.publish(10, first=40)
        world.run(runtime)
        lines = iter(process.stdout.readline, "")
        assert any(json.loads(line)["records"] == 50 for line in lines)
        world.sql("DELETE FROM rows WHERE id = 3")
        assert any(json.loads(line)["verdict"] == "damaged" for line in lines)
        lost = "oncely_audit_findings", f'{own},kind="lost"'
        await_that(lambda: samples(scraped(port))[lost] == 1, "the gauge shows it")
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 1  # damage was found last
        assert "Traceback" not in process.communicate()[1]


def test_a_watch_until_a_time(runtime: Any, make_world: Callable[..., World]) -> None:
    world = make_world()
    world.publish(10)
    world.run(runtime)
    until = "2026-01-01T00:00:00Z"  # long since
    done = oncely("audit", world.file(), "--watch", "--until", until)
    assert "clean" in done.stdout
    later = "2999-01-01"
    watch = ("audit", world.file(), "--watch", "--until", later)
    done = oncely(*watch, "--every", "0.1", "--timeout", "0.5", expect=4)
    assert "complete until" in done.stdout
    world.sql("DELETE FROM rows WHERE id = 3")
    assert "1 lost" in oncely(*watch, "--timeout", "60", expect=1).stdout


@pytest.mark.long  # in every run: a watch that SIGTERM ends, and one that its timeout ends
def test_a_signal_ends_a_watch_that_has_not_proved_its_time(
    runtime: Any, make_world: Callable[..., World]
) -> None:
    world = make_world()
    world.publish(10)
    world.run(runtime)
    for number, code, more in (
        (signal.SIGINT, 0, []),
        (signal.SIGTERM, 4, ["--until", "2999-01-01"]),
    ):
        with watching(world.file(), *more) as process:
            assert process.stdout is not None
            assert "clean" in process.stdout.readline()  # it waits for a minute now
            process.send_signal(number)
            assert process.wait(180) == code
            assert "Traceback" not in process.communicate()[1]
