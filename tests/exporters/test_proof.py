import errno
from dataclasses import replace

import pytest
import torch
from exportable_models import Mlp, Of, floats, mlp_calls

from exporters import ExportError, ExportRequest, RouteRefused, StructureError, WrongFile
from exporters.evidence import gather
from exporters.isolation import one_line, refusing
from exporters.proof import difference, prove_at_calls
from exporters.routes import Route, first_right
from exporters.torchscript import TorchScriptExporter


def sized(*sizes):
    return tuple(((floats(*size),), {}) for size in sizes)


@pytest.mark.parametrize(
    ("calls", "options", "sentence"),
    [
        (sized((2, 3), (3, 3)), {"dynamic_batch": False}, "Input `x` changes its shape between the calls of a static"),
        (sized((1, 3), (3, 3)), {}, "Dim 0 of input `x` has the size 1 in the first call; tracing needs two or more."),
        ((*sized((2, 3)), ((floats(2, 3).double(),), {})), {}, "Input `x` changes its dtype between the calls."),
        (sized((2, 3), (2, 4)), {}, "Input `x` changes more than its first dim"),
        (sized((2, 3), (2, 1, 3)), {}, "Input `x` changes its number of dims"),
        ((*sized((2, 3)), ((), {"y": 1})), {}, "the argument lacks `x` and adds `y`"),
        (sized((2, 4), (3, 5)), {1: "time"}, "Input `x` changes dim 0 between the calls, but that dim isn't open."),
        (sized((2, 4), (3, 4)), {0: "batch", 1: "time"}, "Dim 1 of input `x` is open, but has the same size in all"),
        (sized((2, 1), (2, 5)), {1: "time"}, "Dim 1 of input `x` has the size 1 in the first call; tracing needs two"),
        (sized((2, 4), (3, 5)), {0: "n", 1: "n"}, "Dims named n have different sizes in the same call."),
        (sized((2, 4), (3, 5)), {0: "batch", 1: "time"}, "No call changes the size batch alone."),
    ],
)
def test_calls_that_do_not_fit_each_other_are_refused(calls, options, sentence):
    options = options if "dynamic_batch" in options or not options else {"open_dims": {"x": options}}
    with pytest.raises(StructureError) as caught:
        gather(ExportRequest(Of(lambda x: x * 2), calls, **options))
    assert str(caught.value).startswith(sentence)


def test_an_unstable_output_is_named_and_compared_by_shape():
    evidence = gather(ExportRequest(Of(lambda x: (x + torch.rand_like(x), x * 2)), mlp_calls(2, 4)))
    assert evidence.notes == (
        "Output `output_0` differs between two runs of the model; only its shape and dtype were checked.",
    )
    prove_at_calls(evidence, lambda x: (x, x * 2))
    with pytest.raises(RouteRefused, match="output `output_1` is wrong"):
        prove_at_calls(evidence, lambda x: (x, x))
    with pytest.raises(RouteRefused, match=r"output `output_0` is wrong on inputs of .*: its shape is"):
        prove_at_calls(evidence, lambda x: (x[:1], x * 2))


@pytest.mark.parametrize(
    ("computes_in", "right", "wrong"),
    [(None, 1.0005, 1.005), (torch.float16, 1.01, 1.04), (torch.bfloat16, 1.03, 1.1)],
)
def test_a_file_may_be_off_by_what_the_model_computes_in(computes_in, right, wrong):
    evidence = gather(ExportRequest(Of(lambda x: 2 * x), mlp_calls(2, 4), computes_in=computes_in))
    prove_at_calls(evidence, lambda x: (2 * right * x,))
    with pytest.raises(RouteRefused, match="its largest error is"):
        prove_at_calls(evidence, lambda x: (2 * wrong * x,))


ones = torch.ones(4, 50)


@pytest.mark.parametrize(
    ("expected", "got", "problem"),
    [
        (ones, ones * (1 + 1e-5), None),
        (ones, ones * 1.01, "its largest error is 0.01, where the model's largest value is 1"),
        (ones, ones[:1], "its shape is [1, 50] instead of [4, 50]"),
        (ones, ones.double(), "its dtype is float64 instead of float32"),
        (ones, ones * float("nan"), "its largest error is nan, where the model's largest value is 1"),
        (ones * float("nan"), ones * float("nan"), None),
        (ones * float("nan"), ones, "NaN or infinity occur in different places"),
        (ones * float("nan"), ones * 0, "NaN or infinity occur in different places"),
        (ones * float("inf"), -ones * float("inf"), "NaN or infinity occur in different places"),
        (ones.half(), ones.half() * 1.01, None),
        (ones.half(), ones.half() * 1.1, "its largest error is 0.1, where the model's largest value is 1"),
        (ones.long(), ones.long(), None),
        # Equal scores may decide differently on single elements.
        (ones.long(), ones.long() + (torch.arange(200).view(4, 50) == 3), None),
        (ones.long(), ones.long() + 1, "200 of 200 elements differ"),
        (torch.tensor(2), torch.tensor(3), "1 of 1 elements differ"),
        (ones.cfloat(), ones.cfloat() * 1j, "its largest error is 1, where the model's largest value is 1"),
        (ones[:0], ones[:0], None),
        (ones * 0, ones * 0, None),
        (ones * 0, ones * 1e-20, "its largest error is 1e-20, where the model's largest value is 0"),
    ],
)
def test_difference(expected, got, problem):
    allowed = 2e-2 if expected.dtype == torch.half else 1e-3
    assert (difference(expected, got, allowed)[0] or None) == problem


def _routes(outcomes):
    def write(outcome):
        def route(folder):
            (folder / "model.bin").write_bytes(b"x")
            if isinstance(outcome, BaseException):
                raise outcome
            return (folder / "model.bin",)

        return route

    return [Route(f"route-{index}", write(outcome)) for index, outcome in enumerate(outcomes)]


REQUEST = ExportRequest(Mlp(), mlp_calls(2, 3))


@pytest.fixture(scope="module")
def evidence():
    return gather(REQUEST)


def first(evidence, outcomes, folder, request=REQUEST):
    return first_right(TorchScriptExporter(), request, evidence, _routes(outcomes), folder)


# Where a route is right, no place is asked for.
@pytest.mark.parametrize("refusal", [RouteRefused("no"), WrongFile("no", (1,))])
def test_the_first_right_route_is_taken(refusal, evidence, tmp_path):
    request = replace(REQUEST, place_of=lambda *_: pytest.fail("asked"))
    artifact = first(evidence, [refusal, None, None], tmp_path, request)
    assert (artifact.route, artifact.refused) == ("route-1", (("route-0", "no"),))
    assert artifact.path == tmp_path / "model.bin"
    assert list(tmp_path.iterdir()) == [artifact.path]


def test_all_refused_is_one_sentence_and_leaves_nothing(evidence, tmp_path):
    with pytest.raises(ExportError) as caught:
        first(evidence, [RouteRefused("no"), RouteRefused("no"), RouteRefused("never")], tmp_path)
    assert str(caught.value) == "The model can't be exported to torchscript (route-0 and route-1: no; route-2: never)."
    assert not list(tmp_path.iterdir())


def _asked(outcomes, evidence, folder, monkeypatch, answer="first differs at head"):
    """The error of routes with these outcomes, and the calls of `place_of`, each with the contents of its files."""
    asked = []

    def place_of(artifact, inputs):
        asked.append((artifact.route, [path.read_bytes() for path in artifact.files], inputs))
        return answer

    monkeypatch.setattr(TorchScriptExporter, "file_name", "model.bin")
    with pytest.raises(ExportError) as caught:
        first(evidence, outcomes, folder, replace(REQUEST, place_of=place_of))
    assert not list(folder.iterdir())
    return str(caught.value), asked


def test_the_first_file_that_is_wrong_is_there_when_its_place_is_asked_for(evidence, tmp_path, monkeypatch):
    outcomes = [RouteRefused("no"), WrongFile("off", (1,)), WrongFile("off too", (2,))]
    message, asked = _asked(outcomes, evidence, tmp_path, monkeypatch)
    assert asked == [("route-1", [b"x"], (1,))]
    assert message == (
        "The model can't be exported to torchscript (route-0: no; route-1: off; route-2: off too). The file of the"
        " route 'route-1' first differs at head."
    )


def test_a_place_that_is_not_known_is_left_out_and_that_of_a_large_file_not_asked_for(evidence, tmp_path, monkeypatch):
    outcomes = [WrongFile("off", (1,))]
    told = "The model can't be exported to torchscript (route-0: off)."
    message, asked = _asked(outcomes, evidence, tmp_path, monkeypatch, answer="")
    assert (message, len(asked)) == (told, 1)
    # A large file makes room for the next.
    monkeypatch.setattr("exporters.routes._LARGEST_KEPT", 0)
    assert _asked(outcomes, evidence, tmp_path, monkeypatch) == (told, [])


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt(), MemoryError()])
def test_what_is_no_refusal_passes_and_leaves_nothing(evidence, tmp_path, error):
    with pytest.raises(type(error)):
        first(evidence, [error, None], tmp_path)
    assert not list(tmp_path.iterdir())


def test_refusing_tells_a_full_disk_from_a_refusal():
    for error in (OSError(errno.ENOSPC, "disk full"), MemoryError(), KeyboardInterrupt()):
        with pytest.raises(type(error)), refusing():
            raise error
    for error in (OSError("could not get source code"), RuntimeError("x"), AssertionError()):
        with pytest.raises(RouteRefused), refusing():
            raise error
    with pytest.raises(RouteRefused, match=r"^it fails: ValueError: x$"), refusing("it fails"):
        raise ValueError("x")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            "Unsupported annotation X could not be resolved because Y could not be resolved. At\n  File 'net.py', line 10",
            "Unsupported annotation X could not be resolved because Y could not be resolved",
        ),
        ("Unknown type name 'Net':\n  File \"net.py\", line 3\n    def f", "Unknown type name 'Net'"),
        ("no overload matches, see:\nhttps://pytorch.org", "no overload matches"),
        ('it fails at\n  File "net.py", line 3', "it fails"),
        ("the value is out of range. See", "the value is out of range. See"),
        ("a dim that it is in\n", "a dim that it is in"),
        ("Arguments are not valid.\nThe following variants are available:", "Arguments are not valid"),
    ],
)
def test_a_reason_ends_before_words_that_belong_to_the_next_line(message, reason):
    assert one_line(RuntimeError(message)) == reason


def test_a_reason_is_the_first_line_of_the_cause_without_paths():
    cause = ValueError('\n\x1b[31mFile "/home/me/models/net.py", line 3.\nmore')
    error = RuntimeError("wrapped")
    error.__cause__ = cause
    assert one_line(error) == 'File "net.py", line 3'
    assert one_line(AssertionError()) == "AssertionError"
    assert one_line(KeyError("x")) == "KeyError: 'x'"
    assert one_line(ValueError("In conflict:\n - x\n - y")) == "In conflict: - x"
    interpreter = "The following operation failed in the TorchScript interpreter.\nTraceback:\nRuntimeError: no\n"
    assert one_line(RuntimeError(interpreter)) == "RuntimeError: no"
    assert len(one_line(ValueError("x" * 500))) == 200
