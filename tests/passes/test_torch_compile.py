"""torch-compile: the call of a module, or of its blocks, is compiled by torch.compile."""

import copy
import gc
import inspect
import pickle
import sysconfig
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folding_models import Pair, image
from operations import computed
from pass_contract import captured
from tiny_models import enliven
from torch import fx, nn

from optimizer import optimize, report_of
from optimizer.exporting import copy_for_export
from passes import FoldConvBn, TorchCompile
from passes.base import Context
from passes.compiling.blocks import COMPILED_CALL, CompiledCall, repeated_blocks
from passes.compiling.compiler import CompileRecord, RecordingBackend
from passes.compiling.frozen import FrozenCall
from passes.errors import PassOrderError, RequirementNotMet
from passes.graph.backend import GraphCall

CPU = Context("inference", torch.device("cpu"))


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


class Untouchable(nn.Module):
    """Raises if it is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the model was run before the error")


def test_the_result_keeps_class_and_keys() -> None:
    model = Pair().eval()
    fast = optimize(model, [TorchCompile(backend="eager")], example_inputs=(image(),))
    assert report_of(fast).passes[0].status == "applied"
    assert type(fast) is Pair
    assert list(fast.state_dict()) == list(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fast(image(seed=3)), model(image(seed=3)))
    assert model.__dict__.get("_compiled_call_impl") is None
    assert fast._compiled_call_impl is not None


def test_copies_and_exports_take_the_module_before_it() -> None:
    fast = optimize(Pair(), [FoldConvBn(), TorchCompile(backend="eager")], example_inputs=(image(),))
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy_for_export(fast, torch.device("cpu"))):
        assert not isinstance(twin.__dict__.get("_compiled_call_impl"), CompiledCall)
        # An export rewrites the graph of the plain forward once more.
        assert twin.__dict__.get("_compiled_call_impl") is None or computed("batch_norm", twin, image()) == 0
        with torch.no_grad():
            assert torch.allclose(twin(image()), fast(image()), atol=1e-6)


@pytest.mark.parametrize("passes", [["torch-compile", "fold-conv-bn"], ["torch-compile", "torch-compile"]])
def test_a_pass_behind_it_is_an_error_before_work(passes: list[str]) -> None:
    with pytest.raises(PassOrderError, match="can't come after torch-compile"):
        optimize(Untouchable(), passes, example_inputs=(image(),))


def test_no_compiler_is_one_sentence_before_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")
    with pytest.raises(RequirementNotMet) as caught:
        optimize(Untouchable(), ["torch-compile"], example_inputs=(image(),))
    assert str(caught.value) == (
        "torch-compile isn't available here: inductor needs a C++ compiler for the CPU, and there is no "
        "'/nonexistent': install one or set CXX."
    )
    TorchCompile(backend="eager").check(CPU)


def test_no_headers_are_one_sentence_before_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/g++")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(RequirementNotMet, match="inductor needs the headers of Python"):
        TorchCompile().check(CPU)
    (tmp_path / "Python.h").touch()
    TorchCompile().check(CPU)


def test_a_backend_that_is_nowhere_is_refused_before_work() -> None:
    with pytest.raises(RequirementNotMet, match=r"torch-compile has no backend 'nothing': use one of .*inductor"):
        optimize(Untouchable(), [TorchCompile(backend="nothing")], example_inputs=(image(),))


def test_triton_is_needed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequirementNotMet, match="pip install triton"):
        TorchCompile().check(Context("inference", torch.device("cuda")))


# -------------------------------------------------------------------------------------------------------------- blocks


class Mixer(nn.Module):
    """One of many equal blocks of a network."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(8)
        self.dropout = nn.Dropout(0.1)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


class Numbered(Mixer):
    """A block whose computation depends on its number, so that blocks share no code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (self.number + 1.5) if self.number % 2 else super().forward(x).tanh() + self.number


class Tower(nn.Module):
    def __init__(self, block: type[Mixer] = Mixer, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(block(number) for number in range(count))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def tower(block: type[Mixer] = Mixer, count: int = 4) -> Tower:
    torch.manual_seed(0)
    return enliven(Tower(block, count)).eval()


def rows(count: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def compiled_paths(model: nn.Module) -> list[str]:
    calls = ((path, module.__dict__.get(COMPILED_CALL)) for path, module in model.named_modules())
    return [path for path, call in calls if call is not None and not isinstance(call, GraphCall)]


def record_of(fast: nn.Module) -> CompileRecord:
    record = report_of(fast).passes[-1].detail
    assert isinstance(record, CompileRecord)
    return record


def answers_alike(fast: nn.Module, model: nn.Module, sizes: tuple[int, ...] = (1, 2, 5)) -> bool:
    with torch.no_grad():
        return all(torch.allclose(fast(rows(n, n)), model(rows(n, n)), atol=1e-5) for n in sizes)


BLOCKS = [f"blocks.{number}" for number in range(4)]


def test_equal_blocks_are_compiled_once() -> None:
    model = tower()
    fast = optimize(model, [TorchCompile(backend="eager")], example_inputs=(rows(),))
    assert compiled_paths(fast) == BLOCKS
    record = record_of(fast)
    # One program for the first size, one for all others.
    assert (record.regions, record.blocks, record.programs) == ("blocks", (tuple(BLOCKS),), 2)
    assert answers_alike(fast, model)
    assert record.programs <= 3, "another one for a batch of one row at most"
    assert list(fast.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize(
    "make", [lambda: tower(count=2), pytest.param(lambda: tower(Numbered), marks=pytest.mark.slow)]
)
def test_two_blocks_and_blocks_that_share_no_code_are_compiled_as_a_whole(make: Any) -> None:
    model = make()
    fast = optimize(model, [TorchCompile(backend="eager")], example_inputs=(rows(),))
    assert compiled_paths(fast) == [""]
    assert record_of(fast).blocks == ()
    assert answers_alike(fast, model)
    with pytest.raises(RequirementNotMet, match="finds no three equal modules with the same parent that could share"):
        optimize(model, [TorchCompile(backend="eager", regions="blocks")], example_inputs=(rows(),))


class Heavy(Tower):
    """Its blocks do little of the work."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        for _ in range(20):
            y = (y.tanh() + y.sin()).cos()
        return y


@pytest.mark.parametrize(("make", "inputs"), [(lambda: enliven(Heavy()).eval(), (rows(),)), (tower, None)])
def test_blocks_are_compiled_with_the_whole_where_they_do_little_or_nothing_was_run(make: Any, inputs: Any) -> None:
    model = make()
    assert compiled_paths(optimize(model, [TorchCompile(backend="eager")], example_inputs=inputs)) == [""]
    asked = optimize(model, [TorchCompile(backend="eager", regions="blocks")], example_inputs=inputs)
    assert compiled_paths(asked) == BLOCKS
    assert answers_alike(asked, model)


def test_blocks_never_drop_what_a_graph_pass_changed() -> None:
    whole = optimize(tower(), ["simplify", TorchCompile(backend="eager")], example_inputs=(rows(),))
    assert report_of(whole).passes[0].status == "applied"
    assert compiled_paths(whole) == [""]
    with pytest.raises(RequirementNotMet, match="blocks would drop the changes of the graph passes before it"):
        optimize(
            tower(),
            ["simplify", TorchCompile(backend="eager", regions="blocks")],
            example_inputs=(rows(),),
            strict=True,
        )


def test_layers_and_lists_are_no_blocks() -> None:
    layers = nn.ModuleDict({f"layer{number}": nn.Linear(4, 4) for number in range(4)})
    lists = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)]) for _ in range(4))
    assert repeated_blocks(nn.ModuleDict({"layers": layers, "lists": lists})) == []


def test_blocks_of_other_shapes_dtypes_or_flags_are_other_blocks() -> None:
    def groups(change: Callable[[nn.ModuleList], object]) -> list[list[str]]:
        blocks = nn.ModuleList(Mixer() for _ in range(6))
        change(blocks)
        return [[path for path, _ in group] for group in repeated_blocks(blocks)]

    assert groups(lambda blocks: None) == [list("012345")]
    assert groups(lambda blocks: blocks[2].double()) == [list("01345")]
    assert groups(lambda blocks: blocks[2].train(False)) == [list("01345")]
    assert groups(lambda blocks: blocks[2].requires_grad_(False)) == [list("01345")]
    assert groups(lambda blocks: blocks[2].register_buffer("more", torch.ones(1))) == [list("01345")]
    assert groups(lambda blocks: setattr(blocks[2], "inner", nn.Linear(8, 16, bias=False))) == [list("01345")]
    assert groups(lambda blocks: setattr(blocks[2], "forward", lambda x: x)) == [list("01345")]


def test_a_block_that_is_watched_has_its_own_code() -> None:
    seen: list[int] = []
    model = tower()
    model.blocks[0].inner.register_forward_hook(lambda module, args, output: seen.append(1))
    fast = optimize(model, [TorchCompile(backend="eager", regions="blocks")], example_inputs=(rows(),))
    assert compiled_paths(fast) == [path for path in BLOCKS if path != "blocks.0"]
    seen.clear()
    with torch.no_grad():
        fast(rows())
    assert seen == [1]


def test_compiled_blocks_are_trained() -> None:
    model = tower().train()
    for block in model.blocks:
        block.dropout.p = 0.0
    fast = optimize(model, [TorchCompile(backend="eager")], example_inputs=(rows(),), mode="training")
    assert compiled_paths(fast) == BLOCKS, report_of(fast).passes[-1].reason
    twin = copy.deepcopy(model)
    fast(rows()).square().sum().backward()
    twin(rows()).square().sum().backward()
    for name, parameter in fast.named_parameters():
        assert torch.allclose(parameter.grad, twin.get_parameter(name).grad, atol=1e-5), name


def test_a_block_that_is_compiled_already_is_left_alone() -> None:
    tree, context = captured(tower())
    tree.root.blocks[1].compile(backend="eager")
    result = TorchCompile(backend="eager").run(tree, context)
    assert not result.changes
    assert [(skip.where, skip.reason) for skip in result.skips] == [("blocks.1", "its call is already compiled")]


# --------------------------------------------------------------------------------------------------------- graph breaks


class Broken(nn.Module):
    """Breaks the graph twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 1e9:
            y = y + 1
        y = y.sin()
        torch._dynamo.graph_break()
        return self.linear(y)


def test_graph_breaks_are_counted_and_named_with_their_lines() -> None:
    fast = optimize(enliven(Broken()).eval(), [TorchCompile(backend="eager", dynamic=True)], example_inputs=(rows(),))
    record = record_of(fast)
    source, first = inspect.getsourcelines(Broken.forward)
    number = first + next(n for n, line in enumerate(source) if "1e9" in line)
    jump = next(each for each in record.breaks if each.line == "if y.sum() > 1e9:")
    assert jump.where == f"{__file__}:{number}"
    assert jump.reason == "Data-dependent branching"
    assert [each.line for each in record.breaks] == ["if y.sum() > 1e9:", "torch._dynamo.graph_break()"]
    assert record.programs == 3
    assert f"graph break at {jump.where}: Data-dependent branching" in str(report_of(fast))
    assert record.to_json()["graph_breaks"][0] == {
        "where": jump.where, "line": jump.line, "reason": jump.reason, "count": 1,
    }  # fmt: skip


def test_fullgraph_that_cant_be_had_is_one_sentence_with_the_place() -> None:
    with pytest.raises(RequirementNotMet) as caught:
        optimize(enliven(Broken()), [TorchCompile(backend="eager", fullgraph=True)], example_inputs=(rows(),))
    assert f"{__file__}:" in str(caught.value)
    assert "the graph breaks at" in str(caught.value)
    assert "\n" not in str(caught.value)
    fast = optimize(tower(), [TorchCompile(backend="eager", fullgraph=True)], example_inputs=(rows(),))
    assert report_of(fast).passes[0].status == "applied"


# ------------------------------------------------------------------------------------------------------------- freezing


def frozen(model: nn.Module) -> FrozenCall:
    def compile(function: Callable[..., Any], see: Callable[[Any], None] | None = None) -> Callable[..., Any]:
        backend = RecordingBackend("eager", lambda graph, inputs: as_constants(graph), CompileRecord(), see)
        return torch.compile(function, backend=backend)

    return FrozenCall(model, compile)


def as_constants(graph: fx.GraphModule) -> Callable[..., Any]:
    """Copy the program with the current values of its tensors, as inductor does when it freezes."""
    return copy.deepcopy(graph).forward


class Holder(nn.Module):
    """Reads a buffer, and a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 8)
        self.scale = torch.full((8,), 0.5)
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale) + self.shift


def _exchange_child(net: Holder) -> None:
    net.last = enliven(nn.Linear(8, 8))


CHANGES: dict[str, Callable[[Holder], object]] = {
    "an attribute is written to": lambda net: net.scale.mul_(3),
    "an attribute is replaced": lambda net: setattr(net, "scale", torch.full((8,), 4.0)),
    "a buffer is replaced": lambda net: setattr(net, "shift", torch.full((8,), 4.0)),
    "a parameter is replaced": lambda net: setattr(net.last, "weight", nn.Parameter(torch.ones(8, 8))),
    "a child is replaced": _exchange_child,
    "another dtype": lambda net: net.double(),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_frozen_code_sees_whatever_it_is_made_of(kind: str) -> None:
    torch.manual_seed(0)
    model = enliven(Holder()).eval()
    twin = copy.deepcopy(model)
    call = frozen(model)

    def is_right() -> bool:
        x = rows().to(model.first.weight.dtype)
        return torch.allclose(call(x), twin(x), atol=1e-6)

    # First run code that reads the tensors at each call. After that, the compiler has no guards on their identity.
    assert is_right()
    with torch.no_grad():
        assert is_right()
        for each in (model, twin):
            torch.manual_seed(1)
            CHANGES[kind](each)
        assert is_right()
        # The new tensors are watched like the old ones.
        for each in (model, twin):
            each.last.weight.mul_(2)
            each.scale.mul_(2)
        assert is_right()
        assert call.compiled is not None


def test_frozen_code_stays_as_long_as_nothing_changes() -> None:
    call = frozen(enliven(Holder()).eval())
    with torch.no_grad():
        call(rows())
        first = call.compiled
        call.module.another = torch.ones(1)
        call.module.last.zero_grad()
        call(rows())
    assert first is not None
    assert call.compiled is first


@pytest.mark.slow
def test_where_weights_keep_changing_freezing_is_given_up_and_old_ones_are_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    call = frozen(model)
    before = []
    with torch.no_grad():
        call(rows())
        for _ in range(6):
            before.append(weakref.ref(model[0].weight))
            values = {name: value + 1 for name, value in model.state_dict().items()}
            model.load_state_dict(values, assign=True)
            assert torch.allclose(call(rows()), model(rows()))
    assert call.compiled is None
    assert caplog.text.count("from now on the weights") == 1
    gc.collect()
    assert [weight() is None for weight in before] == [True] * 6


_elsewhere = nn.Parameter(torch.full((3,), 2.0))


class Outside(Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * _elsewhere


class Listing(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [_elsewhere]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scales[0]


def test_what_cant_be_watched_isnt_compiled_in(caplog: pytest.LogCaptureFixture) -> None:
    no_attribute = "a tensor of shape (3,) that it reads is not an attribute of it or of a module in it"
    for model, said in (
        (enliven(Outside()).eval(), no_attribute),
        (enliven(Listing()).eval(), no_attribute),
        (_of_inference_tensors(), "is an inference tensor: torch doesn't track writes to it"),
    ):
        call = frozen(model)
        caplog.clear()
        with torch.inference_mode():
            call(rows())
            _elsewhere.data.add_(1)
            model.head.bias.add_(1)
            assert torch.allclose(call(rows()), model(rows()))
        told = [record.message for record in caplog.records if record.name == "passes.compiling.frozen"]
        assert [message.endswith(said) for message in told] == [True]
        assert call.compiled is None


def _of_inference_tensors() -> Tower:
    with torch.inference_mode():
        return enliven(Tower()).eval().requires_grad_(False)


def test_gradients_go_to_weights_that_are_frozen_elsewhere() -> None:
    model = tower()
    call = frozen(model)
    with torch.no_grad():
        call(rows())
    call(rows()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("item", "context", "message"),
    [
        (TorchCompile(freezing=True), Context("training", torch.device("cpu")), "turns the weights"),
        (TorchCompile(mode="max-autotune", backend="eager"), CPU, "mode=max-autotune is only for inductor"),
        (TorchCompile(freezing=True, backend="eager"), CPU, "freezing=true is only for inductor"),
        (TorchCompile(freezing=True, regions="blocks"), CPU, "regions=blocks can't be combined with freezing=true"),
        (
            TorchCompile(mode="max-autotune", regions="blocks"),
            CPU,
            "regions=blocks can't be combined with mode=max-autotune",
        ),
    ],
)
def test_options_that_exclude_each_other(item: TorchCompile, context: Context, message: str) -> None:
    with pytest.raises(RequirementNotMet, match=message):
        item.check(context)


@pytest.mark.parametrize("item", [TorchCompile(mode="reduce-overhead"), TorchCompile(freezing=True)])
def test_what_blocks_cant_be_had_with_compiles_the_whole(item: TorchCompile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCompile, "_compiler", lambda self: lambda graph, inputs: graph.forward)
    fast = optimize(tower(), [item], example_inputs=(rows(),))
    assert compiled_paths(fast) == [""]
    assert answers_alike(fast, tower())


def test_the_mode_reaches_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def inductor(graph: Any, inputs: Any, config_patches: Any = None) -> Any:
        given.append(config_patches)
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor)
    for mode in ("default", "max-autotune-no-cudagraphs"):
        torch._dynamo.reset()
        optimize(Pair(), [TorchCompile(mode=mode)], example_inputs=(image(),))
    assert given[0] is None
    assert given[-1]["max_autotune"]


@pytest.mark.slow
def test_inductor_freezes() -> None:
    model = Pair().eval()
    fast = optimize(model, [TorchCompile(freezing=True, dynamic=True)], example_inputs=(image(),))
    assert report_of(fast).passes[-1].status == "applied", report_of(fast).passes[-1].reason
    with torch.no_grad():
        assert torch.allclose(fast(image()), model(image()), atol=1e-4)
        fast.conv.weight.mul_(2)
        model.conv.weight.mul_(2)
        assert torch.allclose(fast(image()), model(image()), atol=1e-4)


@pytest.mark.slow
def test_inductor() -> None:
    model = Pair().eval()
    fast = optimize(model, ["fold-conv-bn", "torch-compile"], example_inputs=(image(),))
    with torch.no_grad():
        for batch in (2, 5):
            x = image(batch, 3, 8, 8, seed=batch)
            assert torch.allclose(fast(x), model(x), atol=1e-4)
