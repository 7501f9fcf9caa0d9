"""Each rule finds what it is for, and stays silent on code that does it right."""

import json
import math
from types import SimpleNamespace

import numpy
import pytest
import torch
import torch.nn.functional as F
from tiny_models import Net
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from optimize_export.errors import LoadError, UsageError
from optimizer import diagnose
from optimizer.diagnosis import LEVELS, RULES, Diagnosis, chains, evidence, kernels, settings
from passes.graph.layers import RecordedLayers


def found(forward, x=None, *, training_step=None, **held):
    """The findings by rule, of a model in eval mode."""
    model = Net(forward, **held).eval()
    x = torch.randn(2, 8) if x is None else x
    return {each.rule: each for each in diagnose(model, (x,), training_step=training_step).findings}


def attention(self, x):
    scores = x @ x.transpose(-1, -2) / 8
    return F.softmax(scores, -1) @ x


def gelu_by_hand(self, x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def chain(self, x):
    return (x * 3).sin().add(1).exp().mul(2)


def chain_in_place(self, x):
    y = x * 3
    y += 1
    return y.sin().exp()


def checkpointed(use_reentrant):
    return lambda self, x: checkpoint(torch.sin, x, use_reentrant=use_reentrant)


def scale():
    return numpy.full(8, 2.0)


def standardized(self, x):
    weight = self.free.weight
    return F.conv2d(x, weight / weight.std((1, 2, 3), keepdim=True))


LARGE = torch.randn(64, 4096)
IMAGE = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 4, 128, 64)
CONV, NORM = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
FREE_OF_BIAS = nn.Conv2d(3, 16, 3, bias=False)
LAST = {
    "first": nn.Conv2d(3, 16, 3).to(memory_format=torch.channels_last),
    "second": nn.Conv2d(16, 16, 3).to(memory_format=torch.channels_last),
}

# By rule: a forward that it is for, a similar one that it isn't for, the input, and the layers.
CASES = {
    "unregistered": (
        lambda self, x: self.layers[0](x),
        lambda self, x: self.good[0](x),
        None,
        {"layers": [nn.Linear(8, 8)], "good": nn.ModuleList([nn.Linear(8, 8)])},
    ),
    "training-mode": (lambda self, x: F.dropout(x), lambda self, x: F.dropout(x, training=self.training), None, {}),
    "value-read": (
        lambda self, x: x * x.sum().item(),
        lambda self, x: x * x.shape[0] * torch.ones(2).sum().item(),
        None,
        {},
    ),
    "data-dependent-branch": (
        lambda self, x: x if x.sum() > 0 else -x,
        lambda self, x: x if x.dim() > 1 and x.is_floating_point() else -x,
        None,
        {},
    ),
    "tensor-from-array": (
        lambda self, x: x * torch.tensor(scale(), dtype=x.dtype),
        lambda self, x: x * torch.tensor(2.0),
        None,
        {},
    ),
    "moved-from-host": (
        lambda self, x: x + torch.arange(8).to(x.device),
        lambda self, x: x + torch.arange(8, device=x.device).to(x.dtype),
        None,
        {},
    ),
    "unregistered-tensor": (
        lambda self, x: x * self.plain,
        lambda self, x: x * self.one * self.buffer,
        None,
        {"plain": torch.ones(8), "one": torch.tensor(2.0), "buffer": nn.Buffer(torch.ones(8))},
    ),
    "float64-leak": (
        lambda self, x: (x * torch.from_numpy(scale())).float(),
        lambda self, x: (x.double() * torch.ones(8, dtype=torch.float64)).float(),
        None,
        {},
    ),
    "hand-written-attention": (
        attention,
        lambda self, x: F.scaled_dot_product_attention(x, x, x),
        TOKENS,
        {},
    ),
    "activation-by-hand": (gelu_by_hand, lambda self, x: F.gelu(x, approximate="tanh"), LARGE, {}),
    "unfused-chain": (chain, lambda self, x: (x @ x.mT).sin(), LARGE, {}),
    "in-place-in-chain": (chain_in_place, chain, LARGE, {}),
    "bias-before-norm": (
        lambda self, x: self.norm(self.conv(x)),
        lambda self, x: self.norm(self.free(x)) + self.conv(x),
        IMAGE,
        {"conv": CONV, "free": FREE_OF_BIAS, "norm": NORM},
    ),
    "channels-not-multiple-of-8": (
        lambda self, x: self.odd(x),
        lambda self, x: self.tiny(self.even(x)) * self.gate(x[:, :, None, None]).sum(),
        torch.randn(2, 512),
        {
            "odd": nn.Linear(512, 1001),
            "even": nn.Linear(512, 1000),
            "tiny": nn.Linear(1000, 10),
            "gate": nn.Conv2d(512, 1001, 1),
        },
    ),
    "scale-computed": (
        lambda self, x: self.free(x) * (self.norm.running_var + 1e-5).rsqrt()[:, None, None],
        lambda self, x: self.free(x) * self.norm.running_var[:, None, None],
        IMAGE,
        {"free": FREE_OF_BIAS, "norm": NORM},
    ),
    "weight-computed": (
        standardized,
        lambda self, x: F.conv2d(x, self.free.weight[:1].float()) * x.mean(),
        IMAGE,
        {"free": FREE_OF_BIAS},
    ),
    "layout-flip": (
        lambda self, x: self.second(self.first(x).contiguous()),
        lambda self, x: self.second(self.first(x)),
        IMAGE,
        LAST,
    ),
    # Without a GPU, the call returns its tensor.
    "fixed-device": (lambda self, x: x + torch.ones(8).cuda(), lambda self, x: x + torch.ones(8), None, {}),
    "reentrant-checkpoint": (checkpointed(True), checkpointed(False), None, {}),
}


@pytest.fixture(autouse=True)
def _function_is_faster(monkeypatch):
    """A busy machine must not decide whether attention and activations are found."""
    monkeypatch.setattr(chains, "_times", lambda evidence, found: [2.0, 1.0])
    monkeypatch.setattr(evidence.Evidence, "fastest", lambda self, *runs: [2.0, 1.0])


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@pytest.mark.parametrize("rule", CASES)
def test_a_rule_finds_what_it_is_for_and_nothing_else(rule):
    wrong, right, x, held = CASES[rule]
    finding = found(wrong, x, **held)[rule]
    assert (finding.file, finding.line) == (__file__, finding.line)
    assert finding.line > 0
    assert finding.reason
    assert finding.effect
    assert finding.remedy
    assert rule not in found(right, x, **held)


def test_a_model_that_does_it_right_has_no_findings():
    model = nn.Sequential(FREE_OF_BIAS, NORM, nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(576, 8)).eval()
    diagnosis = diagnose(model, (IMAGE,))
    assert diagnosis.findings == ()
    assert str(diagnosis) == "No findings."
    assert "No findings" in diagnosis._repr_html_()


def test_integer_inputs_are_diagnosed():
    silu_of_integers = found(lambda self, x: x.float() * torch.sigmoid(x.float()), torch.ones(2, 8, dtype=torch.int64))
    assert "activation-by-hand" not in silu_of_integers


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "norm", [weight_norm, spectral_norm, parametrizations.weight_norm, parametrizations.spectral_norm]
)
def test_norms_of_weights_are_computed_at_each_call(norm):
    model = nn.Sequential(norm(nn.Conv2d(3, 16, 3, bias=False)))
    step = lambda: model(IMAGE).sum().backward()  # noqa: E731
    step()
    assert {each.rule for each in diagnose(model.eval(), (IMAGE,)).findings} == {"weight-computed"}
    assert diagnose(model, (IMAGE,), training_step=step).findings == ()


def test_findings_of_one_line_are_one_finding():
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)) for _ in range(4)]
    (finding,) = diagnose(nn.Sequential(*blocks).eval(), (IMAGE,)).findings
    assert finding.modules == ("0.0", "1.0", "2.0", "3.0")
    assert finding.module == "0.0"
    assert "in 0.0, 1.0 and 2 more" in finding.where


def test_layers_hidden_on_purpose_are_no_finding_and_a_parameter_in_a_list_is_one():
    teacher = nn.Linear(8, 8).requires_grad_(False)
    assert "unregistered" not in found(lambda self, x: self.hidden[0](x), hidden=[teacher])
    finding = found(lambda self, x: x * self.scales[0], scales=[nn.Parameter(torch.ones(8))])["unregistered"]
    assert finding.level == "error"


def test_a_layer_left_in_training_is_an_error_inside_of_a_model_in_eval():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout()).eval()
    model[1].train()
    (finding,) = diagnose(model, (torch.randn(2, 8),)).findings
    assert (finding.rule, finding.modules) == ("training-mode", ("1",))
    (finding,) = diagnose(model.train(), (torch.randn(2, 8),)).findings
    assert (finding.rule, finding.level) == ("not-in-eval", "note")
    assert model[1].training
    # The model stays as it was.
    assert model.training


@pytest.mark.parametrize(
    ("rule", "forward"),
    [
        ("value-read", lambda self, x: x * len(str(x.sum()))),
        ("value-read", lambda self, x: x * len(f"{x.sum()}")),
        ("value-read", lambda self, x: x.sum().to("cpu") + 1),
        ("tensor-from-array", lambda self, x: x + torch.from_numpy(scale()).float()),
        ("tensor-from-array", lambda self, x: x + torch.Tensor(scale().astype("float32"))),
        ("tensor-from-array", lambda self, x: x + x.new_tensor(scale())),
        ("moved-from-host", lambda self, x: x + torch.arange(8).type_as(x)),
    ],
)
def test_other_ways_to_write_it_are_found(rule, forward):
    assert set(found(forward)) == {rule}


def test_a_map_that_is_made_of_tokens_has_lost_channels_last():
    def by_tokens(self, x):
        tokens = self.first(x).flatten(2).mT.contiguous()
        return self.second(tokens.mT.reshape(2, 16, 6, 6).contiguous())

    finding = found(by_tokens, IMAGE, **LAST)["layout-flip"]
    assert "1,152 elements lose the format, and convolutions convert 1,152 back" in finding.effect


GLOBAL = torch.from_numpy(numpy.ones(8, "float32"))


@pytest.mark.parametrize(
    ("forward", "x"),
    [
        (lambda self, x: torch.vmap(lambda row: row * 2)(x), None),
        (lambda self, x: torch.func.grad(lambda row: (row**2).sum())(x), None),
        (lambda self, x: x + GLOBAL, None),
        (lambda self, x: x + torch.arange(8).type_as(torch.zeros(1)).sum().item(), None),
        (lambda self, x: x * 2, torch.from_numpy(numpy.ones((2, 8)))),
    ],
    ids=["vmap", "grad", "an array outside of forward", "a cast on the host", "an array as input"],
)
def test_what_is_not_made_in_forward_has_no_finding(forward, x):
    assert found(forward, x) == {}


def test_a_plain_tensor_that_forward_moves_is_one_that_is_not_registered():
    finding = found(lambda self, x: x + self.held["shift"].to(x.device), held={"shift": torch.ones(8)})
    assert set(finding) == {"unregistered-tensor"}
    assert finding["unregistered-tensor"].reason.startswith("`held` is a tensor")
    assert "copies it again" in finding["unregistered-tensor"].effect


class Held(nn.Module):
    """Holds a tensor that it doesn't register, and doesn't move."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.held, self.made = {"shift": torch.arange(8.0)}, None

    def forward(self, x):
        return self.layer(x) + self.held["shift"]


class MovesIt(Held):
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.held = {key: fn(value) for key, value in self.held.items()}
        return self


class MovesItInTo(Held):
    def to(self, *args, **kwargs):
        self.held = {key: value.to(*args, **kwargs) for key, value in self.held.items()}
        return super().to(*args, **kwargs)


class MovesItOnceInForward(Held):
    def forward(self, x):
        if self.held["shift"].device != x.device:
            self.held["shift"] = self.held["shift"].to(x.device)
        return super().forward(x)


class MakesItOnce(Held):
    def forward(self, x):
        if self.made is None or self.made.device != x.device:
            self.made = torch.arange(8).to(x.device)
        return self.layer(x) + self.made


class ReadsItWhereItIs(Held):
    def forward(self, x):
        return super().forward(x) if x.sum() != 0 else x


@pytest.mark.parametrize("is_called_before", [False, True])
@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        (MovesIt, set()),
        (MovesItInTo, set()),
        (MovesItOnceInForward, set()),
        (MakesItOnce, set()),
        (Held, {"unregistered-tensor"}),
        (ReadsItWhereItIs, {"unregistered-tensor", "data-dependent-branch"}),
    ],
)
def test_tensors_that_the_model_moves_itself_or_keeps_are_no_finding(kind, rules, is_called_before):
    model = kind().eval()
    if is_called_before:
        model(torch.randn(2, 8))
    assert {each.rule for each in diagnose(model, (torch.randn(2, 8),)).findings} == rules
    assert {one.device.type for one in (*model.parameters(), model.held["shift"])} == {"cpu"}


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: self.norm(self.conv(x)).sum() + self.conv(x[:, :, 1:]).sum(),
        lambda self, x: self.norm(self.conv(x).mT.reshape(2, 16, -1, 12)),
    ],
    ids=["the layer also runs without it", "it normalizes other channels"],
)
def test_a_bias_that_the_norm_does_not_subtract_is_left_alone(forward):
    assert "bias-before-norm" not in found(forward, torch.randn(2, 3, 14, 8), conv=CONV, norm=NORM)


@pytest.mark.parametrize("scaled", ["queries", "scores"])
def test_attention_is_found_where_one_call_makes_queries_keys_and_values(monkeypatch, scaled):
    def of_one_layer(self, x):
        q, k, v = torch.cat([x, 2 * x, 3 * x], -1).unflatten(-1, (3, -1)).movedim(-2, 0).unbind(0)
        scores = q / 8 @ k.mT if scaled == "queries" else q @ k.mT / 8
        return scores.softmax(dim=-1) @ v

    monkeypatch.undo()
    times = chains._times
    # The clock doesn't decide, but both ways are run.
    monkeypatch.setattr(chains, "_times", lambda *given: [2.0, 1.0] if all(times(*given)) else [])
    assert "hand-written-attention" in found(of_one_layer, TOKENS)


@pytest.mark.parametrize(
    "forward",
    [
        # Parts of a call of different sizes; weights that something else reads.
        lambda self, x: ((p := x.split((32, 24, x.shape[-1] - 56), -1))[1] @ p[1].mT).softmax(-1) @ p[0],
        lambda self, x: ((weights := F.softmax(x @ x.mT, -1)) @ x, weights),
    ],
)
def test_what_needs_attention_by_hand_is_no_finding(forward):
    assert "hand-written-attention" not in found(forward, TOKENS)


def test_a_function_that_is_not_faster_here_is_no_finding(monkeypatch):
    monkeypatch.setattr(chains, "_times", lambda evidence, found: [1.0, 1.0])
    monkeypatch.setattr(evidence.Evidence, "fastest", lambda self, *runs: [1.0, 1.0])
    assert "hand-written-attention" not in found(attention, TOKENS)
    assert "activation-by-hand" not in found(gelu_by_hand, LARGE)
    layer = nn.Linear(512, 1001).half()
    with evidence.LineRecorder(layer, layer.modules) as recorder:
        layer(torch.ones(2, 512).half())
    on_gpu = SimpleNamespace(device=torch.device("cuda"), fastest=lambda *runs: [1.0, 1.0])
    graph = recorder.recording.graph
    assert kernels._gain(on_gpu, RecordedLayers(graph).layer_at([*graph.nodes][-1])) is None


def test_attention_is_timed_next_to_the_function(monkeypatch):
    monkeypatch.undo()
    seen = []
    times = chains._times
    monkeypatch.setattr(chains, "_times", lambda *given: seen.append(times(*given)) or seen[0])
    mask = torch.zeros(1, 1, 128, 128)
    found(lambda self, x: F.softmax(x @ x.mT + mask, -1) @ x, TOKENS)
    found(lambda self, x: F.softmax(torch.bmm(x, x.mT) * 0.5, -1) @ x, TOKENS[0])
    assert len(seen) == 2
    assert all(0 < value < 10 for pair in seen for value in pair)


def test_parts_of_one_tensor_are_told_apart():
    def gated(self, x):
        a, b = x.chunk(2, -1)
        return self.layer(a * torch.sigmoid(b)) + self.layer(torch.unbind(torch.stack([a, b]))[0])

    assert found(gated, torch.randn(64, 1024), layer=nn.Linear(512, 1001)).keys() == {"channels-not-multiple-of-8"}
    transposed = nn.ConvTranspose2d(8, 8, 3)
    assert found(lambda self, x: self.layer(x.chunk(2, 1)[0]), torch.randn(2, 16, 8, 8), layer=transposed) == {}


def test_data_parallelism_is_found():
    model = nn.DataParallel(nn.Sequential(FREE_OF_BIAS, nn.BatchNorm2d(16)))
    rules = {each.rule for each in diagnose(model.train(), (IMAGE,)).findings}
    assert rules == {"data-parallel", "batch-norm-per-process", "not-in-eval"}
    assert {each.rule for each in diagnose(model.eval(), (IMAGE,)).findings} == {"data-parallel"}


# The training step -------------------------------------------------------------------------------------------------


def training(**options):
    """A model, and a training step with a DataLoader."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = iter(DataLoader(TensorDataset(torch.randn(256, 8)), 64))

    def step():
        (batch,) = next(batches)
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad(**options)

    return model, step


def test_a_training_step_shows_its_loader_and_its_gradients(monkeypatch):
    # A busy machine may pause the step for longer than the DataLoader takes.
    monkeypatch.setattr(settings, "_LEAST_WAIT", 1e-6)
    model, step = training(set_to_none=False)
    findings = {each.rule: each for each in diagnose(model, (torch.randn(2, 8),), training_step=step).findings}
    assert set(findings) == {"loader-without-workers", "gradients-zeroed"}
    assert {each.file for each in findings.values()} == {__file__}
    assert findings["gradients-zeroed"].line > findings["loader-without-workers"].line


def test_a_step_that_takes_a_batch_trains_a_copy(monkeypatch):
    monkeypatch.setattr(settings, "_LEAST_WAIT", 1e-6)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before, losses = {name: one.clone() for name, one in model.state_dict().items()}, []

    def step(given, batch):
        losses.append(given(batch[0]).square().sum())
        return losses[-1], batch

    loader = DataLoader(TensorDataset(torch.randn(32, 8)), 32, generator=torch.Generator())
    arguments = {"training_step": step, "loader": loader, "optimizer": optimizer}
    x, random = torch.randn(2, 8), torch.get_rng_state()
    findings = {each.rule: each for each in diagnose(model.train(), (x,), **arguments).findings}
    assert set(findings) == {"loader-without-workers"}
    # The second step has other weights, and one batch is enough for two.
    assert losses[0] != losses[1]
    assert all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    assert not optimizer.state
    assert model[0].weight.grad is None
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("given", [{"batch": torch.randn(13, 256)}, {}])
def test_the_batch_of_a_step_is_that_which_is_given_or_the_example_inputs(given):
    model, seen = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8)), []
    x = torch.randn(16, 256)
    step = lambda model, batch: seen.append(batch.shape[0]) or model(batch).sum()  # noqa: E731
    findings = diagnose(model, (x,), training_step=step, **given).findings
    assert [each.rule for each in findings] == ["rows-not-multiple-of-8"] * len(given)
    assert seen == [13 if given else 16] * 2
    with pytest.raises(UsageError, match="go with a training step that takes the model and a batch"):
        diagnose(model, (x,), training_step=lambda: None, batch=x)


@pytest.mark.parametrize(("rows", "told"), [(13, True), (16, False)])
def test_a_training_step_with_an_odd_batch_is_told(rows, told):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 8))
    x = torch.randn(rows, 256)
    findings = diagnose(model, (x,), training_step=lambda: model(x).sum().backward()).findings
    assert [each.rule for each in findings] == ["rows-not-multiple-of-8"] * told
    assert all((each.modules, "13 rows" in each.reason) == (("0",), True) for each in findings)


def test_a_training_step_that_raises_is_told():
    with pytest.raises(LoadError, match=r"The training step raises at test_diagnosis.py:\d+: ValueError: no data"):
        diagnose(nn.Linear(8, 8), (torch.randn(2, 8),), training_step=_raise)


def _raise():
    raise ValueError("no data")


# The settings of a GPU ---------------------------------------------------------------------------------------------


def test_a_setting_is_told_only_if_it_gains(monkeypatch):
    owner = SimpleNamespace(benchmark=False)
    times = iter([2.0, 1.0, 1.0, 1.0])
    seen = SimpleNamespace(fastest=lambda run: [next(times)], forward=None)
    (told,) = settings._compare_setting(seen, owner, "benchmark", "off", "set it")
    assert "takes 2 s, and 1 s with" in told.effect
    assert list(settings._compare_setting(seen, owner, "benchmark", "off", "set it")) == []
    assert owner.benchmark is False


def test_settings_of_a_gpu_are_no_findings_on_a_cpu():
    model = nn.Conv2d(3, 8, 3)
    torch.backends.cudnn.deterministic = True
    try:
        assert diagnose(model.eval(), (IMAGE,)).findings == ()
    finally:
        torch.backends.cudnn.deterministic = False


# The result --------------------------------------------------------------------------------------------------------


def test_the_result_is_plain_data_sorted_by_level():
    layers = [nn.Linear(8, 512), nn.Linear(512, 1001)]
    model = Net(lambda self, x: self.layers[1](self.layers[0](x)) * x.sum().item(), layers=layers)
    diagnosis = diagnose(model.eval(), (torch.randn(2, 8),))
    told = json.loads(json.dumps(diagnosis.to_json()))
    assert [each["level"] for each in told["findings"]] == ["error", "warning", "note"]
    assert told["levels"] == {"error": 1, "warning": 1, "note": 1}
    assert [len(diagnosis.at_least(level)) for level in LEVELS] == [1, 2, 3]
    assert "<td>unregistered</td>" in diagnosis._repr_html_()
    assert isinstance(diagnosis, Diagnosis)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_scripted_model_is_refused_and_a_scripted_child_hides_no_finding_of_others():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    with pytest.raises(UsageError, match=r"The model is TorchScript.*diagnose the module it was made from"):
        diagnose(scripted, (torch.randn(2, 8),))
    assert list(found(lambda self, x: self.hidden[0](self.layer(x)), layer=scripted, hidden=[nn.Linear(8, 8)])) == [
        "unregistered"
    ]


def test_bad_arguments_are_one_sentence():
    with pytest.raises(UsageError, match=r"must be an nn\.Module"):
        diagnose("model", (IMAGE,))
    with pytest.raises(UsageError, match="needs example_inputs"):
        diagnose(nn.Linear(8, 8))
    with pytest.raises(LoadError, match="The model raises on the example inputs: RuntimeError"):
        diagnose(nn.Linear(8, 8), (torch.randn(2, 9),))


def test_every_rule_has_a_name_a_level_and_a_sentence():
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.level in LEVELS
        assert rule.description.splitlines()[0].endswith((".", "."))


def test_a_line_is_the_innermost_outside_of_torch():
    with evidence.LineRecorder(nn.ReLU(), list) as recorder:
        F.relu(torch.ones(2))
    (node,) = (node for node in recorder.recording.nodes() if node.op == "call_function" and "relu" in node.name)
    assert node.meta["line"].file == __file__


@pytest.mark.gpu
def test_rules_measure_on_a_gpu():
    model = nn.Sequential(nn.Linear(4096, 4097, bias=False), nn.Linear(4097, 4096, bias=False)).cuda().eval()
    x = torch.randn(4096, 4096)
    rules = {each.rule: each for each in diagnose(model, (x,)).findings}
    assert {"tf32-off", "channels-not-multiple-of-8"} <= set(rules)
    assert not torch.backends.cuda.matmul.allow_tf32
    halves = {each.rule: each for each in diagnose(model.half(), (x.half(),)).findings}
    assert "here the largest takes" in halves["channels-not-multiple-of-8"].effect
    assert "tf32-off" not in halves


@pytest.mark.gpu
def test_devices_tell_what_waits_on_a_gpu():
    def wrong(self, x):
        y = x + torch.arange(8).to(x.device)
        return y.cpu().cuda() * y.sum().item()

    def right(self, x):
        return x + torch.arange(8, device=x.device) * torch.ones(2).sum().item()

    x = torch.randn(2, 8)
    model = Net(wrong, layer=nn.Linear(8, 8)).cuda().eval()
    assert {each.rule for each in diagnose(model, (x,)).findings} == {"value-read", "fixed-device", "moved-from-host"}
    assert diagnose(Net(right, layer=nn.Linear(8, 8)).cuda().eval(), (x,)).findings == ()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_from_pageable_memory_is_found_on_a_gpu(pinned):
    model = nn.Linear(1024, 8).cuda()
    batch = torch.randn(256, 1024)
    batch = batch.pin_memory() if pinned else batch
    step = lambda: model(batch.cuda(non_blocking=True)).sum().backward()  # noqa: E731
    found = {each.rule for each in diagnose(model, (batch[:2],), training_step=step).findings}
    assert ("pageable-copy" in found) is not pinned
