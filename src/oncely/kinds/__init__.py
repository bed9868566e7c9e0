"""The kinds of destinations: each a sink, the form of its rows, and changes of what is there."""
