"""A fork waits for another thread's work, so that the child inherits none of its settings and can work itself."""

import subprocess
import sys
import textwrap

import pytest

PROGRAM = """
import gc, os, signal, sys, threading
import torch
from torch import nn
import optimizer.model.settings
from optimizer import check_parity, export, optimize

optimizer.model.settings._LONGEST_WAIT = float(sys.argv[2])
inside, forked = threading.Event(), threading.Event()

class Slow(nn.Linear):
    def forward(self, x):
        inside.set()
        forked.wait(float(sys.argv[3]))
        return super().forward(x)

x, model = torch.ones(2, 3) / 3, Slow(3, 3)

def settings():
    return nn.Module.__call__, nn.SyncBatchNorm.forward, len, gc.get_threshold(), model.training

def work():
    if sys.argv[1] == "optimize":
        optimize(model, ["jit-fusion"], example_inputs=(x,))
    else:
        export(model, example_inputs=(x,), output="net", formats=("torchscript",), batch_sizes=(2,))

before = settings()
thread = threading.Thread(target=work)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(240)  # a child that hangs is killed
    if sys.argv[2] != "0":
        assert settings() == before
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    image = torch.ones(2, 3, 4, 4) / 3
    fast = optimize(net, ["fold-conv-bn"], example_inputs=(image,))
    # After no wait, the child inherits that the other thread ran its model without torch.compile.
    applied = fast.report.passes[0].status == "applied" or sys.argv[2] == "0"
    ok = applied and check_parity(net, fast, (image,)).ok
    os._exit(7 if ok else 1)
forked.set()
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
assert settings() == before
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "longest_wait", "forward_waits"),
    [("export", 600, 0.02), ("optimize", 0, 60)],
)
def test_a_child_forked_during_the_work_of_another_thread(work, longest_wait, forward_waits, tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, script, work, str(longest_wait), str(forward_waits)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr


@pytest.mark.slow
def test_a_forward_that_forks_goes_on_in_both_processes(tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(
        textwrap.dedent("""
            import os
            import torch
            from optimizer import optimize

            codes = []
            class Forking(torch.nn.Linear):
                def forward(self, x):
                    child = os.fork()
                    if child == 0:
                        super().forward(x)
                        os._exit(0)
                    codes.append(os.waitpid(child, 0)[1])
                    return super().forward(x)

            fast = optimize(Forking(3, 3), ["jit-fusion"], example_inputs=(torch.ones(2, 3) / 3,))
            assert fast.report.verified and codes and not any(codes), codes
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_child_that_a_forward_makes_while_passes_are_tried_ends_there(tmp_path):
    script = tmp_path / "forking.py"
    script.write_text(
        textwrap.dedent("""
        import os
        import torch
        from torch import nn
        from optimizer import optimize

        class Forking(nn.Linear):
            def forward(self, x):
                if (child := os.fork()) == 0:
                    os._exit(0)
                os.waitpid(child, 0)
                return super().forward(x)

        optimize(Forking(3, 3).eval(), ["fold-conv-bn"], example_inputs=(torch.randn(4, 3),))
        os.write(1, b"back\\n")
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "back\n", done.stderr
