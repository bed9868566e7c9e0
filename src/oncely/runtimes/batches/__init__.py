"""Runs in batches: planned ranges, tasks that fetch and commit or stage, and a loop around them."""
