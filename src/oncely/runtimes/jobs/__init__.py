"""Jobs: where the tasks of a batch run, and how their answers come back."""
