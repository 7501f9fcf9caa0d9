"""The bundle that an export writes (manifest, artifacts, golden data), and its verification."""

from optimizer.bundle.bundle import (
    Bundle,
    VerifyReport,
    artifact_entry,
    check_target,
    describe_device,
    open_bundle,
    rejudge_bundle,
    verify_bundle,
    weights_hash,
    write_bundle,
    write_golden,
)
from optimizer.bundle.manifest import is_to_be_repeated, plain, to_json_text
from optimizer.bundle.verify import factor_between, file_digest

__all__ = [
    "Bundle",
    "VerifyReport",
    "artifact_entry",
    "check_target",
    "describe_device",
    "factor_between",
    "file_digest",
    "is_to_be_repeated",
    "open_bundle",
    "plain",
    "rejudge_bundle",
    "to_json_text",
    "verify_bundle",
    "weights_hash",
    "write_bundle",
    "write_golden",
]
