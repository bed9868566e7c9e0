"""A pipeline as a value, and all that can be done with it: run, plan, status, offsets, rejects."""

from oncely.pipeline.pipeline import Pipeline

__all__ = ["Pipeline"]
