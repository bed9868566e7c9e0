CREATE TABLE IF NOT EXISTS "oncely_pipelines" (
    pipeline TEXT NOT NULL PRIMARY KEY,
    epoch BIGINT NOT NULL,
    run TEXT NOT NULL DEFAULT '',
    cluster_id TEXT NOT NULL,
    target TEXT NOT NULL,
    query_id TEXT,
    query_batch BIGINT,
    held_epoch BIGINT NOT NULL DEFAULT 0,
    held_by TEXT NOT NULL DEFAULT '',
    query_plan TEXT,
    target_identity TEXT,
    ledger_identity TEXT,
    max_rejects TEXT NOT NULL DEFAULT '',
    counted_records BIGINT NOT NULL DEFAULT 0,
    counted_rejects BIGINT NOT NULL DEFAULT 0,
    created_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP
);
CREATE TABLE IF NOT EXISTS "oncely_positions" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "position" BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    topic_id TEXT NOT NULL,
    leader_epoch BIGINT,
    run TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (pipeline, topic, "partition")
);
CREATE TABLE IF NOT EXISTS "oncely_ranges" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    range_start BIGINT NOT NULL,
    range_end BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    kind TEXT NOT NULL,
    records BIGINT NOT NULL,
    written BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    filtered BIGINT NOT NULL,
    superseded BIGINT NOT NULL DEFAULT 0,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
);
CREATE INDEX IF NOT EXISTS oncely_ranges_in_force
    ON "oncely_ranges" (pipeline, topic, "partition", superseded, range_end);
CREATE TABLE IF NOT EXISTS "oncely_rejects" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    "offset" BIGINT NOT NULL,
    timestamp_ms BIGINT,
    "key" BYTEA,
    "value" BYTEA,
    headers TEXT NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    epoch BIGINT NOT NULL,
    rejected_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", "offset")
);
