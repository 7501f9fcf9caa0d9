"""A fork waits for another thread's work, so that the child inherits none of its settings and can work itself."""

import subprocess
import sys

import pytest

PROGRAM = """
import gc, os, signal, threading, time
import torch
from torch import nn
from optimizer import check_parity, optimize

inside = threading.Event()

class Slow(nn.Linear):
    def forward(self, x):
        inside.set()
        time.sleep(0.02)
        return super().forward(x)

def settings():
    return nn.Module.__call__, nn.SyncBatchNorm.forward, gc.get_threshold(), torch.backends.mha.get_fastpath_enabled()

def work():
    optimize(Slow(3, 3), ["jit-fusion"], example_inputs=(torch.ones(2, 3) / 3,))

before = settings()
thread = threading.Thread(target=work)
thread.start()
inside.wait()
child = os.fork()
if child == 0:
    signal.alarm(240)  # a child that hangs is killed
    assert settings() == before
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    image = torch.ones(2, 3, 4, 4) / 3
    fast = optimize(net, ["fold-conv-bn"], example_inputs=(image,))
    os._exit(7 if check_parity(net, fast, (image,)).ok else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
thread.join()
raise SystemExit(code)
"""


@pytest.mark.slow
def test_a_child_forked_during_the_work_of_another_thread(tmp_path):
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 7, done.stderr
