"""BatchNorm layers become SyncBatchNorm, which uses the statistics of all processes and is otherwise the same layer.

On a CPU nothing synchronizes: with a process group, a SyncBatchNorm raises in a training step, and
DistributedDataParallel refuses a model that has one. `tests/support/synced_steps.py` adds the missing CPU kernels.
`tests/test_gpu.py` has the tests that need GPUs.
"""

import copy
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import synced_steps
import torch
import torch.nn.functional as F
from folding_models import Island, Pair
from pass_contract import captured
from tiny_models import Net as OfFunction
from tiny_models import enliven
from torch import Tensor, distributed, nn
from torch.nn.utils import parametrize

from optimizer import check_parity, export, optimize, report_of
from passes import Context, FoldConvBias, GraphRewriter, SyncBatchNorm
from passes.errors import RequirementNotMet


class Net(nn.Module):
    """BatchNorms of 1, 2 and 3 dims, each with different settings."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.BatchNorm3d(4, eps=1e-3), nn.ReLU())
        self.image = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, momentum=None), nn.ReLU())
        self.plain = nn.BatchNorm2d(6, momentum=0.3, affine=False)
        self.row = nn.BatchNorm1d(6, track_running_stats=False)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.plain(self.image(self.volume(x).mean(2)))
        return self.head(self.row(y.mean((2, 3))))


NORMS = ["volume.1", "image.1", "plain", "row"]
MOMENTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def made(cls: Any, *args: Any) -> Any:
    """The same model at each call, in training mode."""
    torch.manual_seed(0)
    return enliven(cls(*args)).train()


def volume(batch: int = 4) -> Tensor:
    return torch.randn(batch, 1, 4, 8, 8, generator=torch.Generator().manual_seed(batch))


def image(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(batch))


def synced(model: nn.Module, x: Tensor | None, passes: Any = "sync-batch-norm") -> Any:
    return optimize(model, passes, mode="training", example_inputs=None if x is None else (x,))


def places(result: nn.Module, name: str) -> list[tuple[str, str]]:
    """(where, text) of the last pass' changes or skips."""
    return [(place.where, place.text) for place in getattr(report_of(result).passes[-1], name)]


def steps(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The losses of three steps, and the values of the state dict after them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(value.clone() for value in model.state_dict().values())]


def assert_equal(wanted: list[Tensor], got: list[Tensor]) -> None:
    assert len(wanted) == len(got)
    for number, (a, b) in enumerate(zip(wanted, got, strict=True)):
        assert torch.equal(a, b), number


@pytest.fixture
def group() -> Iterator[None]:
    """A process group that contains only this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


# ------------------------------------------------------------------------------------- the layers


def test_every_batch_norm_becomes_torchs_own_with_the_tensors_that_it_has() -> None:
    model = made(Net)
    model.plain.eval()
    wanted, result = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)), synced(model, volume())
    kinds = ["BatchNorm3d", "BatchNorm2d", "BatchNorm2d", "BatchNorm1d"]
    changes = [(path, f"{kind} converted to SyncBatchNorm") for path, kind in zip(NORMS, kinds, strict=True)]
    assert (places(result, "changes"), places(result, "skips")) == (changes, [])
    for path in NORMS:
        before, after = model.get_submodule(path), result.get_submodule(path)
        assert all(getattr(after, name) is getattr(before, name) for name in MOMENTS), path
        # Each layer has the same attributes as if torch had converted it.
        other = vars(wanted.get_submodule(path))
        assert vars(after).keys() == other.keys()
        assert all(vars(after)[name] == other[name] for name in other if not name.startswith("_")), path
    assert report_of(result).verified
    assert str(result) == str(wanted)
    assert result.state_dict()._metadata == wanted.state_dict()._metadata
    # The caller's model stays as it is.
    assert [type(model.get_submodule(path)).__name__ for path in NORMS] == kinds
    assert not any("process_group" in vars(module) for module in model.modules())
    assert_equal(steps(wanted, volume()), steps(result, volume()))


def test_hooks_go_on_firing() -> None:
    model = made(Net)
    seen: list[str] = []
    model.plain.register_forward_pre_hook(lambda module, args: seen.append(f"before {type(module).__name__}"))
    model.plain.register_forward_hook(lambda module, args, output: output + 1)
    model.plain.register_full_backward_hook(lambda module, given, taken: seen.append("backward"))
    model.plain.register_state_dict_post_hook(lambda *_: seen.append("saved"))
    result = synced(model, volume())
    assert ("plain", "BatchNorm2d converted to SyncBatchNorm") in places(result, "changes")
    seen.clear()
    result(volume()).sum().backward()
    result.state_dict()
    assert seen == ["before SyncBatchNorm", "backward", "saved"]
    assert torch.equal(result(volume()), model(volume()))


def test_one_layer_under_two_names_stays_one() -> None:
    def shared() -> nn.Module:
        norm = nn.BatchNorm2d(3)
        layers = {"conv": nn.Conv2d(3, 3, 3, padding=1), "first": norm, "second": norm}
        return OfFunction(lambda m, x: m.second(m.conv(m.first(x))), **layers)

    result = synced(made(shared), image())
    assert places(result, "changes") == [("first", "BatchNorm2d converted to SyncBatchNorm")]
    assert report_of(result).passes[0].parity is not None
    assert result.first is result.second
    assert type(result.second) is nn.SyncBatchNorm
    assert_equal(steps(made(shared), image()), steps(result, image()))


def test_layers_in_plain_lists_and_in_forwards_that_no_graph_shows() -> None:
    def listed() -> nn.Module:
        layers = [enliven(nn.BatchNorm2d(3))]
        return OfFunction(lambda m, x: m.island(m.layers[0](x)), island=Island(), layers=layers)

    model = made(listed)
    result = synced(model, image())
    assert [where for where, _ in places(result, "changes")] == ["island.bn", "layers[0]"]
    assert type(result.layers[0]) is nn.SyncBatchNorm
    assert type(model.layers[0]) is nn.BatchNorm2d
    assert torch.equal(result(image()), model(image()))


def test_without_example_inputs_layers_are_converted_and_nothing_verified() -> None:
    result = synced(made(Net), None)
    assert [where for where, _ in places(result, "changes")] == NORMS
    assert "nothing was verified: pass example inputs to optimize()" in report_of(result).notes
    assert_equal(steps(made(Net), volume()), steps(result, volume()))


@pytest.mark.slow
def test_a_result_goes_to_files_as_the_model_does(tmp_path: Path) -> None:
    result = synced(made(Pair), image())
    bundle = export(result, example_inputs=(image(),), output=tmp_path / "bundle")
    assert bundle.parity.ok


# ------------------------------------------------------------------------------------- what is left alone


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(super().forward(input))


class Negative(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return -x


def parametrized() -> nn.Module:
    module = nn.BatchNorm2d(3)
    parametrize.register_parametrization(module, "weight", Negative())
    return module


def forward_of_the_instance() -> nn.Module:
    module = nn.BatchNorm2d(3)
    module.forward = types.MethodType(lambda self, input: F.relu(nn.BatchNorm2d.forward(self, input)), module)
    return module


def without_count() -> nn.Module:
    module = nn.BatchNorm2d(3)
    module.num_batches_tracked = None
    return module


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(nn.BatchNorm2d(3))


LEFT_ALONE = {
    "subclass": (
        lambda: OwnForward(3),
        "its class OwnForward may compute something else, which a SyncBatchNorm wouldn't",
    ),
    "instance": (forward_of_the_instance, "it has its own forward, which a SyncBatchNorm wouldn't run"),
    "parametrized": (parametrized, "it has parametrizations"),
    "synced": (lambda: nn.SyncBatchNorm(3), "it is already a SyncBatchNorm"),
    "scripted": (scripted, "it is TorchScript, which can't be changed"),
    "uncounted": (without_count, "it has no num_batches_tracked, without which a SyncBatchNorm keeps no running statistics"),
    "instance norm": (
        lambda: nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        "an InstanceNorm normalizes each sample on its own: there is nothing to synchronize",
    ),
}  # fmt: skip


def test_what_is_left_alone_is_named_with_the_reason() -> None:
    """A module of each kind, in a row after a BatchNorm."""
    model = made(lambda: nn.Sequential(nn.BatchNorm2d(3), *(make() for make, _ in LEFT_ALONE.values())))
    result = synced(model, image())
    assert places(result, "changes") == [("0", "BatchNorm2d converted to SyncBatchNorm")]
    reasons = [(str(number), reason) for number, (_, reason) in enumerate(LEFT_ALONE.values(), 1)]
    assert sorted(places(result, "skips")) == reasons
    for kind, after, before in zip(LEFT_ALONE, result[1:], model[1:], strict=True):
        assert type(after) is type(before)
        assert "process_group" not in vars(after) or kind == "synced"
    assert torch.equal(result(image()), model(image()))


def test_a_layer_that_was_never_run_is_left_alone() -> None:
    tree, context = captured(nn.Sequential(nn.LazyBatchNorm2d(), nn.BatchNorm2d(3)).train(), mode="training")
    done = SyncBatchNorm().run(tree, context)
    assert [(skip.where, skip.reason) for skip in done.skips] == [
        ("0", "it is a LazyBatchNorm2d, not initialised yet: run the model once first")
    ]
    assert [change.where for change in done.changes] == ["1"]


def test_a_layer_without_channels_is_left_alone() -> None:
    result = synced(nn.Sequential(nn.BatchNorm2d(0), nn.BatchNorm2d(3)).train(), None)
    assert places(result, "skips") == [("0", "it has no channels, which a SyncBatchNorm doesn't accept")]


class ByFunction(nn.Module):
    """Calls `batch_norm` without a layer: to standardize a weight, and, with `own_statistics`, as a BatchNorm."""

    def __init__(self, own_statistics: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(1)))
        if own_statistics:
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, 4, -1)
        y = F.conv2d(x, F.batch_norm(flat, None, None, training=True).reshape_as(self.weight))
        return F.batch_norm(y, self.mean, self.var, training=self.training) if hasattr(self, "mean") else y


def test_a_call_of_the_function_is_named() -> None:
    result = synced(made(ByFunction, True), image())
    assert report_of(result).passes[0].status == "unchanged"
    assert places(result, "skips") == [
        ("the root (batch_norm)", "it is a function call: only an nn.BatchNorm layer can be synchronized")
    ]


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (lambda: nn.Sequential(nn.Conv2d(3, 3, 3), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3)), None),
        (lambda: nn.Sequential(ByFunction(False)), image()),
    ],
)
def test_a_model_without_any_batch_norm_raises(make: Any, x: Tensor | None) -> None:
    with pytest.raises(RequirementNotMet) as raised:
        synced(made(make), x)
    assert str(raised.value) == "sync-batch-norm finds no BatchNorm in Sequential: leave the pass out."


def test_a_forward_that_asks_for_the_class_keeps_its_layers() -> None:
    def asks() -> nn.Module:
        return OfFunction(lambda m, x: m.bn(x) if isinstance(m.bn, nn.BatchNorm2d) else x, bn=nn.BatchNorm2d(3))

    result = synced(made(asks), image())
    (record,) = report_of(result).passes
    assert record.status == "rolled-back"
    assert type(result.bn) is nn.BatchNorm2d
    assert "process_group" not in vars(result.bn)
    assert torch.equal(result(image()), made(asks)(image()))


# ------------------------------------------------------------------------------------- with other passes


def test_it_is_for_training_alone() -> None:
    with pytest.raises(RequirementNotMet, match="The pass sync-batch-norm is for training: leave it out, or use mode="):
        optimize(made(Net), ["sync-batch-norm"], example_inputs=(volume(),))


@pytest.mark.parametrize("passes", ["fold-conv-bias,sync-batch-norm", "sync-batch-norm,fold-conv-bias"])
def test_a_bias_is_folded_before_and_behind_it(passes: str) -> None:
    model = made(Pair)
    result = synced(model, image(), passes)
    assert [len(record.changes) for record in report_of(result).passes] == [1, 1]
    assert type(result.bn) is nn.SyncBatchNorm
    assert list(result.state_dict()) == list(model.state_dict())
    for mode in ("training", "inference"):
        assert check_parity(model, result, (image(),), mode=mode).ok  # type: ignore[arg-type]
    trained = copy.deepcopy(result)
    steps(trained, image())
    assert not torch.equal(trained.bn.running_mean, result.bn.running_mean)
    made(Pair).load_state_dict(trained.state_dict())


@pytest.mark.parametrize("budget", ["0.9", "min"])
def test_with_checkpoints_behind_it_steps_are_the_same_to_the_bit(budget: str) -> None:
    x, plain = synced_steps.batch(2), synced(synced_steps.made(), synced_steps.batch(2))
    result = synced(synced_steps.made(), x, f"sync-batch-norm,insert-checkpoints:memory_budget={budget}")
    assert [record.status for record in report_of(result).passes] == ["applied", "applied"]
    again = report_of(result).passes[1].detail
    assert again.chosen.peak < again.eager.peak
    assert [type(norm) for norm in result.norms] == [nn.SyncBatchNorm] * 3
    seen, wanted = synced_steps.steps(result, x), synced_steps.steps(plain, x)
    assert_equal(wanted["losses"], seen["losses"])
    assert_equal(list(wanted["state"].values()), list(seen["state"].values()))
    assert [int(norm.num_batches_tracked) for norm in result.norms] == [synced_steps.STEPS] * 3


def _drop_biases(self: FoldConvBias, graph: GraphRewriter, context: Context) -> None:
    """Leave out every bias, but keep the running mean as it is."""
    for conv in graph.calls("conv2d"):
        with graph.change(conv, "bias dropped"):
            graph.replace_call(conv, conv.target, [*conv.args[:2], None, *conv.args[3:]])  # type: ignore[arg-type]


def test_another_pass_that_fails_takes_nothing_of_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    # The error is in fold-conv-bias alone, which is rolled back, while the converted layers stay.
    monkeypatch.setattr(FoldConvBias, "rewrite", _drop_biases)
    for passes in ("fold-conv-bias,sync-batch-norm", "sync-batch-norm,fold-conv-bias"):
        result = synced(made(Pair), image(), passes)
        status = {record.name: record.status for record in report_of(result).passes}
        assert status == {"fold-conv-bias": "rolled-back", "sync-batch-norm": "applied"}
        assert type(result.bn) is nn.SyncBatchNorm
        assert torch.equal(result(image()), made(Pair)(image()))


# ------------------------------------------------------------------------------------- process groups


def test_the_report_says_what_was_compared_and_what_a_cpu_does() -> None:
    report = report_of(synced(made(Net), volume()))
    note = (
        "the comparison ran in one process, where a SyncBatchNorm uses the statistics of its own batch, as a "
        "BatchNorm does; with several processes it uses the statistics of all of them"
    )
    assert note in report.notes
    (remark,) = report.passes[0].remarks
    assert (remark.where, remark.text) == (
        "",
        "torch synchronizes on a GPU: with a process group, a training step on this CPU raises",
    )
    assert report.parity is not None
    assert "sync_batch_norm" not in report.parity.settings
    assert note not in report_of(synced(made(Pair), image(), ["fold-conv-bias"])).notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_a_process_group_the_conversion_is_verified_on_this_process(group: None, dtype: torch.dtype) -> None:
    model, x = made(Pair).to(dtype), image().to(dtype)
    forward = nn.SyncBatchNorm.forward
    result = synced(model, x)
    report = report_of(result)
    assert report.passes[0].status == "applied"
    assert report.passes[0].parity is not None
    assert report.verified
    assert report.parity.settings["sync_batch_norm"] == "this process alone"
    assert nn.SyncBatchNorm.forward is forward
    # The result has torch's own layer, which needs a GPU if there is a process group.
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        result(x)
    assert torch.equal(result.eval()(x), model.eval()(x))


def test_a_wrong_layer_is_found_with_a_process_group_too(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # A conversion that changes eps.
    def convert(model: Any, module: nn.Module) -> None:
        with model.change(model.tree.path(module), "made a wrong one", module):
            model.set_class(module, nn.SyncBatchNorm)
            model.set_attribute(module, "eps", 0.5)

    monkeypatch.setattr("passes.sync_batch_norm._convert", convert)
    result = synced(made(Pair), image())
    (record,) = report_of(result).passes
    assert record.status == "rolled-back"
    assert type(result.bn) is nn.BatchNorm2d
    assert result.bn.eps == Pair().bn.eps


def test_a_model_that_was_converted_by_hand_is_compared_on_this_process_too(group: None) -> None:
    model, x = nn.SyncBatchNorm.convert_sync_batchnorm(made(Pair)), image()
    result = synced(model, x, ["fold-conv-bias"])
    assert report_of(result).verified
    assert report_of(result).passes[0].status == "applied"
    assert check_parity(model, result, (x,), mode="training").ok


def test_settings_come_back_where_the_comparison_raises(group: None) -> None:
    forward = nn.SyncBatchNorm.forward

    def raising(m: Any, x: Tensor) -> Tensor:
        raise RuntimeError("no")

    with pytest.raises(Exception, match="no"):
        synced(OfFunction(raising, bn=nn.SyncBatchNorm(3)), image())
    assert nn.SyncBatchNorm.forward is forward


@pytest.mark.parametrize("when", ["before", "behind"])
def test_compiled_code_of_the_comparison_isnt_used_where_there_is_a_process_group(when: str) -> None:
    """Compiled code keeps whether there was a process group, so code from the comparison must not stay."""
    torch._dynamo.reset()
    try:
        if when == "before":
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        result = synced(made(Pair), image(), "sync-batch-norm,torch-compile:backend=eager")
        assert [(record.status, record.reason) for record in report_of(result).passes] == [("applied", "")] * 2
        if when == "behind":
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
            result(image())
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_train_as_one_does_on_the_whole_batch(tmp_path: Path) -> None:
    """Layers, gradients and DistributedDataParallel are torch's own; stand-ins replace kernels that need a GPU."""
    passes = ("sync-batch-norm", "sync-batch-norm,insert-checkpoints:memory_budget=min")
    both = synced_steps.run_ranks(tmp_path, "gloo", *passes)
    for ranks in both:
        assert all(rank["verified"] and set(rank["status"]) == {"applied"} for rank in ranks)
        synced_steps.check_ranks(ranks)
    # A plan made in one process holds where the layers synchronize: they aren't rerun, and steps are bit-identical.
    for plain, planned in zip(*both, strict=True):
        assert planned["warned"] == []
        assert_equal(plain["losses"], planned["losses"])
        assert_equal(list(plain["state"].values()), list(planned["state"].values()))
        # Synchronizing layers also save the number of rows of each process: less than 1 % more.
        assert planned["peak"] < 1.01 * planned["planned"][0]
        assert planned["peak"] < 0.9 * plain["peak"]
