"""The commit path, the order of records and positions, and the state of a run."""
