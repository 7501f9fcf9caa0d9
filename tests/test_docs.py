"""The documentation agrees with the classes and the command."""

import ast
import importlib.util
import inspect
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import distributed, nn

import exporters.errors
import optimize_export.errors
import passes.errors
from optimizer import (
    check_parity,
    diagnose,
    export,
    optimize,
    profile,
    rejudge_bundle,
    tune_training,
    verify_bundle,
)
from optimizer.command.commands import COMMANDS
from optimizer.diagnosis import RULES
from passes.registry import pass_names

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def generate():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_generated_parts_are_those_of_now(generate):
    assert (ROOT / "docs" / "passes.md").read_text(encoding="utf-8") == generate.reference(), "run `make docs`"
    options = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert generate.options_with_table(options) == options, "run `make docs`"
    diagnosis = (ROOT / "docs" / "diagnosis.md").read_text(encoding="utf-8")
    assert generate.diagnosis_with_table(diagnosis) == diagnosis, "run `make docs`"
    assert all(f"| `{name}` |" in generate.reference() for name in pass_names())
    assert all(f"| `{rule.name}` |" in diagnosis for rule in RULES)


def test_the_benchmarks_page_links_to_every_table():
    page = ROOT / "docs" / "benchmarks.md"
    links = re.findall(r"\]\((\.\./benchmarks/results/[^)]+)\)", page.read_text(encoding="utf-8"))
    tables = {table.name for table in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {Path(link).name for link in links} == tables


def test_the_page_of_errors_has_every_error_and_exit_code():
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = {int(code): row for code, row in re.findall(r"^\| (\d+) (\|.+)$", page, re.MULTILINE)}
    homes = (optimize_export.errors, passes.errors, exporters.errors)
    classes = [
        each for home in homes for each in vars(home).values() if getattr(each, "__module__", "") == home.__name__
    ]
    found = [each for each in classes if isinstance(each, type) and issubclass(each, Exception)]
    assert [each.__name__ for each in found if f"`{each.__name__}`" not in page] == []
    coded = {each: each.exit_code for each in found if hasattr(each, "exit_code")}
    assert set(rows) == {*coded.values(), 0, 130}
    assert [each.__name__ for each, code in coded.items() if f"`{each.__name__}`" not in rows[code]] == []


def test_the_options_page_has_every_option_and_argument():
    page = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    options = {option.long for command in COMMANDS.values() for option in command.options}
    assert {"--weights", "--row-independence", "--expect"} <= options
    assert [option for option in sorted(options) if not re.search(rf"{option}\b", page)] == []
    functions = (optimize, export, check_parity, diagnose, profile, tune_training, verify_bundle, rejudge_bundle)
    arguments = {name for function in functions for name in inspect.signature(function).parameters}
    assert [name for name in sorted(arguments) if not re.search(rf"\b{name}\b", page)] == []


def test_the_readme_names_its_two_commands():
    readme, makefile = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "Makefile"))
    for target in ("demo", "test", "check", "zoo", "bench", "docs"):
        assert f"make {target}" in readme
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


def test_links_of_the_documentation_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for file, section in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            target = page.parent / file if file else page
            assert target.exists(), f"{page.name} links to {file}"
            assert not section or section in _sections(target), f"{page.name} links to {file}#{section}"


def test_the_files_that_the_architecture_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"\b[a-z_]+(?:/[a-z_]+)*/[a-z_]+\.py\b", page)
    assert len(names) > 15
    assert [name for name in names if not any((ROOT / home / name).is_file() for home in (".", "optimizer"))] == []


def _sections(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


class Scaled(torch.nn.Module):
    """Two layers, each with a product after it: by one number per channel, and by one number for all channels."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 4, 3, bias=False)
        self.scale = torch.nn.Parameter(torch.randn(4, 1, 1))
        self.fc = torch.nn.Linear(4, 5)
        self.gain = torch.nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return self.fc((self.conv(x) * self.scale).mean((2, 3))) * self.gain


def test_the_fold_of_the_guide_folds_and_a_mistake_in_it_is_found(tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "own-passes.md").read_text(encoding="utf-8")
    (source,) = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "Layers(graph)" in block]
    file = tmp_path / "pass_of_the_guide.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, example)
    spec.loader.exec_module(example)
    model, x = Scaled().eval(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, [example.FoldScale()], example_inputs=(x,))
    (record,) = fast.report.passes
    assert (record.status, len(record.changes)) == ("applied", 2)
    torch.testing.assert_close(fast(x), model(x))
    right = example.float64
    monkeypatch.setattr(example, "float64", lambda tensor: right(tensor) * 1.01)
    (record,) = optimize(model, [example.FoldScale()], example_inputs=(x,)).report.passes
    assert record.status == "rolled-back"


def _texts(source: str) -> list[str]:
    """All texts in a Python file, joined where they are written in parts; … for each value in an f-string."""
    found, parts = [], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts.update(map(id, node.values))
            found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
            found.append(node.value)
    return found


def _is_said(sentence: str, texts: list[str]) -> bool:
    pattern = re.compile(".*".join(map(re.escape, sentence.strip("… ").split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_the_sentences_of_the_troubleshooting_page_are_those_of_the_program():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sentences = re.findall(r"^### (.+)$", page, re.MULTILINE)
    files = [
        file
        for package in ("optimize_export", "optimizer", "passes", "exporters")
        for file in (ROOT / package).rglob("*.py")
    ]
    texts = [text for file in files for text in _texts(file.read_text(encoding="utf-8")) if " " in text]
    assert len(sentences) > 20
    assert [sentence for sentence in sentences if not _is_said(sentence, texts)] == []


def test_a_sentence_that_the_program_no_longer_says_is_found():
    texts = _texts('raise Error(f"{name} is a folder; " "use a file in it.")')
    assert texts == ["… is a folder; use a file in it."]
    assert _is_said("… is a folder; use …", texts)
    assert not _is_said("… is a folder: use …", texts)


def _how_to_blocks() -> list:
    """Each Python block of a how-to page, without its indentation."""
    pattern = re.compile(r"^( *)```python\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
    return [
        pytest.param(page.name, textwrap.dedent(block), id=f"{page.stem}-{number}")
        for page in sorted((ROOT / "docs" / "how-to").glob("*.md"))
        for number, (_, block) in enumerate(pattern.findall(page.read_text(encoding="utf-8")), 1)
    ]


class Tagger(nn.Module):
    """Tokens and their mask, as a BERT takes them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, input_ids, attention_mask):
        return self.head(self.embedding(input_ids) * attention_mask[..., None])


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(scope="module")
def with_bundle(tmp_path_factory) -> tuple[Path, nn.Module, torch.Tensor]:
    """A folder that has dist/net, its model, and an input."""
    folder, x = tmp_path_factory.mktemp("how_to"), torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    export(
        model, example_inputs=(x,), output=folder / "dist/net", formats=("torchscript",), effort="quick", bench=False
    )
    return folder, model, x


@pytest.mark.parametrize(("page", "block"), _how_to_blocks())
def test_the_blocks_of_the_how_to_pages_run(page, block, with_bundle, monkeypatch):
    """With the names that the page says are the reader's own. Without a GPU, a block for one runs on the CPU."""
    folder, model, x = with_bundle
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OPTIMIZE_EXPORT_NO_BENCH", "1")
    names = {"x": x, "model": model}
    if page == "dynamic-shapes.md":
        tokens = torch.randint(0, 30, (2, 6))
        names = {"inputs": {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}}
        names["fast"] = optimize(Tagger().eval(), example_kwargs=names["inputs"])
    if page == "gpu.md" and not torch.cuda.is_available():
        # Compiling on a CPU takes long, and has tests of its own.
        block = block.replace(".cuda()", "").replace('"cuda"', '"cpu"').replace('    "torch-compile",\n', "")
    if page == "training-speed.md":
        block = block.replace("tune_seconds=60", "tune_seconds=1")
        labels = torch.zeros(2, 4, 6, 6).softmax(1)
        names |= {"loader": [(x, labels)], "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    if page == "fsdp2.md":
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        mesh = distributed.init_device_mesh("cpu", (1,))
        names = {"build": Blocks, "x": torch.randn(4, 8), "device": torch.device("cpu"), "mesh": mesh}
    try:
        exec(compile(block, page, "exec"), names)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    if "load" in names:
        torch.testing.assert_close(names["y"], model(x), atol=1e-4, rtol=1e-4)
    elif page == "dynamic-shapes.md":
        assert (folder / "dist/bert/manifest.json").is_file()
    elif page == "training-speed.md":
        assert (folder / "tuned/training.toml").is_file()
    elif "InHalf" in names:
        y = names["InHalf"](model)(x.half())
        assert y.dtype == torch.float16
        torch.testing.assert_close(y.float(), model(x), atol=1e-2, rtol=1e-2)
    elif page == "gpu.md":
        statuses = {record.name: record.status for record in names["fast"].report.passes}
        assert statuses["cast-precision"] == "applied"
    else:
        assert all(isinstance(layer, distributed.fsdp.FSDPModule) for layer in names["fast"].layers)


def test_the_snippets_of_the_build_page_are_those_of_the_recipes():
    page = (ROOT / "docs" / "build.md").read_text(encoding="utf-8")
    (workflow,), (service,) = (re.findall(rf"```{name}\n(.*?)```", page, re.DOTALL) for name in ("yaml", "python"))
    recipes = ROOT / "examples" / "recipes"
    steps = re.findall(r"(?:uses|run): .+", workflow)
    assert len(steps) == 5
    assert [step for step in steps if step not in (recipes / "github-actions.yml").read_text(encoding="utf-8")] == []
    assert service in (recipes / "serve.py").read_text(encoding="utf-8")
