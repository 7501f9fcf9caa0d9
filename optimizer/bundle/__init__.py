"""The bundle that an export writes (manifest, artifacts, golden data), and its verification."""

from optimizer.bundle.bundle import (
    Bundle,
    artifact_entry,
    check_target,
    keep_in_manifest,
    new_folder,
    open_bundle,
    write_bundle,
)
from optimizer.bundle.exchange import STAGING
from optimizer.bundle.golden import GoldenCall, read_golden, write_golden
from optimizer.bundle.manifest import (
    describe_device,
    factor_between,
    usage_text,
    weights_hash,
)
from optimizer.bundle.report import graph_of, write_report
from optimizer.bundle.triton import write_triton_model
from optimizer.bundle.verify import (
    ArtifactFigures,
    VerifyReport,
    failed_artifact,
    judge_answers,
    rejudge_bundle,
    verify_bundle,
)

__all__ = [
    "STAGING",
    "ArtifactFigures",
    "Bundle",
    "GoldenCall",
    "VerifyReport",
    "artifact_entry",
    "check_target",
    "describe_device",
    "factor_between",
    "failed_artifact",
    "graph_of",
    "judge_answers",
    "keep_in_manifest",
    "new_folder",
    "open_bundle",
    "read_golden",
    "rejudge_bundle",
    "usage_text",
    "verify_bundle",
    "weights_hash",
    "write_bundle",
    "write_golden",
    "write_report",
    "write_triton_model",
]
