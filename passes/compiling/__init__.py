"""Compile modules: choose which ones, install the compiled code, and record the result."""
