CREATE TABLE IF NOT EXISTS "orders" (
    "id" bigint NOT NULL,
    "small" integer,
    "ok" boolean,
    "ratio" real,
    "exact" double precision,
    "name" text,
    "raw" bytea,
    "day" date,
    "at" timestamptz,
    "local" timestamp,
    "price" numeric(12,2),
    "tags" text[],
    "who" jsonb
);
CREATE TABLE IF NOT EXISTS "orders" (
    "id" bigint NOT NULL,
    "small" integer,
    "ok" boolean,
    "ratio" real,
    "exact" double precision,
    "name" text,
    "raw" bytea,
    "day" date NOT NULL,
    "at" timestamptz,
    "local" timestamp,
    "price" numeric(12,2),
    PRIMARY KEY ("id", "day")
);
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
    schema_version BIGINT NOT NULL DEFAULT 1,
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
    digest BIGINT,
    recipe TEXT,
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
CREATE TABLE IF NOT EXISTS "oncely_amendments" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" BIGINT NOT NULL,
    amendment TEXT NOT NULL,
    range_start BIGINT NOT NULL,
    range_end BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    kind TEXT NOT NULL,
    records BIGINT NOT NULL,
    written BIGINT NOT NULL,
    rejected BIGINT NOT NULL,
    filtered BIGINT NOT NULL,
    superseded BIGINT NOT NULL DEFAULT 0,
    digest BIGINT,
    recipe TEXT,
    committed_at TIMESTAMPTZ NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (pipeline, topic, "partition", amendment)
);
