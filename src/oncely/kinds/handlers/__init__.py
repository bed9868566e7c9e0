"""Handlers: functions of the user inside the transaction of a commit."""
