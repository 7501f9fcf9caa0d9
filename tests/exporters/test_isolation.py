import logging
import random
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from exporters.isolation import silent, undisturbed


class Careless(nn.Module):
    """Changes its attributes, containers, child, mode, hooks and all random states."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3)
        self.cache = {"old": 1}
        self.seen = []

    def forward(self, x):
        self.cache["new"] = x
        self.seen.append(x)
        self.last = x
        self.bn.momentum = 0.5
        self.eval()
        self.register_forward_hook(lambda *_: None)
        torch.rand(1), random.random(), np.random.rand()
        return x


def test_nothing_of_a_careless_forward_stays():
    model = Careless().train()
    cache, seen = model.cache, model.seen
    keys = list(vars(model))
    torch_state, python_state, numpy_state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with undisturbed(model):
        assert not torch.is_grad_enabled()
        assert not torch.backends.mha.get_fastpath_enabled()
        model.bn(torch.randn(4, 3))
        model(torch.randn(4, 3))
        assert model.seen
    assert torch.is_grad_enabled()
    assert torch.backends.mha.get_fastpath_enabled()
    assert list(vars(model)) == keys
    assert (model.cache is cache, cache) == (True, {"old": 1})
    assert (model.seen is seen, seen) == (True, [])
    assert model.training
    assert model.bn.training
    assert model.bn.momentum == 0.1
    assert not model._forward_hooks
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert (np.random.get_state()[1] == numpy_state).all()


def test_settings_return_after_an_error_and_as_they_were():
    # Untouched buffers aren't written.
    model = nn.BatchNorm1d(3).eval()
    version = model.running_mean._version
    with undisturbed(model):
        model(torch.randn(2, 3))
    assert model.running_mean._version == version
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with pytest.raises(KeyboardInterrupt), undisturbed(nn.Linear(1, 1)):
            raise KeyboardInterrupt
        assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.is_grad_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_silence(capfd):
    stream = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("torch.onnx")
    logger.addHandler(stream)
    try:
        with silent():
            print("hello")
            logger.error("hello")
            warnings.warn("hello", stacklevel=1)
            print("hello", file=sys.stderr)
            assert capfd.readouterr() == ("", "")
            # Other threads are heard.
            thread = threading.Thread(target=lambda: print("progress", file=sys.stderr))
            thread.start()
            thread.join()
            assert capfd.readouterr().err == "progress\n"
        logger.error("after")
        # From torch 2.14 on, the logger has a handler of its own too.
        assert "after" in capfd.readouterr().err.splitlines()
    finally:
        logger.removeHandler(stream)
    with pytest.warns(UserWarning, match="after"):
        warnings.warn("after", stacklevel=1)
