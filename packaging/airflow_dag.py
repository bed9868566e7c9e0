"""An Airflow DAG that loads the new records of a topic every hour.

`--until latest` ends when the records that exist at the start are committed. A retry neither loses
nor doubles records: the position is in the destination.
"""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta

from airflow.decorators import dag, task
from airflow.exceptions import AirflowException, AirflowFailException

PIPELINE = "/etc/oncely/flights.toml"
NO_RETRY = (2, 3)  # the pipeline file is wrong; a newer run has taken over


@dag(
    schedule="@hourly",
    start_date=datetime(2026, 1, 1),
    catchup=False,  # one run reads everything that is left
    max_active_runs=1,  # a second one would take over from the first
    default_args={"retries": 3, "retry_delay": timedelta(minutes=1)},
)
def flights() -> None:
    """Load, and show the state in the log."""

    @task
    def load() -> None:
        code = subprocess.run(["oncely", "run", PIPELINE, "--until", "latest"], check=False)
        said = f"oncely run ended with exit code {code.returncode}"
        if code.returncode in NO_RETRY:
            raise AirflowFailException(said)
        if code.returncode:
            raise AirflowException(said)

    @task
    def status() -> None:
        subprocess.run(["oncely", "status", PIPELINE], check=True)

    load() >> status()


flights()
