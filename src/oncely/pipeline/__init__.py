"""A pipeline as a value, and its operations: run, plan, status, offsets, rejects."""

from oncely.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
