"""The command line: options, the user's file, progress and tables.

Only this package prints or exits. This file imports nothing, so that `--help` is answered before torch is imported.
"""
