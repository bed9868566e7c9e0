"""Real servers, process control and the semantics trials, for demo, bench and tests."""
