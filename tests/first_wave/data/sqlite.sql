BEGIN TRANSACTION;
CREATE TABLE "appended" (
    "id" INTEGER NOT NULL,
    "k" INTEGER,
    "grp" TEXT,
    "kafka_topic" TEXT,
    "kafka_partition" INTEGER,
    "kafka_offset" INTEGER
) STRICT;
INSERT INTO "appended" VALUES(1,1,'g1','wave1-sqlite-source',1,0);
INSERT INTO "appended" VALUES(5,5,'g2','wave1-sqlite-source',1,2);
INSERT INTO "appended" VALUES(9,1,'g0','wave1-sqlite-source',1,4);
INSERT INTO "appended" VALUES(11,3,'g2','wave1-sqlite-source',1,5);
INSERT INTO "appended" VALUES(0,0,'g0','wave1-sqlite-source',0,0);
INSERT INTO "appended" VALUES(2,2,'g2','wave1-sqlite-source',0,1);
INSERT INTO "appended" VALUES(4,4,'g1','wave1-sqlite-source',0,2);
INSERT INTO "appended" VALUES(6,6,'g0','wave1-sqlite-source',0,3);
INSERT INTO "appended" VALUES(8,0,'g2','wave1-sqlite-source',0,4);
INSERT INTO "appended" VALUES(10,2,'g1','wave1-sqlite-source',0,5);
INSERT INTO "appended" VALUES(15,7,'g0','wave1-sqlite-source',1,7);
INSERT INTO "appended" VALUES(19,3,'g1','wave1-sqlite-source',1,9);
INSERT INTO "appended" VALUES(21,5,'g0','wave1-sqlite-source',1,10);
INSERT INTO "appended" VALUES(12,4,'g0','wave1-sqlite-source',0,6);
INSERT INTO "appended" VALUES(14,6,'g2','wave1-sqlite-source',0,7);
INSERT INTO "appended" VALUES(16,0,'g1','wave1-sqlite-source',0,8);
INSERT INTO "appended" VALUES(18,2,'g0','wave1-sqlite-source',0,9);
INSERT INTO "appended" VALUES(20,4,'g2','wave1-sqlite-source',0,10);
INSERT INTO "appended" VALUES(22,6,'g1','wave1-sqlite-source',0,11);
INSERT INTO "appended" VALUES(25,1,'g1','wave1-sqlite-source',1,12);
INSERT INTO "appended" VALUES(29,5,'g2','wave1-sqlite-source',1,14);
INSERT INTO "appended" VALUES(31,7,'g1','wave1-sqlite-source',1,15);
INSERT INTO "appended" VALUES(35,3,'g2','wave1-sqlite-source',1,17);
INSERT INTO "appended" VALUES(24,0,'g0','wave1-sqlite-source',0,12);
INSERT INTO "appended" VALUES(26,2,'g2','wave1-sqlite-source',0,13);
INSERT INTO "appended" VALUES(28,4,'g1','wave1-sqlite-source',0,14);
INSERT INTO "appended" VALUES(30,6,'g0','wave1-sqlite-source',0,15);
INSERT INTO "appended" VALUES(32,0,'g2','wave1-sqlite-source',0,16);
INSERT INTO "appended" VALUES(34,2,'g1','wave1-sqlite-source',0,17);
INSERT INTO "appended" VALUES(39,7,'g0','wave1-sqlite-source',1,19);
INSERT INTO "appended" VALUES(41,1,'g2','wave1-sqlite-source',1,20);
INSERT INTO "appended" VALUES(45,5,'g0','wave1-sqlite-source',1,22);
INSERT INTO "appended" VALUES(36,4,'g0','wave1-sqlite-source',0,18);
INSERT INTO "appended" VALUES(38,6,'g2','wave1-sqlite-source',0,19);
INSERT INTO "appended" VALUES(40,0,'g1','wave1-sqlite-source',0,20);
INSERT INTO "appended" VALUES(42,2,'g0','wave1-sqlite-source',0,21);
INSERT INTO "appended" VALUES(44,4,'g2','wave1-sqlite-source',0,22);
INSERT INTO "appended" VALUES(46,6,'g1','wave1-sqlite-source',0,23);
CREATE TABLE "oncely_pipelines" (
    pipeline TEXT NOT NULL PRIMARY KEY,
    epoch INTEGER NOT NULL,
    run TEXT NOT NULL DEFAULT '',
    cluster_id TEXT NOT NULL,
    target TEXT NOT NULL,
    query_id TEXT,
    query_batch INTEGER,
    created_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z')
) STRICT;
INSERT INTO "oncely_pipelines" VALUES('wave1-sqlite',2,'a96adff633a74f6589e26835eda00601','oNGa2GISQPeJ5LO4s9LvtA','appended',NULL,NULL,'2026-11-22T12:24:57Z');
INSERT INTO "oncely_pipelines" VALUES('wave1-sqlite-upsert',2,'4e88e9bfcc9a41dd93a7e29aad638626','oNGa2GISQPeJ5LO4s9LvtA','upserted',NULL,NULL,'2026-11-22T12:25:00Z');
CREATE TABLE "oncely_positions" (
    pipeline TEXT NOT NULL,
    topic TEXT NOT NULL,
    "partition" INTEGER NOT NULL,
    "position" INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    topic_id TEXT NOT NULL,
    PRIMARY KEY (pipeline, topic, "partition")
) STRICT;
INSERT INTO "oncely_positions" VALUES('wave1-sqlite','wave1-sqlite-source',0,24,2,'unEkXdqFT5GZVKx8GO6V6A');
INSERT INTO "oncely_positions" VALUES('wave1-sqlite','wave1-sqlite-source',1,24,2,'unEkXdqFT5GZVKx8GO6V6A');
INSERT INTO "oncely_positions" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,30,2,'xIiZZBDbTHyznOO2iF2CDQ');
INSERT INTO "oncely_positions" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,30,2,'xIiZZBDbTHyznOO2iF2CDQ');
CREATE TABLE "oncely_ranges" (
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
    committed_at TEXT NOT NULL DEFAULT (replace(datetime('now'), ' ', 'T') || 'Z'),
    PRIMARY KEY (pipeline, topic, "partition", range_start, epoch)
) STRICT;
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',0,0,6,1,'data',6,6,0,0,0,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',1,0,6,1,'data',6,4,2,0,0,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',0,6,12,1,'data',6,6,0,0,0,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',1,6,12,1,'data',6,3,3,0,0,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,0,6,1,'data',6,6,0,0,0,'2026-11-22T12:25:01Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,0,6,1,'data',6,4,2,0,0,'2026-11-22T12:25:01Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,6,12,1,'data',6,6,0,0,0,'2026-11-22T12:25:02Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,6,12,1,'data',6,3,3,0,0,'2026-11-22T12:25:02Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,12,18,2,'data',6,6,0,0,0,'2026-11-22T12:26:53Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,12,18,2,'data',6,4,2,0,0,'2026-11-22T12:26:53Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,18,24,2,'data',6,6,0,0,0,'2026-11-22T12:26:57Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,18,24,2,'data',6,3,3,0,0,'2026-11-22T12:26:57Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',0,24,30,2,'data',6,6,0,0,0,'2026-11-22T12:26:58Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,24,30,2,'data',6,4,2,0,0,'2026-11-22T12:26:58Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',0,12,18,2,'data',6,6,0,0,0,'2026-11-22T12:30:15Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',1,12,18,2,'data',6,4,2,0,0,'2026-11-22T12:30:15Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',0,18,24,2,'data',6,6,0,0,0,'2026-11-22T12:30:20Z');
INSERT INTO "oncely_ranges" VALUES('wave1-sqlite','wave1-sqlite-source',1,18,24,2,'data',6,3,3,0,0,'2026-11-22T12:30:20Z');
CREATE TABLE "oncely_rejects" (
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
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,1,1795350190805,X'7B226B223A20337D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,3,1795350190805,X'7B226B223A20377D',X'7B226964223A20313039393531313632373738332C20226B223A20372C2022677270223A20226731227D','[["h", "MQ=="]]','decode','id: 1099511627783 is out of range of INT',1,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,6,1795350190805,X'7B226B223A20357D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,8,1795350190805,X'7B226B223A20317D',X'7B226964223A20313039393531313632373739332C20226B223A20312C2022677270223A20226732227D','[["h", "MQ=="]]','decode','id: 1099511627793 is out of range of INT',1,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,11,1795350190805,X'7B226B223A20377D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:24:59Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,1,1795350190991,X'7B226B223A20337D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:25:01Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,3,1795350190991,X'7B226B223A20377D',X'7B226964223A20313039393531313632373738332C20226B223A20372C2022677270223A20226731227D','[["h", "MQ=="]]','decode','id: 1099511627783 is out of range of INT',1,'2026-11-22T12:25:01Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,6,1795350190991,X'7B226B223A20357D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:25:02Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,8,1795350190991,X'7B226B223A20317D',X'7B226964223A20313039393531313632373739332C20226B223A20312C2022677270223A20226732227D','[["h", "MQ=="]]','decode','id: 1099511627793 is out of range of INT',1,'2026-11-22T12:25:02Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,11,1795350190991,X'7B226B223A20377D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',1,'2026-11-22T12:25:02Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,13,1795350336346,X'7B226B223A20337D',X'7B226964223A20313039393531313632373830332C20226B223A20332C2022677270223A20226730227D','[["h", "MQ=="]]','decode','id: 1099511627803 is out of range of INT',2,'2026-11-22T12:26:53Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,16,1795350336346,X'7B226B223A20317D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',2,'2026-11-22T12:26:53Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,18,1795350336346,X'7B226B223A20357D',X'7B226964223A20313039393531313632373831332C20226B223A20352C2022677270223A20226731227D','[["h", "MQ=="]]','decode','id: 1099511627813 is out of range of INT',2,'2026-11-22T12:26:57Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,21,1795350336346,X'7B226B223A20337D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',2,'2026-11-22T12:26:57Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,23,1795350336346,X'7B226B223A20377D',X'7B226964223A20313039393531313632373832332C20226B223A20372C2022677270223A20226732227D','[["h", "MQ=="]]','decode','id: 1099511627823 is out of range of INT',2,'2026-11-22T12:26:57Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,26,1795350336346,X'7B226B223A20357D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',2,'2026-11-22T12:26:58Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite-upsert','wave1-sqlite-upsert-source',1,28,1795350336346,X'7B226B223A20317D',X'7B226964223A20313039393531313632373833332C20226B223A20312C2022677270223A20226730227D','[["h", "MQ=="]]','decode','id: 1099511627833 is out of range of INT',2,'2026-11-22T12:26:58Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,13,1795350336321,X'7B226B223A20337D',X'7B226964223A20313039393531313632373830332C20226B223A20332C2022677270223A20226730227D','[["h", "MQ=="]]','decode','id: 1099511627803 is out of range of INT',2,'2026-11-22T12:30:15Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,16,1795350336321,X'7B226B223A20317D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',2,'2026-11-22T12:30:15Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,18,1795350336321,X'7B226B223A20357D',X'7B226964223A20313039393531313632373831332C20226B223A20352C2022677270223A20226731227D','[["h", "MQ=="]]','decode','id: 1099511627813 is out of range of INT',2,'2026-11-22T12:30:20Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,21,1795350336321,X'7B226B223A20337D',X'6E6F204A534F4E','[["h", "MQ=="]]','decode','the value is not JSON: Expecting value at character 1',2,'2026-11-22T12:30:20Z');
INSERT INTO "oncely_rejects" VALUES('wave1-sqlite','wave1-sqlite-source',1,23,1795350336321,X'7B226B223A20377D',X'7B226964223A20313039393531313632373832332C20226B223A20372C2022677270223A20226732227D','[["h", "MQ=="]]','decode','id: 1099511627823 is out of range of INT',2,'2026-11-22T12:30:20Z');
CREATE TABLE "upserted" (
    "id" INTEGER NOT NULL,
    "k" INTEGER NOT NULL,
    "grp" TEXT,
    PRIMARY KEY ("k")
) STRICT;
INSERT INTO "upserted" VALUES(56,0,'g2');
INSERT INTO "upserted" VALUES(49,1,'g1');
INSERT INTO "upserted" VALUES(58,2,'g1');
INSERT INTO "upserted" VALUES(59,3,'g2');
INSERT INTO "upserted" VALUES(52,4,'g1');
INSERT INTO "upserted" VALUES(45,5,'g0');
INSERT INTO "upserted" VALUES(54,6,'g0');
INSERT INTO "upserted" VALUES(55,7,'g1');
CREATE INDEX oncely_ranges_by_end
    ON "oncely_ranges" (pipeline, topic, "partition", range_end);
COMMIT;
