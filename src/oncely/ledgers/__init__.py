"""Where positions live: in SQL tables, in a compacted topic, in offset stores."""
