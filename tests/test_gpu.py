"""Optimize, export and verify on a GPU, and check that the artifacts run there.

A machine with a GPU may be there for minutes only: the tests that show the most come first, and the slowest last.
"""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import synced_steps
import torch
from real_models import REAL_MODELS

from exporters.isolation import torchscript_allowed
from optimize_export.gpu_settings import GpuSettings
from optimize_export.runtime import Route, open_route
from optimize_export.runtime.cuda_graphs import Graphed
from optimizer import (
    check_parity,
    export,
    load,
    open_bundle,
    optimize,
    profile,
    rejudge_bundle,
    tune_training,
    verify_bundle,
)
from optimizer.model import pinned_settings
from optimizer.training import Setup
from optimizer.tuning import bench_bundle

pytestmark = pytest.mark.gpu

# A model, its inputs, and the folder of a bundle.
Tuned = tuple[torch.nn.Module, tuple[torch.Tensor, ...], Path]


def made(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model, and the arguments for it on the GPU."""
    model, args, kwargs = REAL_MODELS[name]()
    return model, {"example_inputs": args or None, "example_kwargs": kwargs, "device": "cuda"}


# The whole way, in all formats, in half precision and compiled.


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_a_model_on_the_gpu_goes_the_whole_way(name, tmp_path):
    model, given = made(name)
    fast = optimize(model, **given)
    assert fast.report.device.startswith("cuda")
    assert fast.report.verified
    assert next(fast.parameters()).is_cuda
    assert not next(model.parameters()).is_cuda

    formats = ("torchscript", "onnx", "pt2", "aoti")
    bundle = export(fast, **given, output=tmp_path / "bundle", formats=formats, require_gpu=True)
    assert bundle.parity.ok
    assert bundle.manifest["device"]["type"] == "cuda"
    loaded = {format: bundle.load(format, "cuda") for format in formats}
    assert all(each.device == "cuda" for each in loaded.values())

    placement = loaded["onnx"].placement
    assert placement is not None
    assert placement.get("CUDAExecutionProvider", 0) > 0
    assert loaded["onnx"].settings == {"onnxruntime_tf32": "off"}
    entry = next(artifact for artifact in bundle.manifest["artifacts"] if artifact["format"] == "onnx")
    assert entry["placement"] == placement
    assert entry["parity"]["settings"].items() >= {"torch_tf32": "off", "onnxruntime_tf32": "off"}.items()

    report = verify_bundle(bundle.path, device="cuda", require_gpu=True)
    assert report.ok, report.problems
    elsewhere = verify_bundle(bundle.path, device="cpu")
    assert elsewhere.ok, elsewhere.problems
    assert {artifact.format for artifact in elsewhere.artifacts} == {*formats} - {"aoti"}
    assert any("was compiled for cuda" in note for note in elsewhere.notes)


def test_files_in_float16_are_tried_within_a_budget_and_repeated(tmp_path: Path) -> None:
    model, args, _ = REAL_MODELS["resnet"]()
    options = {"example_inputs": args, "formats": ("torchscript", "onnx"), "device": "cuda", "accuracy": "0.999"}
    bundle = export(model, **options, output=tmp_path / "tuned", tune=True, tune_seconds=240)
    figures = {figure["name"]: figure for figure in bundle.manifest["benchmark"]["figures"]}
    half = ("float16.onnx in onnxruntime", "float16.torchscript.pt in torch", "float16.aoti.pt2 in torch")
    for figure in (figures[f"model.{name}, cuda graph"] for name in half):
        # Others may be so much faster that it isn't judged.
        assert figure["accuracy"] or " times as fast as it" in figure["dropped"], figure
        assert figure["accuracy"] is None or 0.999 < figure["accuracy"]["cosine"] < 1
    sizes = {name: figure["bytes"] for name, figure in figures.items()}
    assert sizes["model.float16.onnx in onnxruntime, cuda graph"] < 0.7 * sizes["model.onnx in onnxruntime, cuda graph"]
    recommended = bundle.manifest["benchmark"]["recommended"]
    assert "float16" in recommended["format"]
    assert load(bundle).route == Route.from_json(recommended)

    choices = tmp_path / "choices.json"
    recommended = {"format": "onnx-float16", "runtime": "onnxruntime", "settings": {}}
    artifact = {"format": "onnx-float16", "quantization": {"kind": "float16", "kept": []}}
    choices.write_text(json.dumps({"benchmark": {"recommended": recommended}, "artifacts": [artifact]}))
    again = export(model, **options, output=tmp_path / "again", choices=choices)
    assert verify_bundle(again.path, device="cuda", require_gpu=True).ok
    run = load(again)
    assert (str(run.route), run.device) == ("onnx-float16 in onnxruntime", "cuda")
    x = args[0].cuda()
    with torch.no_grad():
        wanted = model.cuda()(x).logits
    assert run(x).logits.dtype == torch.float32
    torch.testing.assert_close(run(x).logits, wanted, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize(
    "item",
    [
        *(f"cast-precision:dtype={dtype}:how={how}" for dtype in ("float16", "bfloat16") for how in ("autocast", "weights")),
        *("torch-compile", "torch-compile:mode=reduce-overhead", "torch-compile:freezing=true", "merge-linears"),
    ],
)  # fmt: skip
def test_a_pass_changes_a_transformer(item: str) -> None:
    model, given = made("bert")
    fast = optimize(model, [item], **given)
    assert fast.report.passes[0].status == "applied", fast.report
    assert fast.report.verified
    assert fast.report.parity is not None
    # In a half precision, it is compared with the original in that.
    assert fast.report.parity.precision == (item.split(":")[1].removeprefix("dtype=") if "dtype" in item else None)


# CUDA graphs.


def test_a_cuda_graph_runs_in_and_outside_of_inference_mode_and_in_any_stream() -> None:
    run = Graphed(lambda x: (x * 2 + 1,))
    x = torch.arange(8.0, device="cuda")
    with torch.inference_mode():
        torch.testing.assert_close(run(x)[0], x * 2 + 1)
    (first,) = run(x)
    with torch.cuda.stream(torch.cuda.Stream()):
        (second,) = run(x + 1)
    torch.cuda.synchronize()
    torch.testing.assert_close(first, x * 2 + 1)
    torch.testing.assert_close(second, x * 2 + 3)


def test_a_function_that_waits_for_the_gpu_has_no_graph() -> None:
    x, stream = torch.ones(3, device="cuda"), torch.cuda.current_stream()
    run = Graphed(lambda x: (x * x.sum().item(),))
    assert float(run(x)[0].sum()) == 9
    assert run.why_none
    assert torch.cuda.current_stream() == stream
    assert float((x + 1).sum()) == 6


def test_the_graphs_of_few_shapes_are_kept() -> None:
    run = Graphed(lambda x: (x * 2,))
    for size in range(1, 20):
        x = torch.arange(float(size), device="cuda")
        torch.testing.assert_close(run(x)[0], x * 2)
    assert len(run._graphs) == 16


@pytest.mark.parametrize("format", ["torchscript", "pt2", "onnx"])
def test_a_cuda_graph_replays_each_shape(format: str, tmp_path: Path) -> None:
    model, args, _ = REAL_MODELS["resnet"]()
    bundle = export(model, example_inputs=args, output=tmp_path / "bundle", formats=(format,), device="cuda")
    (artifact,) = bundle.artifacts
    runtime = "onnxruntime" if format == "onnx" else "torch"
    run = open_route(artifact.path, Route(format, runtime, {"cuda_graph": True}), "cuda")
    model = model.cuda().eval()

    def compared(*sizes: int) -> None:
        for rows in sizes:
            x = torch.randn(rows, *args[0].shape[1:], device="cuda")
            with torch.no_grad(), pinned_settings():
                wanted = model(x).logits
            torch.testing.assert_close(run(x)[0], wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(run(x.cpu().numpy())[0], wanted.cpu().numpy(), rtol=1e-3, atol=1e-3)

    with torch.inference_mode():
        compared(2)
    compared(2, 5, 2)
    with ThreadPoolExecutor(1) as other:
        other.submit(compared, 5, 2, 3).result()
    compared(3, 5, 2)


# Tuning, and `load`.


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """A ResNet, its inputs, and a bundle that was tuned on the GPU."""
    model, args, _ = REAL_MODELS["resnet"]()
    bundle = export(
        optimize(model, example_inputs=args, device="cuda"),
        example_inputs=args,
        output=tmp_path_factory.mktemp("tuned") / "bundle",
        formats=("onnx", "torchscript"),
        device="cuda",
        require_gpu=True,
        tune=True,
        tune_seconds=30,
    )
    return model.cuda().eval(), args, bundle.path


@pytest.mark.parametrize(
    ("format", "runtime"), [(None, None), ("onnx", "onnxruntime"), ("torchscript", "torch")], ids=str
)
def test_a_bundle_is_loaded_on_the_gpu(tuned: Tuned, format: str | None, runtime: str | None) -> None:
    model, args, path = tuned
    run = load(path, format=format, runtime=runtime)
    assert run.device == "cuda"
    for rows in (1, 2, 5):
        x = torch.randn(rows, *args[0].shape[1:])
        with torch.no_grad():
            wanted = model(x.cuda()).logits.cpu()
        there, here = run(x.cuda()).logits, run(x).logits
        assert there.is_cuda
        assert not here.is_cuda
        assert isinstance(run(x.numpy())["logits"], numpy.ndarray)
        torch.testing.assert_close(there.cpu(), wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(here, wanted, rtol=1e-3, atol=1e-3)


def test_tuning_times_the_files_on_the_gpu_and_they_can_be_timed_again(tuned: Tuned) -> None:
    benchmark = open_bundle(tuned[2]).manifest["benchmark"]
    timed = {figure["name"] for figure in benchmark["figures"] if figure["seconds"] is not None}
    assert "eager" in timed
    assert benchmark["recommended"] is not None
    assert all(figure["accuracy"] is None for figure in benchmark["figures"])
    assert bench_bundle(tuned[2], device="cuda", seconds=2.0).recommended is not None


def test_onnxruntime_runs_convolutions_in_channels_last(
    tuned: Tuned,
) -> None:
    model, args, path = tuned
    run = open_route(path / "model.onnx", Route("onnx", "onnxruntime", {"nhwc": True}), "cuda")
    for rows in (1, 3):
        x = torch.randn(rows, *args[0].shape[1:], device="cuda")
        with torch.no_grad(), pinned_settings():
            torch.testing.assert_close(run(x)[0], model(x).logits, rtol=1e-3, atol=1e-3)


def test_tuning_leaves_the_settings_of_torch_as_they_were(tuned: Tuned, tmp_path: Path) -> None:
    model, args, _ = tuned
    before = GpuSettings.now()
    GpuSettings(matmul=True, cudnn=True, benchmark=True).put_in_force()
    try:
        bundle = export(
            model, example_inputs=args, output=tmp_path / "bundle", formats=("torchscript",), bench=True, device="cuda"
        )
        assert GpuSettings.now() == GpuSettings(matmul=True, cudnn=True, benchmark=True)
        assert "TF32 in matrix products and the layers of cuDNN" in str(bundle.manifest["benchmark"]["notes"])
    finally:
        before.put_in_force()


# TF32.


def test_tf32_is_pinned_while_measuring_and_restored():
    model = torch.nn.Linear(512, 512).cuda().eval()
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        report = check_parity(model, model, (torch.randn(64, 512, device="cuda"),), device="cuda")
        assert report.ok
        assert report.settings["float32_precision"] == "ieee"
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def test_a_candidate_that_computes_in_tf32_is_caught():
    weight = torch.randn(512, 512, device="cuda")

    def rounded(x: torch.Tensor) -> torch.Tensor:
        # Round as TF32 does: it keeps 10 bits of the mantissa of its operands.
        def cut(value: torch.Tensor) -> torch.Tensor:
            return (value.view(torch.int32) & ~0x1FFF).view(torch.float32)

        return cut(x) @ cut(weight)

    x = torch.randn(64, 512, device="cuda")
    assert not check_parity(lambda x: x @ weight, rounded, (x,), device="cuda").ok


def test_the_precision_of_a_loaded_file_is_that_of_its_route(tmp_path: Path) -> None:
    model = torch.nn.Linear(512, 512).eval()
    x = torch.randn(64, 512)
    bundle = export(model, example_inputs=(x,), output=tmp_path / "bundle", formats=("torchscript",), device="cuda")
    run = load(bundle.path)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        torch.testing.assert_close(run(x), model.cpu()(x), rtol=1e-5, atol=1e-5)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


# Single passes.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layers_of_odd_sizes_are_padded_for_tensor_cores(dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        return
    torch.manual_seed(0)
    head = [torch.nn.AdaptiveAvgPool2d(8), torch.nn.Flatten(2), torch.nn.Linear(64, 1001), torch.nn.GELU()]
    layers = [torch.nn.Conv2d(3, 60, 7), torch.nn.ReLU(), torch.nn.Conv2d(60, 90, 3), *head, torch.nn.Linear(1001, 999)]
    model = torch.nn.Sequential(*layers).cuda().to(dtype).eval()
    x = torch.randn(8, 3, 40, 40, device="cuda", dtype=dtype)
    fast = optimize(model, ["channels-last", "pad-channels"], example_inputs=(x,), device="cuda")
    record = fast.report.passes[1]
    assert fast.report.verified
    # Layer 0 reads images, for which cuDNN has kernels; the product of layer 5 is too small for copies to pay.
    assert [change.where for change in record.changes][:2] == ["2", "7"]
    assert {skip.where for skip in record.skips} <= {"0", "5"}
    assert check_parity(model, fast, (x,), batch_sizes=(1, 2, 5), device="cuda").ok
    with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
        wanted = model(x)
        assert torch.isclose(fast(x), wanted, rtol=1e-2, atol=1e-2).all()
        assert fast(x).stride() == wanted.stride()


def test_layers_under_autocast_are_padded_for_tensor_cores_and_those_in_float32_are_not() -> None:
    class Cast(torch.nn.Module):
        def __init__(self, dtype: torch.dtype | None) -> None:
            super().__init__()
            self.dtype = dtype
            self.linear = torch.nn.Linear(1001, 999)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cuda", self.dtype, enabled=self.dtype is not None):
                return self.linear(x)

    x = torch.randn(512, 1001, device="cuda")
    for dtype, status in ((torch.float16, "applied"), (None, "unchanged")):
        model = Cast(dtype).cuda().eval()
        fast = optimize(model, ["pad-channels"], example_inputs=(x,), device="cuda")
        assert fast.report.passes[0].status == status
        assert check_parity(model, fast, (x,), batch_sizes=(1, 2, 5), device="cuda").ok


class GeluByHand(torch.nn.Module):
    """Five pointwise operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 0.5 * (1 + torch.erf(x / 1.41421))


@pytest.mark.parametrize("backend", ["torchscript", "inductor"])
def test_a_group_of_operations_is_one_kernel(backend: str) -> None:
    x = torch.randn(1 << 20, 4, device="cuda")
    fast = optimize(GeluByHand().eval(), [f"jit-fusion:backend={backend}"], example_inputs=(x,), device="cuda")
    assert fast.report.passes[0].status == "applied", fast.report
    with torch.no_grad():
        assert torch.allclose(fast(x), GeluByHand()(x), atol=1e-6)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            fast(x)
    on_device = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(on_device) == 1
    fast(x.requires_grad_()).sum().backward()
    assert x.grad is not None


def test_equal_blocks_are_compiled_once() -> None:
    block = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = torch.nn.TransformerEncoder(block, 4, enable_nested_tensor=False).eval()
    x = torch.randn(2, 16, 64)
    fast = optimize(model, ["torch-compile:regions=blocks"], example_inputs=(x,), device="cuda")
    assert fast.report.passes[0].status == "applied", fast.report
    assert fast.report.verified


def test_synchronised_batch_norms_train_on_one_gpu_as_those_before() -> None:
    model, x = synced_steps.made().cuda(), synced_steps.batch(2).cuda()
    result = optimize(model, ["sync-batch-norm"], mode="training", example_inputs=(x,))
    assert result.report.verified
    assert result.report.passes[0].remarks == ()
    assert [type(norm) for norm in result.norms] == [torch.nn.SyncBatchNorm] * 3
    seen, wanted = synced_steps.steps(result, x), synced_steps.steps(synced_steps.made().cuda(), x)
    torch.testing.assert_close(seen, wanted, rtol=1e-9, atol=1e-12)


def test_a_profile_on_the_gpu_has_the_times_of_the_kernels(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8192))
    x = torch.randn(4096, 64)
    found = profile(model, example_inputs=(x,), device="cuda", directory=tmp_path / "profile")
    assert found.device == "cuda"
    first = found.operations[0]
    assert (first.name, first.where, first.calls) == ("aten::linear", "2", 1)
    assert 0 < sum(each.share for each in found.operations) == pytest.approx(1)
    assert not next(model.parameters()).is_cuda

    found = profile(model, example_inputs=(x,), device="cuda", mode="training")
    rows = {(each.name, each.where): each for each in found.operations}
    # The backward pass has a thread of its own.
    assert rows["ReluBackward0", "1"].calls == 1
    assert rows["AddmmBackward0", "2"].seconds > 0
    assert sum(each.share for each in found.operations) == pytest.approx(1)
    assert found.peak_memory.bytes > 4096 * 8192 * 4


# The slowest.


@pytest.mark.parametrize("name", ["resnet", "bert"])
def test_an_original_on_the_cpu_is_compared_with_artifacts_on_the_gpu(name, tmp_path):
    model, given = made(name)
    fast = optimize(model, **given)
    bundle = export(fast, **given, output=tmp_path / "bundle", reference_device="cpu", row_independence=True)
    assert bundle.manifest["device"]["type"] == "cuda"
    assert bundle.manifest["parity"]["reference_device"]["type"] == bundle.manifest["golden"]["device"]["type"] == "cpu"
    for artifact in bundle.manifest["artifacts"]:
        assert (artifact["parity"]["factor"], artifact["parity"]["device"]) == (16.0, "cuda")
        assert artifact["parity"]["reference_device"] == "cpu"
        # The GPU rounds differently: bit-identical outputs would mean that the CPU ran.
        assert any(output["max_error"] > 0 for output in artifact["parity"]["outputs"])
    assert verify_bundle(bundle.path, device="cuda", require_gpu=True).ok
    assert verify_bundle(bundle.path, device="cpu").ok
    assert rejudge_bundle(bundle.path).ok


@pytest.mark.gpu(2)
def test_two_gpus_train_as_one_process_does_on_the_whole_batch(tmp_path: Path) -> None:
    passes = ("sync-batch-norm", "sync-batch-norm,insert-checkpoints:memory_budget=min")
    for ranks in synced_steps.run_ranks(tmp_path, "nccl", *passes):
        assert all(rank["verified"] and set(rank["status"]) == {"applied"} for rank in ranks)
        assert all(rank["warned"] == [] for rank in ranks)
        synced_steps.check_ranks(ranks)


def test_graphs_of_several_shapes_share_memory_in_any_order_and_from_any_thread() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(6)))
    model = model.cuda().eval()
    run = Graphed(lambda x: (model(x), model(x).sum(0)))
    given = {size: torch.randn(size, 64, device="cuda") for size in (3, 300, 30, 3000)}
    with torch.no_grad():
        wanted = {size: (model(x), model(x).sum(0)) for size, x in given.items()}

    def compared(size: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            outputs = run(given[size])
            torch.cuda.current_stream().synchronize()
        torch.testing.assert_close(outputs, wanted[size], rtol=1e-4, atol=1e-4)

    torch.cuda.synchronize()
    for size in (3, 300, 30, 3000, 3, 3000, 30, 300):
        compared(size)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(compared, [3000, 3, 30, 300] * 25))
    assert (len(run._graphs), run.why_none) == (4, "")


def test_other_threads_run_and_allocate_while_a_graph_is_captured() -> None:
    weight = torch.randn(64, 64, device="cuda")
    with torchscript_allowed():
        scripted = torch.jit.trace(lambda x: (x @ weight).relu().sum(1), torch.randn(4, 64, device="cuda"))
    run = Graphed(lambda x: ((x @ weight).relu(),))
    done = threading.Event()

    def beside() -> None:
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            while not done.is_set():
                rows = torch.randn(1 << 12, 64).pin_memory().to("cuda", non_blocking=True)
                assert scripted(rows).isfinite().all().item()

    with ThreadPoolExecutor(2) as threads:
        others = [threads.submit(beside) for _ in range(2)]
        try:
            for size in range(1, 13):
                x = torch.randn(size, 64, device="cuda")
                torch.testing.assert_close(run(x)[0], (x @ weight).relu())
        finally:
            done.set()
        for other in others:
            other.result()
    assert run.why_none == ""


def test_an_aoti_file_runs_in_a_graph_at_each_shape(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    bundle = export(
        model, example_inputs=torch.randn(2, 16), output=tmp_path / "bundle", formats=("aoti",), device="cuda"
    )
    (artifact,) = bundle.artifacts
    run: Any = open_route(artifact.path, Route("aoti", "torch", {"cuda_graph": True}), "cuda")
    for size in (*range(2, 20), 3, 19):
        x = torch.randn(size, 16)
        with torch.no_grad():
            torch.testing.assert_close(run(x)[0], model(x), rtol=1e-3, atol=1e-3)
    # Further shapes run without one, next to those that were captured.
    assert (len(run.graphs._graphs), run.graphs.why_none) == (16, "")


def test_an_onnx_file_takes_inputs_from_the_cpu_in_a_graph(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    bundle = export(
        model, example_inputs=torch.randn(2, 16), output=tmp_path / "bundle", formats=("onnx",), device="cuda"
    )
    (artifact,) = bundle.artifacts
    for graphs in (True, False):
        run: Any = open_route(artifact.path, Route("onnx", "onnxruntime", {"cuda_graph": graphs}), "cuda")
        for size in (2, 5, 2):
            x = torch.randn(size, 16)
            (out,) = run(x)
            assert not out.is_cuda
            with torch.no_grad():
                torch.testing.assert_close(out, model(x), rtol=1e-3, atol=1e-3)
        assert run.graphs is None or run.graphs.why_none == ""


def test_a_training_step_is_tuned_and_its_code_trains_on_the_gpu() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 64, 3),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(2304, 8),
    )

    def step(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    dataset = torch.utils.data.TensorDataset(torch.randn(64, 3, 8, 8), torch.arange(64) % 8)
    loader = torch.utils.data.DataLoader(dataset, 32)
    before = [one.clone() for one in model.parameters()]
    tuned = tune_training(model, step, loader=loader, tune_seconds=30, device="cuda")
    assert tuned.device == torch.cuda.get_device_name()
    assert {"cudnn.benchmark", "fp16 autocast"} <= {each.name for each in tuned.candidates}
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))
    every = Setup(
        precision="fp16", channels_last=True, passes=("fold-conv-bias",), optimizer="fused", pin_memory=True, workers=0
    )
    for setup in (tuned.recommended, every):
        names = {"model": model.cuda(), "training_step": step, "example_inputs": (dataset.tensors[0][:4],)}
        exec(dataclasses.replace(tuned, recommended=setup).code, {**names, "dataset": dataset, "loader": loader})
        assert all(one.isfinite().all() for one in model.parameters())
