"""The manifest of a bundle: its schema, and reading it. This package needs no torch, as the one that loads bundles."""

from optimizer.manifest.environment import (
    describe_environment,
    describe_program,
    local_roots,
    version_of,
    without_local_paths,
)
from optimizer.manifest.files import (
    changed_files,
    damage_of,
    entries_below,
    file_digest,
    file_problem,
    sums_digest,
    sums_problem,
    sums_text,
    unexpected,
    unlisted,
)
from optimizer.manifest.reading import number, plain, read_manifest, to_json_text
from optimizer.manifest.regular_files import LARGEST_TEXT, open_regular, read_text_bytes
from optimizer.manifest.schema import (
    GOLDEN,
    MANIFEST,
    README,
    SCHEMA_NAME,
    SCHEMA_VERSION,
    SUMS,
    check_benchmark,
    check_manifest,
    is_inside_path,
)

__all__ = [
    "GOLDEN",
    "LARGEST_TEXT",
    "MANIFEST",
    "README",
    "SCHEMA_NAME",
    "SCHEMA_VERSION",
    "SUMS",
    "changed_files",
    "check_benchmark",
    "check_manifest",
    "damage_of",
    "describe_environment",
    "describe_program",
    "entries_below",
    "file_digest",
    "file_problem",
    "is_inside_path",
    "local_roots",
    "number",
    "open_regular",
    "plain",
    "read_manifest",
    "read_text_bytes",
    "sums_digest",
    "sums_problem",
    "sums_text",
    "to_json_text",
    "unexpected",
    "unlisted",
    "version_of",
    "without_local_paths",
]
