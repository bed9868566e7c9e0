SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.appended (
    id bigint NOT NULL,
    k integer,
    grp text,
    kafka_topic text,
    kafka_partition integer,
    kafka_offset bigint
);
CREATE TABLE public.oncely_pipelines (
    pipeline text NOT NULL,
    epoch bigint NOT NULL,
    run text DEFAULT ''::text NOT NULL,
    cluster_id text NOT NULL,
    target text NOT NULL,
    query_id text,
    query_batch bigint,
    created_at timestamp with time zone DEFAULT CURRENT_TIMESTAMP NOT NULL
);
CREATE TABLE public.oncely_positions (
    pipeline text NOT NULL,
    topic text NOT NULL,
    partition bigint NOT NULL,
    "position" bigint NOT NULL,
    epoch bigint NOT NULL,
    topic_id text NOT NULL
);
CREATE TABLE public.oncely_ranges (
    pipeline text NOT NULL,
    topic text NOT NULL,
    partition bigint NOT NULL,
    range_start bigint NOT NULL,
    range_end bigint NOT NULL,
    epoch bigint NOT NULL,
    kind text NOT NULL,
    records bigint NOT NULL,
    written bigint NOT NULL,
    rejected bigint NOT NULL,
    filtered bigint NOT NULL,
    superseded bigint DEFAULT 0 NOT NULL,
    committed_at timestamp with time zone DEFAULT CURRENT_TIMESTAMP NOT NULL
);
CREATE TABLE public.oncely_rejects (
    pipeline text NOT NULL,
    topic text NOT NULL,
    partition bigint NOT NULL,
    "offset" bigint NOT NULL,
    timestamp_ms bigint,
    key bytea,
    value bytea,
    headers text NOT NULL,
    stage text NOT NULL,
    reason text NOT NULL,
    epoch bigint NOT NULL,
    rejected_at timestamp with time zone DEFAULT CURRENT_TIMESTAMP NOT NULL
);
CREATE UNLOGGED TABLE public.oncely_s_21c6512391d4_2_2_46 (
    id integer,
    k integer,
    grp text,
    _oncely_ord bigint,
    _oncely_deleted bigint
);
CREATE UNLOGGED TABLE public.oncely_s_21c6512391d4_2_2_47 (
    id integer,
    k integer,
    grp text,
    _oncely_ord bigint,
    _oncely_deleted bigint
);
CREATE TABLE public.staged (
    id integer,
    k integer,
    grp text
);
CREATE TABLE public.upserted (
    id integer NOT NULL,
    k integer NOT NULL,
    grp text
);
INSERT INTO public.appended VALUES (0, 0, 'g0', 'wave1-append-source', 0, 0);
INSERT INTO public.appended VALUES (2, 2, 'g2', 'wave1-append-source', 0, 1);
INSERT INTO public.appended VALUES (4, 4, 'g1', 'wave1-append-source', 0, 2);
INSERT INTO public.appended VALUES (6, 6, 'g0', 'wave1-append-source', 0, 3);
INSERT INTO public.appended VALUES (8, 0, 'g2', 'wave1-append-source', 0, 4);
INSERT INTO public.appended VALUES (10, 2, 'g1', 'wave1-append-source', 0, 5);
INSERT INTO public.appended VALUES (1, 1, 'g1', 'wave1-append-source', 1, 0);
INSERT INTO public.appended VALUES (5, 5, 'g2', 'wave1-append-source', 1, 2);
INSERT INTO public.appended VALUES (9, 1, 'g0', 'wave1-append-source', 1, 4);
INSERT INTO public.appended VALUES (11, 3, 'g2', 'wave1-append-source', 1, 5);
INSERT INTO public.appended VALUES (12, 4, 'g0', 'wave1-append-source', 0, 6);
INSERT INTO public.appended VALUES (14, 6, 'g2', 'wave1-append-source', 0, 7);
INSERT INTO public.appended VALUES (16, 0, 'g1', 'wave1-append-source', 0, 8);
INSERT INTO public.appended VALUES (18, 2, 'g0', 'wave1-append-source', 0, 9);
INSERT INTO public.appended VALUES (20, 4, 'g2', 'wave1-append-source', 0, 10);
INSERT INTO public.appended VALUES (22, 6, 'g1', 'wave1-append-source', 0, 11);
INSERT INTO public.appended VALUES (15, 7, 'g0', 'wave1-append-source', 1, 7);
INSERT INTO public.appended VALUES (19, 3, 'g1', 'wave1-append-source', 1, 9);
INSERT INTO public.appended VALUES (21, 5, 'g0', 'wave1-append-source', 1, 10);
INSERT INTO public.appended VALUES (1099511627783, 7, 'g1', 'wave1-append-source', 1, 3);
INSERT INTO public.appended VALUES (1099511627793, 1, 'g2', 'wave1-append-source', 1, 8);
INSERT INTO public.appended VALUES (24, 0, 'g0', 'wave1-append-source', 0, 12);
INSERT INTO public.appended VALUES (26, 2, 'g2', 'wave1-append-source', 0, 13);
INSERT INTO public.appended VALUES (28, 4, 'g1', 'wave1-append-source', 0, 14);
INSERT INTO public.appended VALUES (30, 6, 'g0', 'wave1-append-source', 0, 15);
INSERT INTO public.appended VALUES (32, 0, 'g2', 'wave1-append-source', 0, 16);
INSERT INTO public.appended VALUES (34, 2, 'g1', 'wave1-append-source', 0, 17);
INSERT INTO public.appended VALUES (25, 1, 'g1', 'wave1-append-source', 1, 12);
INSERT INTO public.appended VALUES (29, 5, 'g2', 'wave1-append-source', 1, 14);
INSERT INTO public.appended VALUES (31, 7, 'g1', 'wave1-append-source', 1, 15);
INSERT INTO public.appended VALUES (35, 3, 'g2', 'wave1-append-source', 1, 17);
INSERT INTO public.appended VALUES (36, 4, 'g0', 'wave1-append-source', 0, 18);
INSERT INTO public.appended VALUES (38, 6, 'g2', 'wave1-append-source', 0, 19);
INSERT INTO public.appended VALUES (40, 0, 'g1', 'wave1-append-source', 0, 20);
INSERT INTO public.appended VALUES (42, 2, 'g0', 'wave1-append-source', 0, 21);
INSERT INTO public.appended VALUES (44, 4, 'g2', 'wave1-append-source', 0, 22);
INSERT INTO public.appended VALUES (46, 6, 'g1', 'wave1-append-source', 0, 23);
INSERT INTO public.appended VALUES (39, 7, 'g0', 'wave1-append-source', 1, 19);
INSERT INTO public.appended VALUES (41, 1, 'g2', 'wave1-append-source', 1, 20);
INSERT INTO public.appended VALUES (45, 5, 'g0', 'wave1-append-source', 1, 22);
INSERT INTO public.oncely_pipelines VALUES ('wave1-append', 2, '474dc34f0ebe41ecac7d41baa68f230e', 'oNGa2GISQPeJ5LO4s9LvtA', 'appended', NULL, NULL, '2026-11-22 12:23:46.318122+00');
INSERT INTO public.oncely_pipelines VALUES ('wave1-upsert', 2, '07624c5f9b89471ca6765e44a31e6867', 'oNGa2GISQPeJ5LO4s9LvtA', 'upserted', NULL, NULL, '2026-11-22 12:24:19.548949+00');
INSERT INTO public.oncely_pipelines VALUES ('wave1-batch', 2, '49be21eed7f0491aafc30913ff456192', 'oNGa2GISQPeJ5LO4s9LvtA', 'staged', NULL, NULL, '2026-11-22 12:24:27.66378+00');
INSERT INTO public.oncely_positions VALUES ('wave1-upsert', 'wave1-upsert-source', 0, 12, 1, 'vpAHWy2jTKiPiQvjYXuuzQ');
INSERT INTO public.oncely_positions VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 12, 1, 'vpAHWy2jTKiPiQvjYXuuzQ');
INSERT INTO public.oncely_positions VALUES ('wave1-append', 'wave1-append-source', 0, 24, 2, 'd9WeiPgcSCW0ZuU3h7nhsA');
INSERT INTO public.oncely_positions VALUES ('wave1-append', 'wave1-append-source', 1, 24, 2, 'd9WeiPgcSCW0ZuU3h7nhsA');
INSERT INTO public.oncely_positions VALUES ('wave1-batch', 'wave1-batch-source', 0, 24, 2, 'u3xnyn0dRB2GU8zzbrxXFg');
INSERT INTO public.oncely_positions VALUES ('wave1-batch', 'wave1-batch-source', 1, 24, 2, 'u3xnyn0dRB2GU8zzbrxXFg');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 0, 0, 6, 1, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:24:13.836159+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 1, 0, 6, 1, 'data', 6, 4, 2, 0, 0, '2026-11-22 12:24:13.836159+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 0, 6, 12, 1, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:24:18.711466+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 1, 6, 12, 1, 'data', 6, 3, 3, 0, 0, '2026-11-22 12:24:18.711466+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-upsert', 'wave1-upsert-source', 0, 0, 6, 1, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:24:23.402449+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 0, 6, 1, 'data', 6, 4, 2, 0, 0, '2026-11-22 12:24:23.402449+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-upsert', 'wave1-upsert-source', 0, 6, 12, 1, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:24:25.881819+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 6, 12, 1, 'data', 6, 3, 3, 0, 0, '2026-11-22 12:24:25.881819+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 0, 0, 6, 1, 'data', 6, 10, 0, 0, 0, '2026-11-22 12:24:52.376321+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 1, 0, 6, 1, 'data', 6, 0, 2, 0, 0, '2026-11-22 12:24:52.376321+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 0, 6, 12, 1, 'data', 6, 9, 0, 0, 0, '2026-11-22 12:24:57.508925+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 1, 6, 12, 1, 'data', 6, 0, 3, 0, 0, '2026-11-22 12:24:57.508925+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 0, 12, 18, 2, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:27:12.389559+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 1, 12, 18, 2, 'data', 6, 4, 2, 0, 0, '2026-11-22 12:27:12.389559+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 0, 18, 24, 2, 'data', 6, 6, 0, 0, 0, '2026-11-22 12:27:13.611431+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-append', 'wave1-append-source', 1, 18, 24, 2, 'data', 6, 3, 3, 0, 0, '2026-11-22 12:27:13.611431+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 0, 12, 18, 2, 'data', 6, 10, 0, 0, 0, '2026-11-22 12:29:10.426202+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 1, 12, 18, 2, 'data', 6, 0, 2, 0, 0, '2026-11-22 12:29:10.426202+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 0, 18, 24, 2, 'data', 6, 9, 0, 0, 0, '2026-11-22 12:29:15.497354+00');
INSERT INTO public.oncely_ranges VALUES ('wave1-batch', 'wave1-batch-source', 1, 18, 24, 2, 'data', 6, 0, 3, 0, 0, '2026-11-22 12:29:15.497354+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 1, 1795350189718, '\x7b226b223a20337d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:13.836159+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 6, 1795350189718, '\x7b226b223a20357d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:18.711466+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 11, 1795350189718, '\x7b226b223a20377d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:18.711466+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 1, 1795350190397, '\x7b226b223a20337d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:23.402449+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 3, 1795350190397, '\x7b226b223a20377d', '\x7b226964223a20313039393531313632373738332c20226b223a20372c2022677270223a20226731227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627783 is out of range of INT', 1, '2026-11-22 12:24:23.402449+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 6, 1795350190397, '\x7b226b223a20357d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:25.881819+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 8, 1795350190397, '\x7b226b223a20317d', '\x7b226964223a20313039393531313632373739332c20226b223a20312c2022677270223a20226732227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627793 is out of range of INT', 1, '2026-11-22 12:24:25.881819+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-upsert', 'wave1-upsert-source', 1, 11, 1795350190397, '\x7b226b223a20377d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:25.881819+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 1, 1795350190614, '\x7b226b223a20337d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:52.376321+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 3, 1795350190614, '\x7b226b223a20377d', '\x7b226964223a20313039393531313632373738332c20226b223a20372c2022677270223a20226731227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627783 is out of range of INT', 1, '2026-11-22 12:24:52.376321+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 6, 1795350190614, '\x7b226b223a20357d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:57.508925+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 8, 1795350190614, '\x7b226b223a20317d', '\x7b226964223a20313039393531313632373739332c20226b223a20312c2022677270223a20226732227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627793 is out of range of INT', 1, '2026-11-22 12:24:57.508925+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 11, 1795350190614, '\x7b226b223a20377d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 1, '2026-11-22 12:24:57.508925+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 13, 1795350336158, '\x7b226b223a20337d', '\x7b226964223a20313039393531313632373830332c20226b223a20332c2022677270223a20226730227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627803 is out of range of INT', 2, '2026-11-22 12:27:12.389559+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 16, 1795350336158, '\x7b226b223a20317d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 2, '2026-11-22 12:27:12.389559+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 18, 1795350336158, '\x7b226b223a20357d', '\x7b226964223a20313039393531313632373831332c20226b223a20352c2022677270223a20226731227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627813 is out of range of INT', 2, '2026-11-22 12:27:13.611431+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 21, 1795350336158, '\x7b226b223a20337d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 2, '2026-11-22 12:27:13.611431+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-append', 'wave1-append-source', 1, 23, 1795350336158, '\x7b226b223a20377d', '\x7b226964223a20313039393531313632373832332c20226b223a20372c2022677270223a20226732227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627823 is out of range of INT', 2, '2026-11-22 12:27:13.611431+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 13, 1795350336299, '\x7b226b223a20337d', '\x7b226964223a20313039393531313632373830332c20226b223a20332c2022677270223a20226730227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627803 is out of range of INT', 2, '2026-11-22 12:29:10.426202+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 16, 1795350336299, '\x7b226b223a20317d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 2, '2026-11-22 12:29:10.426202+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 18, 1795350336299, '\x7b226b223a20357d', '\x7b226964223a20313039393531313632373831332c20226b223a20352c2022677270223a20226731227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627813 is out of range of INT', 2, '2026-11-22 12:29:15.497354+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 21, 1795350336299, '\x7b226b223a20337d', '\x6e6f204a534f4e', '[["h", "MQ=="]]', 'decode', 'the value is not JSON: Expecting value at character 1', 2, '2026-11-22 12:29:15.497354+00');
INSERT INTO public.oncely_rejects VALUES ('wave1-batch', 'wave1-batch-source', 1, 23, 1795350336299, '\x7b226b223a20377d', '\x7b226964223a20313039393531313632373832332c20226b223a20372c2022677270223a20226732227d', '[["h", "MQ=="]]', 'decode', 'id: 1099511627823 is out of range of INT', 2, '2026-11-22 12:29:15.497354+00');
INSERT INTO public.oncely_s_21c6512391d4_2_2_46 VALUES (49, 1, 'G1', 0, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_46 VALUES (51, 3, 'G0', 1, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_46 VALUES (55, 7, 'G1', 2, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_46 VALUES (59, 3, 'G2', 3, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (48, 0, 'G0', 0, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (50, 2, 'G2', 1, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (52, 4, 'G1', 2, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (54, 6, 'G0', 3, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (56, 0, 'G2', 4, 0);
INSERT INTO public.oncely_s_21c6512391d4_2_2_47 VALUES (58, 2, 'G1', 5, 0);
INSERT INTO public.staged VALUES (1, 1, 'G1');
INSERT INTO public.staged VALUES (5, 5, 'G2');
INSERT INTO public.staged VALUES (9, 1, 'G0');
INSERT INTO public.staged VALUES (11, 3, 'G2');
INSERT INTO public.staged VALUES (0, 0, 'G0');
INSERT INTO public.staged VALUES (2, 2, 'G2');
INSERT INTO public.staged VALUES (4, 4, 'G1');
INSERT INTO public.staged VALUES (6, 6, 'G0');
INSERT INTO public.staged VALUES (8, 0, 'G2');
INSERT INTO public.staged VALUES (10, 2, 'G1');
INSERT INTO public.staged VALUES (15, 7, 'G0');
INSERT INTO public.staged VALUES (19, 3, 'G1');
INSERT INTO public.staged VALUES (21, 5, 'G0');
INSERT INTO public.staged VALUES (12, 4, 'G0');
INSERT INTO public.staged VALUES (14, 6, 'G2');
INSERT INTO public.staged VALUES (16, 0, 'G1');
INSERT INTO public.staged VALUES (18, 2, 'G0');
INSERT INTO public.staged VALUES (20, 4, 'G2');
INSERT INTO public.staged VALUES (22, 6, 'G1');
INSERT INTO public.staged VALUES (25, 1, 'G1');
INSERT INTO public.staged VALUES (29, 5, 'G2');
INSERT INTO public.staged VALUES (31, 7, 'G1');
INSERT INTO public.staged VALUES (35, 3, 'G2');
INSERT INTO public.staged VALUES (24, 0, 'G0');
INSERT INTO public.staged VALUES (26, 2, 'G2');
INSERT INTO public.staged VALUES (28, 4, 'G1');
INSERT INTO public.staged VALUES (30, 6, 'G0');
INSERT INTO public.staged VALUES (32, 0, 'G2');
INSERT INTO public.staged VALUES (34, 2, 'G1');
INSERT INTO public.staged VALUES (39, 7, 'G0');
INSERT INTO public.staged VALUES (41, 1, 'G2');
INSERT INTO public.staged VALUES (45, 5, 'G0');
INSERT INTO public.staged VALUES (36, 4, 'G0');
INSERT INTO public.staged VALUES (38, 6, 'G2');
INSERT INTO public.staged VALUES (40, 0, 'G1');
INSERT INTO public.staged VALUES (42, 2, 'G0');
INSERT INTO public.staged VALUES (44, 4, 'G2');
INSERT INTO public.staged VALUES (46, 6, 'G1');
INSERT INTO public.upserted VALUES (9, 1, 'g0');
INSERT INTO public.upserted VALUES (16, 0, 'g1');
INSERT INTO public.upserted VALUES (18, 2, 'g0');
INSERT INTO public.upserted VALUES (19, 3, 'g1');
INSERT INTO public.upserted VALUES (20, 4, 'g2');
INSERT INTO public.upserted VALUES (21, 5, 'g0');
INSERT INTO public.upserted VALUES (22, 6, 'g1');
INSERT INTO public.upserted VALUES (15, 7, 'g0');
ALTER TABLE ONLY public.oncely_pipelines
    ADD CONSTRAINT oncely_pipelines_pkey PRIMARY KEY (pipeline);
ALTER TABLE ONLY public.oncely_positions
    ADD CONSTRAINT oncely_positions_pkey PRIMARY KEY (pipeline, topic, partition);
ALTER TABLE ONLY public.oncely_ranges
    ADD CONSTRAINT oncely_ranges_pkey PRIMARY KEY (pipeline, topic, partition, range_start, epoch);
ALTER TABLE ONLY public.oncely_rejects
    ADD CONSTRAINT oncely_rejects_pkey PRIMARY KEY (pipeline, topic, partition, "offset");
ALTER TABLE ONLY public.upserted
    ADD CONSTRAINT upserted_pkey PRIMARY KEY (k);
CREATE INDEX oncely_ranges_by_end ON public.oncely_ranges USING btree (pipeline, topic, partition, range_end);
