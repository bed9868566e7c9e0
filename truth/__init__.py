"""The truth test of the audit: damage is thrown at destinations at random, and must be found.

Run it with ``make audit-truth``. A destination is filled by a real pipeline, damaged at random
places by means outside of Oncely (SQL, a plain producer, the file system, delta-rs), and audited.
Each damage must be named with its topic, partition and offset, and nothing else may be named. Then
a pipeline is audited again and again while it runs, and nothing may be reported.
"""
