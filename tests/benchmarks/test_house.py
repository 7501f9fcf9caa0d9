"""The benchmark that counts what a person reads to follow one call."""

import ast

from benchmark_runs import imported, written


def test_counts_the_files_of_both_calls_and_the_lines_of_the_product(tmp_path):
    found, markdown, _ = written("house", tmp_path, timeout=600)
    optimizing, exporting = found["calls"]
    assert {"optimizer/api.py", "passes/fold_conv_bn.py"} <= set(optimizing["files"])
    assert {"optimizer/api.py", "exporters/onnx.py"} <= set(exporting["files"])
    assert not any(file.endswith("__init__.py") for file in optimizing["files"])
    assert all(call["functions"] > len(call["files"]) and call["changes"] > 0 for call in found["calls"])
    folders = {each["folder"]: each["lines"] for each in found["folders"]}
    assert folders["passes"] > 1000
    assert optimizing["lines"] < sum(folders.values())
    assert "| optimize, preset |" in markdown


def test_counts_importers_by_module_and_by_name():
    with imported("house") as house:
        tree = ast.parse("import passes.base\nfrom passes import errors\nfrom optimizer.api import optimize\n")
        assert list(house.imported_names(tree)) == ["passes.base", "passes.errors", "optimizer.api.optimize"]
        single = {each["file"]: each["importer"] for each in house.with_one_importer(house.product())}
        assert "passes/base.py" not in single
        assert all(file != importer for file, importer in single.items())


def test_misses_tells_a_call_that_enters_more_files_than_it_may():
    with imported("house") as house:
        call = {"call": "optimize, preset", "files": ["a.py", "b.py"], "goal": 2}
        assert house.misses([call]) == []
        (missed,) = house.misses([{**call, "goal": 1}])
        assert "2 files" in missed
