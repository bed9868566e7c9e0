"""Which files are part of a table now: follows a manifest topic, see docs/MANIFEST.md.

python follow_manifest.py BROKERS MANIFEST_TOPIC
"""

import json
import sys

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

SETTINGS = {
    "group.id": "follow-manifest",
    "isolation.level": "read_committed",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
}


def files(brokers: str, topic: str) -> dict[str, dict]:
    """Path to entry of every file, up to the topic's end as committed readers see it now."""
    consumer = Consumer({"bootstrap.servers": brokers, **SETTINGS})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: dict[str, dict] = {}
    while (message := consumer.poll(60)) is not None:  # a tombstone is no true value
        if message.error() and message.error().code() != KafkaError._PARTITION_EOF:
            raise KafkaException(message.error())
        if message.error():
            return found
        if message.key().startswith(b"["):  # about the topic itself: its owner
            continue
        entry = json.loads(message.value()) if message.value() else None
        if entry and (entry["kind"], entry["version"]) != ("file", 1):
            raise ValueError(f"another form: {entry}")
        for gone in entry.get("replaces", []) if entry else [message.key().decode()]:
            found.pop(gone, None)
        if entry:
            found[entry["path"]] = entry
    raise TimeoutError("the end of the topic did not come")


if __name__ == "__main__":
    for path, entry in files(*sys.argv[1:3]).items():
        print(f"{entry['rows']:>12} {path}")
