"""Each model makes a decision during its capture, and none of the checked calls decides differently."""

import contextlib
import math
import re

import numpy
import pytest
import torch
import torch.nn.functional as F
from exportable_models import floats
from tiny_models import enliven
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import exporters.evidence
from exporters import ExportError, ExportRequest, OnnxExporter, Pt2Exporter, TorchScriptExporter
from exporters.base import Adapter
from exporters.tracing import Watch, trace

CALLS = tuple(((floats(size, 4, seed=size),), {}) for size in (2, 1, 3, 5, 8))
FIXED = {"dynamic_batch": False, "calls": CALLS[:1]}
EXPORTERS = (TorchScriptExporter, OnnxExporter)


class Deciding(nn.Module):
    """A layer with the given function as its forward."""

    def __init__(self, forward):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("gate", torch.ones(()))
        self.function = forward

    def forward(self, x):
        return self.function(self, x)


def decisions(function, x=CALLS[0][0][0]) -> Watch:
    model = enliven(Deciding(function)).eval()
    return trace(Adapter(model, (x,)), (x,))[1]


def export(exporter, function, tmp_path, calls=CALLS, **options):
    return exporter().export(ExportRequest(enliven(Deciding(function)).eval(), calls, **options), tmp_path)


def refusal(exporter, function, tmp_path, **options):
    with pytest.raises(ExportError) as caught:
        export(exporter, function, tmp_path, **options)
    assert not list(tmp_path.iterdir())
    return str(caught.value)


def each(**functions):
    """A parameter for each function, named by its keyword."""
    return [pytest.param(function, id=name) for name, function in functions.items()]


# ---------------------------------------------------------------------------------------------- on values of the inputs


def by_truth(self, x):
    if x.sum() > 1000:
        x = x + 1
    return self.layer(x)


def by_an_error_that_is_caught(self, x):
    try:
        if x.sum() > 1000:
            raise ValueError("large")
    except ValueError:
        x = x + 1
    return self.layer(x)


def by_what_was_written(self, x):
    held = torch.zeros(3)
    held[0] = x[0, 0]
    return self.layer(x + 1 if held.sum() > 100 else x)


def by_rows_of_a_mask(self, x):
    if len(x[x[:, 0] > 100]) > 0:
        x = x + 1
    return self.layer(x)


def by_a_name_given_in_a_check(self, x):
    if (large := bool(x.sum() > 1000)) and x.dim() == 7:
        raise ValueError("seven dims")
    return self.layer(x) * (2 if large else 1)


@pytest.mark.parametrize(
    "function",
    each(
        truth=by_truth,
        item=lambda self, x: self.layer(x if x.sum().item() < 1000 else x + 1),
        list=lambda self, x: self.layer(x + 1 if x.argmax(1).tolist() == [0, 0] else x),
        numpy=lambda self, x: self.layer(x + 1 if x.numpy().sum() > 1000 else x),
        equality=lambda self, x: self.layer(x + 1 if torch.equal(x, x.abs()) else x),
        membership=lambda self, x: self.layer(x + 1 if 1234.0 in x else x),
        written=by_what_was_written,
        rows_that_the_data_chose=lambda self, x: self.layer(x + 1 if (x > 0).nonzero().shape[0] > 100 else x),
        rows_of_a_mask=by_rows_of_a_mask,
        length_made_of_data=lambda self, x: self.layer(
            x + 1 if torch.arange(x.abs().max().ceil().long()).shape[0] > 1000 else x
        ),
        name_given_in_a_check=by_a_name_given_in_a_check,
        caught_error=by_an_error_that_is_caught,
    ),
)
def test_a_decision_on_values_is_found(function):
    watch = decisions(function)
    assert watch.values or watch.counts


def below_the_rows(self, x):
    rows = torch.cat([x[x[:, 0] > 0], x])
    return self.layer(x) if rows.numel() == 0 else self.layer(rows).sum() + self.layer(x)


def by_all_rows(self, x):
    rows = torch.cat([x[x[:, 0] > 0], x])
    return self.layer(x) if rows.numel() > 12 else self.layer(rows).sum() + self.layer(x)


def with_the_number_of_rows(self, x):
    return self.layer(x) * int(x[x[:, 0] > -100].shape[0])


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (by_rows_of_a_mask, {}),
        (by_all_rows, FIXED),
        (with_the_number_of_rows, {}),
        (below_the_rows, {}),
        (below_the_rows, FIXED),
    ],
)
def test_a_branch_on_a_number_of_rows_is_right_where_no_values_decide_it(function, options, tmp_path):
    if function is below_the_rows:
        assert decisions(function).counts
        export(TorchScriptExporter, function, tmp_path, **options)
    else:
        assert "branches on the values of its inputs at" in refusal(TorchScriptExporter, function, tmp_path, **options)


@pytest.mark.parametrize(
    ("exporter", "options"), [(TorchScriptExporter, {}), (OnnxExporter, FIXED), (Pt2Exporter, {}), (Pt2Exporter, FIXED)]
)
def test_a_decision_on_values_is_refused_with_its_place(exporter, options, tmp_path):
    inside = nn.Sequential(enliven(Deciding(by_truth)), nn.ReLU())
    model, place = (inside[0], "the model's forward") if options else (inside, "module `0`")
    with pytest.raises(ExportError) as caught:
        exporter().export(ExportRequest(model.eval(), options.get("calls", CALLS), not options), tmp_path)
    sentence = str(caught.value)
    assert f"the model branches on the values of its inputs at `if x.sum() > 1000:` in {place}" in sentence
    assert "torch.where" in sentence


@pytest.mark.parametrize(
    "function",
    each(
        tensor=lambda self, x: torch.from_numpy(numpy.tanh(x.numpy())),
        number=lambda self, x: x * float(numpy.asarray(x).max()),
    ),
)
def test_numpy_isnt_called_a_branch(function, tmp_path):
    sentence = refusal(TorchScriptExporter, function, tmp_path)
    assert "the model computes in numpy at `" in sentence
    assert "use torch's functions" in sentence
    assert "branches" not in sentence


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor(2.6))

    def forward(self, x):
        k = round(self.shift.cpu().item() * 2)
        return x[:, :k] * k


class Compared(Rounded):
    def forward(self, x):
        return x * 2 if self.shift > 2 else x


@pytest.mark.parametrize(
    ("kind", "line"), [(Rounded, "k = round("), (Compared, "return x * 2 if self.shift > 2 else x`")]
)
def test_a_value_of_a_buffer_that_python_reads_is_told_with_its_line(kind, line, tmp_path):
    calls = tuple(((torch.randn(size, 9),), {}) for size in (2, 3))
    with pytest.raises(ExportError) as caught:
        Pt2Exporter().export(ExportRequest(kind().eval(), calls), tmp_path)
    assert f" The model reads a tensor's value into Python at `{line}" in str(caught.value)
    assert str(caught.value).endswith("If the value is a constant, compute it in the constructor.")


# ---------------------------------------------------------------------------- decisions that are the same in every call


def by_checks(self, x):
    if (x > 1000).any():
        raise ValueError("too large")
    assert not torch.isnan(x).any(), "not a number"
    if x.sum() < 1e9 and x.shape[0] < 1e6:
        x = x * 2
    else:
        raise ValueError("too large")
    return self.layer(x)


def by_kind(self, x):
    if x.dtype is torch.float32 and x.dim() == 2 and x.is_floating_point() and not x.is_cuda and x.is_contiguous():
        x = x * 2
    return self.layer(x)


def by_fixed_sizes(self, x):
    heads = int(x.shape[1] ** 0.5)
    y = self.layer(x)
    if y.shape[-1] != 4:
        y = y * 3
    return y.view(y.shape[0], heads, -1).flatten(1) * heads


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    each(
        weights=lambda self, x: self.layer(x * 2 if self.gate > 0 else x) if float(self.gate) > 0 else x,
        checks=by_checks,
        kind=by_kind,
        fixed_sizes=by_fixed_sizes,
        in_the_graph=lambda self, x: torch.where(x.sum() > 100, x, self.layer(x)),
    ),
)
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_what_falls_the_same_way_in_every_call_is_no_hindrance(exporter, function, tmp_path):
    assert export(exporter, function, tmp_path).route in ("trace", "dynamo", "torchscript")


# --------------------------------------------------------------------------------------------------------- on the batch


def above_sixteen_in_python(self, x):
    count = int(x.shape[0])
    return self.layer(x + 1 if count > 16 else x)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda self, x: self.layer(x + 1 if x.shape[0] > 16 else x), 17),
        (lambda self, x: (y := self.layer(x)) + (1 if y.shape[0] == 4 else 0), 4),
        (lambda self, x: self.layer(x + 1 if x.size(0) == 777 else x), 777),
        (lambda self, x: (y := self.layer(x)) + (1 if y.reshape(-1).shape[0] * 3 > 60_000 else 0), 5001),
        (above_sixteen_in_python, 17),
        # After a branch that makes no difference, and with a difference of 1e-4.
        (lambda self, x: self.layer(x if max(x.shape[0], 16) <= 64 else x + 1), 65),
        (lambda self, x: self.layer(x + 1 if x.shape[0] > 10 and x.shape[0] > 100 else x), 101),
        (lambda self, x: F.gelu(self.layer(x) * 3, approximate="tanh" if x.shape[0] > 16 else "none"), 17),
    ],
)
def test_a_branch_at_a_batch_that_no_call_has_is_found_there(exporter, function, batch, tmp_path):
    sentence = refusal(exporter, function, tmp_path)
    assert f"at batch size {batch} the model takes a different path than the captured one" in sentence
    assert f"output `output` is wrong on inputs of [{batch}, 4]" in sentence


def by_values_of_many(self, x):
    if x.shape[0] > 10 and x.sum() > 1000:
        x = x + 1
    return self.layer(x)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (by_values_of_many, "at batch size 11 the model branches on the values of its inputs at"),
        # The model raises at 20 rows, and takes another branch at 21 and 22.
        pytest.param(
            lambda self, x: self.layer(x * 3 if 12 // (x.shape[0] - 20) > 5 else x),
            r"at batch size 2[012]\b",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_decision_that_only_large_batches_take_is_refused(exporter, function, reason, tmp_path):
    assert re.search(reason, refusal(exporter, function, tmp_path))


def test_a_size_that_grows_faster_than_the_batch_is_no_linear_function_of_it(tmp_path):
    def by_pairs(self, x):
        return self.layer(x * 2 if (x @ x.t()).reshape(-1).shape[0] > 100 else x)

    assert "can't be exported" in refusal(TorchScriptExporter, by_pairs, tmp_path)


def in_chunks(self, x):
    if x.shape[0] > 16:
        return torch.cat([self.layer(x[:16]), self.layer(x[16:])])
    return self.layer(x)


def up_to_sixteen(self, x):
    if x.shape[0] > 16:
        raise ValueError("too many rows")
    return self.layer(x)


def padded_to_eight(self, x):
    rows = x.shape[0]
    return self.layer(F.pad(x, (0, 0, 0, (8 - rows % 8) % 8)))[:rows]


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize(
    "function",
    each(
        chunks=in_chunks,
        up_to_sixteen=up_to_sixteen,
        padded=padded_to_eight,
        alike=lambda self, x: (y := self.layer(x)) * (2 if y.size() == (x.shape[0], 4) else 1),
        difference=lambda self, x: (y := self.layer(x)) * (2 if y.shape[0] - x.shape[0] > 0 else 1),
    ),
)
def test_a_way_that_gives_the_same_is_no_hindrance(exporter, function, tmp_path):
    artifact = export(exporter, function, tmp_path)
    assert artifact.route in ("trace", "dynamo")
    assert not artifact.refused


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_fixed_batch_may_decide_anything(exporter, tmp_path):
    assert export(exporter, above_sixteen_in_python, tmp_path, **FIXED).route in ("trace", "dynamo")


def test_a_branch_that_only_a_large_batch_takes_is_refused_untried(tmp_path):
    calls = tuple(((floats(size, 64)[:, :4],), {}) for size in (2, 3))
    sentence = refusal(
        TorchScriptExporter,
        lambda self, x: self.layer(x + 1 if x.shape[0] > 1_000_000 else x),
        tmp_path,
        calls=calls,
    )
    assert "the inputs would be too large" in sentence or "is wrong on inputs of [1000001, 4]" in sentence


def by_the_length_of_weights(self, x):
    assert isinstance(len(self.layer.weight), int)
    return self.layer(x) * {4: 2.0}[len(self.layer.weight)]


def uncapturable(self, x):
    if torch.compiler.is_exporting():
        raise RuntimeError("no capture of this")
    return self.layer(x)


def of_a_fixed_size(self, x):
    return uncapturable(self, x) * math.ceil(math.log1p(int(x.shape[1])))


def in_halves(self, x):
    return torch.cat([uncapturable(self, x), *x.chunk(2, -1)], -1)


ROWS = {"calls": [((torch.randn(size, 4),), {}) for size in (4, 5, 6)], "open_dims": {"x": {0: "rows"}}}
# With `_LARGEST_INPUT` as below, these rows are too large for a batch that is 64 larger.
LARGE = {"calls": [((torch.randn(size, 30, 4),), {}) for size in (2, 1)]}


@pytest.mark.parametrize(
    ("function", "options"),
    [
        (by_the_length_of_weights, {}),
        (lambda self, x: self.layer(x) * {2: 2.0}[len(x)], FIXED),
        (of_a_fixed_size, {}),
        (of_a_fixed_size, ROWS),
        (in_halves, {}),
        (in_halves, LARGE),
    ],
)
def test_sizes_that_no_call_changes_stay_numbers_and_need_no_capture(function, options, tmp_path, monkeypatch):
    if options is LARGE:
        monkeypatch.setattr(exporters.evidence, "_LARGEST_INPUT", 64 * 30 * 4 * 4)
    assert export(TorchScriptExporter, function, tmp_path, **options).route == "trace"


LENGTHS = {
    "calls": [((torch.randn(2, size, 4),), {}) for size in (4, 5, 6)],
    "open_dims": {"x": {1: "length"}},
}


@pytest.mark.parametrize(
    ("function", "options", "reason"),
    [
        (
            lambda self, x: uncapturable(self, x) / (1 if int(x.shape[0]) < 50 else 2),
            {},
            # torch 2.11 leaves out the message.
            r"reads a size .* at which sizes the trace is valid: (.*no capture|raised exception .*RuntimeError)",
        ),
        # What is read is the same in all calls, but the size is declared.
        (
            lambda self, x: uncapturable(self, x) * int(x[:, ::8].shape[1]),
            LENGTHS,
            "determine at which sizes the trace",
        ),
        (
            lambda self, x: torch.cat([uncapturable(self, piece) for piece in x.split(16)]),
            {},
            r"\(trace: the model splits a tensor at `.*x.split\(16\).*, which the trace freezes, and torch.export can't",
        ),
    ],
)
def test_a_size_that_changes_needs_a_capture(function, options, reason, tmp_path):
    assert re.search(reason, refusal(TorchScriptExporter, function, tmp_path, **options))


# --------------------------------------------------------------------------------------------------- recurrent layers


class Recurrent(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer(4, 6, batch_first=True)

    def forward(self, x, lengths=None):
        if lengths is None:
            return self.layer(x)[0]
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]


class DoubledIfLong(Recurrent):
    def forward(self, x):
        return super().forward(x) * (2 if x.shape[1] > 300 else 1)


def sequences(rows, steps, *, packed):
    lengths = (torch.arange(rows) * 3 + steps - 1) % steps + 1
    return floats(rows, steps, 4), *((lengths,) if packed else ())


RECURRENT = [(nn.GRU, False), (nn.RNN, False), (nn.GRU, True), (nn.LSTM, True)]


SIZES = [(3, 7), (2, 7), (5, 7), (3, 5), (3, 11), (5, 9), (7, 11)]
STEPS = {"x": {0: "batch", 1: "steps"}}


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "packed"), RECURRENT[1:])
def test_recurrent_layers_of_any_length_are_taken_from_the_older_exporter(layer, packed, tmp_path):
    model = enliven(Recurrent(layer)).eval()
    calls = tuple((sequences(*size, packed=packed), {}) for size in SIZES)
    dims = {**STEPS, **({"lengths": {0: "batch"}} if packed else {})}
    artifact = OnnxExporter().export(ExportRequest(model, calls, open_dims=dims), tmp_path)
    assert artifact.route == "torchscript"
    for size in [(1, 1), (4, 1), (1, 13), (6, 40)]:
        inputs = sequences(*size, packed=packed)
        assert torch.allclose(artifact.load()(*inputs)[0], model(*inputs), atol=1e-5), size


@pytest.mark.slow
def test_a_recurrent_layer_of_any_length_with_a_decision_on_it_is_refused(tmp_path):
    calls = tuple((sequences(*size, packed=False), {}) for size in SIZES)
    request = ExportRequest(enliven(DoubledIfLong(nn.GRU)).eval(), calls, open_dims=STEPS)
    with pytest.raises(ExportError, match=r"the model reads a size in Python at `.* > 300 .*determine at which sizes"):
        OnnxExporter().export(request, tmp_path)


# ------------------------------------------------------------------------------------- numbers that turn at larger sizes


@pytest.mark.parametrize(
    ("function", "size"),
    [
        (lambda self, x: self.layer(x) * min(x.shape[0], 20), 21),
        (lambda self, x: self.layer(x) + math.floor(x.shape[0] / 64), 64),
        (lambda self, x: self.layer(x) + torch.tensor([x.shape[0] // 50] * 4), 50),
        (lambda self, x: torch.cat([self.layer(piece) for piece in x.split(16)]), 17),
    ],
)
def test_a_number_that_is_the_same_in_all_calls_is_tried_where_it_turns(function, size, tmp_path):
    assert f"(trace: at batch size {size} the model takes" in refusal(TorchScriptExporter, function, tmp_path)


def by_half_the_rows(self, x):
    y = self.layer(x) * (x.shape[0] // 2)
    return y.contiguous() if x.shape[0] > 300 else y


class Pieces(nn.Module):
    def forward(self, x):
        return torch.cat([piece.sin() for piece in x.split(16)])


@pytest.mark.parametrize(
    ("model", "route"), [(Deciding(by_half_the_rows), "trace"), (Pieces(), "script")], ids=["number", "pieces"]
)
def test_a_number_that_a_file_computes_is_right_where_it_turns(model, route, tmp_path):
    model = enliven(model).eval()
    artifact = TorchScriptExporter().export(ExportRequest(model, CALLS), tmp_path)
    assert artifact.route == route
    for size in (1, 4, 16, 17, 63, 301):
        assert torch.allclose(artifact.load()(floats(size, 4))[0], model(floats(size, 4)), atol=1e-5), size


# ------------------------------------------------------------------------------------------------ checks that are caught


def few(x):
    if x.shape[0] > 20:
        raise ValueError("too many rows")


def small(x):
    if (x > 50).any():
        raise ValueError("too large")


def caught(check):
    def function(self, x):
        try:
            check(x)
        except (TypeError, ValueError):
            x = x * 2
        return self.layer(x)

    return function


def suppressed(test):
    def function(self, x):
        y = self.layer(x)
        with contextlib.suppress(AssertionError):
            assert test(x)
            y = y * 2
        return y

    return function


def by_a_replaced_error(self, x):
    try:
        try:
            small(x)
        except ValueError as error:
            raise RuntimeError("wrong inputs") from error
    except RuntimeError:
        x = x * 2
    return self.layer(x)


def by_a_check_whose_error_goes_on(self, x):
    x = x * x.new_tensor([1.0, 2.0, 3.0, 4.0])
    try:
        small(x)
    except ValueError as error:
        raise RuntimeError("wrong inputs") from error
    return self.layer(x)


@pytest.mark.parametrize(
    ("exporter", "function"),
    [(TorchScriptExporter, caught(few)), (OnnxExporter, suppressed(lambda x: x.shape[0] > 20))],
    ids=["caught", "suppressed"],
)
def test_a_check_of_a_size_decides_where_its_error_is_caught(exporter, function, tmp_path):
    assert "at batch size 21 the model takes a different path" in refusal(exporter, function, tmp_path)


@pytest.mark.parametrize(
    "function",
    each(
        caught=caught(small),
        suppressed=suppressed(lambda x: (x > 50).any()),
        replaced=by_a_replaced_error,
        in_a_list=lambda self, x: self.layer(x) + torch.tensor([x.sum() > 1000] * 4),
    ),
)
def test_a_check_of_values_decides_where_its_error_is_caught(function, tmp_path):
    assert "branches on the values of its inputs" in refusal(TorchScriptExporter, function, tmp_path)


def test_a_check_whose_error_leaves_the_model_decides_nothing(tmp_path):
    assert export(TorchScriptExporter, by_a_check_whose_error_goes_on, tmp_path).route == "trace"
