"""The processors that a process may use: affinity, and the quotas of control groups of both versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimize_export.runtime import cpus, usable_cpus
from optimize_export.runtime.cpus import cgroup_cpus, own_threads, quota_threads
from optimize_export.runtime.torch_runner import keep_to_quota


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return folder


V2, V1 = "0::{}", "4:memory:/x\n3:cpu,cpuacct:{}\n1:name=systemd:/x"


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        (V2.format("/"), {"cpu.max": "150000 100000"}, 1.5),
        (V2.format("/"), {"cpu.max": "max 100000"}, None),
        (V2.format("/"), {}, None),
        # The quota of a group above limits it too.
        (V2.format("/pod/box"), {"pod/cpu.max": "200000 100000", "pod/box/cpu.max": "800000 100000"}, 2.0),
        (V2.format("/pod/box"), {"pod/cpu.max": "max 100000", "pod/box/cpu.max": "50000 100000"}, 0.5),
        # The host's path, where the container has its own group as the root.
        (V2.format("/kubepods/pod7/box"), {"cpu.max": "300000 100000"}, 3.0),
        (V2.format("/../other"), {"cpu.max": "100000 100000"}, 1.0),
        (
            V1.format("/docker/7"),
            {"cpu,cpuacct/cpu.cfs_quota_us": "250000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            2.5,
        ),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        # Both versions mounted: the processors belong to version 1.
        (f"{V1.format('/a')}\n0::/a", {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "50000"}, 2.0),
        ("", {"cpu.max": "150000 100000"}, None),
        # Files as no kernel writes them, or another one.
        ("0::/\nnothing\n7", {"cpu.max": "150000 100000"}, 1.5),
        (V2.format("/"), {"cpu.max": "150000"}, None),
        (V2.format("/"), {"cpu.max": "much 100000"}, None),
        (V2.format("/"), {"cpu.max": "150000 0"}, None),
        (V2.format("/"), {"cpu.max": "0 100000"}, None),
        (V2.format("/pod"), {"cpu.max": "1.5 1", "pod/cpu.max": "200000 100000"}, 2.0),
        (V2.format("/größe"), {"größe/cpu.max": "200000 100000"}, 2.0),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "0", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "many", "cpu/cpu.cfs_period_us": "100000"}, None),
        (V1.format("/"), {"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "0"}, None),
    ],
)
def test_the_quota_of_a_control_group(tmp_path: Path, groups: str, files: dict[str, str], expected: float) -> None:
    membership = tmp_path / "membership"
    membership.write_text(groups, encoding="utf-8")
    assert cgroup_cpus(written(tmp_path / "fs", files), membership) == expected


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path, tmp_path / "absent") is None


@pytest.mark.parametrize(
    ("quota", "usable", "allowed"), [(None, 8, None), (1.5, 2, 2), (0.2, 1, 1), (8.0, 8, None), (64.0, 8, None)]
)
def test_usable_processors(monkeypatch: pytest.MonkeyPatch, quota: Any, usable: int, allowed: Any) -> None:
    monkeypatch.setattr(cpus, "affine_cpus", lambda: 8)
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: quota)
    assert usable_cpus() == usable
    assert quota_threads() == allowed
    # A choice of another machine is cut; one of fewer threads stays.
    assert own_threads(64, None) == usable
    assert own_threads(1, 4) == 1
    assert own_threads(None, 4) == 4


def test_torch_keeps_to_the_quota_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "affine_cpus", lambda: 64)
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: 1.5)
    set_to: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    keep_to_quota()
    assert set_to == []
    # As good as unset.
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    keep_to_quota()
    keep_to_quota(1)
    keep_to_quota(64)
    assert set_to == [2, 1, 2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    keep_to_quota()
    assert set_to == [2, 1, 2]
