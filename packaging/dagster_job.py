"""A Dagster asset that loads the new records of a topic every hour.

`--until latest` ends when the records that exist at the start are committed. A retry neither loses
nor doubles records: the position is in the destination.
"""

from __future__ import annotations

import json
import subprocess

import dagster as dg

PIPELINE = "/etc/oncely/flights.toml"
NO_RETRY = (2, 3)  # the pipeline file is wrong; a newer run has taken over


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=3, delay=60))
def flights(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """The table of the pipeline."""
    done = subprocess.run(["oncely", "run", PIPELINE, "--until", "latest"], check=False)
    if done.returncode:
        raise dg.Failure(
            f"oncely run ended with exit code {done.returncode}",
            allow_retries=done.returncode not in NO_RETRY,
        )
    shown = subprocess.run(
        ["oncely", "status", PIPELINE, "--json"], check=True, capture_output=True, text=True
    )
    status = json.loads(shown.stdout)
    context.log.info("epoch %s, %s", status["epoch"], status["state"])
    lag = sum(one["lag"] for one in status["partitions"])
    return dg.MaterializeResult(metadata={"lag": lag, "rejects": status["rejects"]})


job = dg.define_asset_job("load_flights", selection=[flights])
defs = dg.Definitions(
    assets=[flights],
    jobs=[job],
    schedules=[dg.ScheduleDefinition(job=job, cron_schedule="0 * * * *")],
)
