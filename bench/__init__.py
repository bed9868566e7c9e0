"""Oncely measured against its peers, on one topic, in one run, every result checked."""
