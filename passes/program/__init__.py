"""Shared code for reading and rewriting models: recordings, captured graphs, matching, seals. Knows no pass."""
