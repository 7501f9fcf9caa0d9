"""Train results in two processes: under DDP, and sharded by FSDP2."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from optimize_export.errors import UsageError
from optimizer import optimize, report_of
from passes import InsertCheckpoints, paths_matching
from passes.errors import RequirementNotMet

SUPPORT = Path(__file__).parents[1] / "support"

SCENARIOS = (
    "ddp-tied-unused",
    "ddp-folded",
    "fsdp-min",
    "fsdp-units",
    "fsdp-whole",
    "fsdp-bf16",
    "fsdp-other-plans",
)


@pytest.fixture(scope="module")
def found():
    """The results of each scenario, one per rank."""
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *(str(SUPPORT / "distributed_steps.py"), *SCENARIOS),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {name: [line for line in lines if line["scenario"] == name] for name in SCENARIOS}


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_trains_to_the_bit_as_without_a_plan(found, name):
    # The calls of who wraps and shards aren't taken for the forward's, which would keep everything then.
    assert [rank["logged"] for rank in found[name]] == [[], []]
    if name not in ("ddp-folded", "fsdp-other-plans"):
        for rank in found[name]:
            assert rank["expected"] == rank["got"]
            assert rank["parameters"]
        assert len({loss for rank in found[name] for loss in rank["got"]}) > 3


def test_a_folded_model_trains_to_the_same_losses_under_ddp(found):
    for rank in found["ddp-folded"]:
        assert rank["got"] == pytest.approx(rank["expected"], rel=1e-5)


@pytest.mark.parametrize("name", ["fsdp-min", "fsdp-bf16"])
def test_units_gather_for_others_a_few_at_a_time(found, name):
    for rank in found[name]:
        assert rank["gathered"] > 0
        # The root, the running unit, the one that torch gathers ahead, and the recomputed one.
        assert rank["together"] <= 4


@pytest.mark.parametrize("name", ["fsdp-units", "fsdp-whole"])
def test_units_that_the_plan_knows_or_that_stay_whole_gather_for_nobody(found, name):
    assert [rank["gathered"] for rank in found[name]] == [0, 0]


def test_ranks_of_different_plans_are_told_and_dont_wait_for_each_other(found):
    for rank in found["fsdp-other-plans"]:
        assert "the ranks train with different checkpoints" in rank["error"]


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


def test_a_region_of_a_plan_that_knows_the_units_lies_in_one():
    model, x = Blocks(), torch.randn(16, 8)

    free, within = (
        report_of(
            optimize(
                model,
                mode="training",
                passes=[InsertCheckpoints(memory_budget=0.6, units=units)],
                example_inputs=(x,),
            )
        )
        .passes[-1]
        .detail
        for units in ("", "blocks.*")
    )
    assert any(not re.match(r"blocks\.\d", region.path) for region in free.regions)
    assert all(re.match(r"blocks\.\d", region.path) for region in within.regions)
    assert len({region.path[:8] for region in within.regions}) > 1


def test_units_that_are_nowhere_are_refused():
    with pytest.raises(RequirementNotMet, match=r"units='layers\.\*', which matches no module of Blocks"):
        optimize(
            Blocks(),
            mode="training",
            passes=[InsertCheckpoints(units="layers.*")],
            example_inputs=(torch.randn(4, 8),),
        )


def test_a_pattern_means_whole_paths():
    paths = ["stem", "layers", "layers.0", "layers.1", "layers.1.up", "decoder.layers.0"]
    assert paths_matching(paths, "layers.*") == {"layers.0", "layers.1"}
    assert paths_matching(paths, "stem | *.layers.*") == {"stem", "decoder.layers.0"}
    assert paths_matching(paths, "layers") == {"layers"}
    assert paths_matching(paths, "layer") == set()


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_what_is_wrapped_or_sharded_already_is_refused_with_the_way_out(alone):
    partly = Blocks()
    fully_shard(partly.blocks[2], mesh=alone)
    wrapped = {
        "pass its .module": DistributedDataParallel(Blocks()),
        "The model is sharded by FSDP: call optimize": fully_shard(Blocks(), mesh=alone),
        r"blocks\.2 of the model is sharded by FSDP": partly,
    }
    for sentence, model in wrapped.items():
        with pytest.raises(UsageError, match=sentence):
            optimize(model, mode="training", example_inputs=(torch.randn(4, 8),))
