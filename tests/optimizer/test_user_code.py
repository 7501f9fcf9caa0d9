"""A user's folder may contain modules with the names of our packages."""

import inspect
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from optimize_export.errors import LoadError
from optimizer.command.engine import check_runs
from optimizer.command.loading import load
from optimizer.command.user_code import names_restored, put_first

ROOT = Path(sys.modules["optimizer.command.user_code"].__file__).parent.parent.parent


def test_the_users_modules_of_our_names_are_found_by_the_users_code(write, tmp_path):
    import optimize_export.errors
    import optimizer
    import passes
    import passes.errors

    write("WIDTH = 5", "optimizer.py", net=False, inputs=False)
    write("", "passes/__init__.py", net=False, inputs=False)
    write("SCALE = 3.0", "passes/errors.py", net=False, inputs=False)
    write("SHIFT = 1.0", "exporters/shift.py", net=False, inputs=False)
    path = write(
        """
        from optimizer import WIDTH
        from passes.errors import SCALE

        class Late(Net):
            def forward(self, x):
                from exporters import shift
                import passes.errors
                return super().forward(x) * passes.errors.SCALE + shift.SHIFT
        def build_model(): return Late(WIDTH)
        """
    )
    with names_restored():
        loaded = load(str(path))
        assert loaded.model.linear.out_features == 5
        check_runs(loaded)
        output = loaded.model(torch.zeros(1, 4))
        assert torch.allclose(output, loaded.model.linear.bias * 3 + 1)
        assert sys.modules["optimize_export.errors"] is optimize_export.errors
    assert sys.modules["optimizer"] is optimizer
    assert sys.modules["passes"] is passes
    assert sys.modules["passes.errors"] is passes.errors
    assert "exporters.shift" not in sys.modules
    assert str(tmp_path) not in sys.path


def test_a_folder_of_the_users_in_place_of_a_package_has_no_file(write):
    import passes

    inspect.getmodule(inspect.currentframe())  # `inspect` caches the file of each module, including ours
    write("SCALE = 3.0", "passes/mine.py", net=False, inputs=False)
    loaded = load(str(write("import passes.mine\nmodel = Net()")))
    assert sys.modules["passes"] is not passes
    assert inspect.getmodule(type(loaded.model).forward) is not None  # asks each module for its file


def test_a_model_file_called_optimizer(write):
    import optimizer

    loaded = load(str(write("", "optimizer.py")))
    assert type(loaded.model).__module__ == "optimizer"
    assert sys.modules["optimizer"] is not optimizer


def test_our_names_stay_ours_where_the_user_has_none(write, tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "step_100.pt").write_bytes(b"")
    load(str(write("from optimize_export.errors import LoadError\nfrom passes.errors import PassesError")))
    assert sys.modules["model"].LoadError is LoadError


@pytest.mark.usefixtures("write")
def test_our_own_folder_claims_nothing():
    import optimizer

    put_first(ROOT)
    assert sys.modules["optimizer"] is optimizer


def test_what_the_users_code_imported_is_taken_back_and_nothing_else(write, tmp_path):
    write("", "own_sibling.py", net=False, inputs=False)
    with names_restored():
        load(str(write("import own_sibling\nimport colorsys")))
        assert "own_sibling" in sys.modules
    assert "own_sibling" not in sys.modules
    assert "model" not in sys.modules
    assert "colorsys" in sys.modules


@pytest.mark.slow
def test_the_program_finds_its_own_packages_wherever_it_is_started(write, tmp_path):
    names = ("passes", "exporters")
    for name in names:
        theirs = "raise AssertionError('a module of the user was imported')"
        write(theirs, f"{name}/__init__.py", net=False, inputs=False)
    code = (
        "from optimizer.command.user_code import import_own_packages\nimport_own_packages()\n"
        "import passes.errors, exporters.errors\nprint(passes.errors.__file__, exporters.errors.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.stdout.split() == [str(ROOT / name / "errors.py") for name in names], done.stderr


@pytest.mark.slow
def test_the_installed_command_starts_where_the_path_holds_an_optimizer_that_the_users_model_imports(write, tmp_path):
    write("WIDTH = 3", "optimizer.py", net=False, inputs=False)
    # A spawned child process runs the script again, under another module name.
    uses = """
        import multiprocessing
        import optimizer

        def tell(queue):
            queue.put(optimizer.WIDTH)
        def build_model():
            context = multiprocessing.get_context("spawn")
            queue = context.Queue()
            child = context.Process(target=tell, args=(queue,))
            child.start()
            model = Net(queue.get())
            child.join()
            assert child.exitcode == 0
            return model
        """
    write(uses, "nets/own.py")
    with (ROOT / "pyproject.toml").open("rb") as file:
        module, _, function = tomllib.load(file)["project"]["scripts"]["optimize-export"].partition(":")
    script = tmp_path / "bin" / "optimize-export"
    script.parent.mkdir()
    script.write_text(
        f"import sys\nfrom {module} import {function}\nif __name__ == '__main__':\n    sys.exit({function}())\n"
    )
    done = subprocess.run(
        [sys.executable, script, "nets/own.py", "--formats", "torchscript", "--quiet"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((".", str(ROOT)))},
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{Path('dist/own')}\n", "")
