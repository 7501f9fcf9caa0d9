"""Shared code for reading and rewriting models: recordings, captured graphs, matching. Knows no pass."""
