CREATE TABLE IF NOT EXISTS "orders" (
    "id" INTEGER NOT NULL,
    "small" INTEGER,
    "ok" INTEGER,
    "ratio" REAL,
    "exact" REAL,
    "name" TEXT,
    "raw" BLOB,
    "day" TEXT,
    "at" TEXT,
    "local" TEXT,
    "price" TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS "orders" (
    "id" INTEGER NOT NULL,
    "small" INTEGER,
    "ok" INTEGER,
    "ratio" REAL,
    "exact" REAL,
    "name" TEXT,
    "raw" BLOB,
    "day" TEXT NOT NULL,
    "at" TEXT,
    "local" TEXT,
    "price" TEXT,
    PRIMARY KEY ("id", "day")
) STRICT;
CREATE TABLE IF NOT EXISTS "oncely_pipelines" (
    pipeline TEXT NOT NULL PRIMARY KEY,
    epoch INTEGER NOT NULL,
    run TEXT NOT NULL DEFAULT '',
    cluster_id TEXT NOT NULL,
    target TEXT NOT NULL,
    query_id TEXT,
    query_batch INTEGER,
    held_epoch INTEGER NOT NULL DEFAULT 0,
    held_by TEXT NOT NULL DEFAULT '',
    query_plan TEXT,
    target_identity TEXT,
    ledger_identity TEXT,
    max_rejects TEXT NOT NULL DEFAULT '',
    counted_records INTEGER NOT NULL DEFAULT 0,
    counted_rejects INTEGER NOT NULL DEFAULT 0,
    schema_version INTEGER NOT NULL DEFAULT 1,
    created_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z')
) STRICT;
CREATE TABLE IF NOT EXISTS "oncely_positions" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL,
    "position" INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    topic_id TEXT NOT NULL,
    leader_epoch INTEGER,
    run TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (pipeline, topic, "partition")
) STRICT;
CREATE TABLE IF NOT EXISTS "oncely_ranges" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL,
    range_start INTEGER NOT NULL,
    range_end INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    kind TEXT NOT NULL,
    records INTEGER NOT NULL,
    written INTEGER NOT NULL,
    rejected INTEGER NOT NULL,
    filtered INTEGER NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0,
    digest INTEGER,
    recipe TEXT,
    committed_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z'),
    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
) STRICT;
CREATE INDEX IF NOT EXISTS oncely_ranges_in_force
    ON "oncely_ranges" (pipeline, topic, "partition", superseded, range_end);
CREATE TABLE IF NOT EXISTS "oncely_rejects" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL,
    "offset" INTEGER NOT NULL,
    timestamp_ms INTEGER,
    "key" BLOB,
    "value" BLOB,
    headers TEXT NOT NULL,
    stage TEXT NOT NULL,
    reason TEXT NOT NULL,
    epoch INTEGER NOT NULL,
    rejected_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z'),
    PRIMARY KEY (pipeline, topic, "partition", "offset")
) STRICT;
CREATE TABLE IF NOT EXISTS "oncely_amendments" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL,
    amendment TEXT NOT NULL,
    range_start INTEGER NOT NULL,
    range_end INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    kind TEXT NOT NULL,
    records INTEGER NOT NULL,
    written INTEGER NOT NULL,
    rejected INTEGER NOT NULL,
    filtered INTEGER NOT NULL,
    superseded INTEGER NOT NULL DEFAULT 0,
    digest INTEGER,
    recipe TEXT,
    committed_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z'),
    PRIMARY KEY (pipeline, topic, "partition", amendment)
) STRICT;
