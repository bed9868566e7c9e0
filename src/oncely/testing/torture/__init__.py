"""Kills the handlers of a worker at every step of their commits, and compares tables from outside.

Each trial has a database of its own. A process works on the records until it is killed, another one
goes on until all are committed. Then the tables must be those of a run without faults.
"""
