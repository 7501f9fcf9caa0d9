import pytest
import torch

from optimize_export.gpu_settings import GpuSettings

SETTINGS = [GpuSettings(matmul, cudnn, not matmul) for matmul in (False, True) for cudnn in (False, True)]


@pytest.fixture(autouse=True)
def _restored():
    before = GpuSettings.now()
    yield
    # Through the attributes, which all other code can read.
    torch.backends.cuda.matmul.allow_tf32 = before.matmul
    torch.backends.cudnn.allow_tf32 = before.cudnn
    torch.backends.cudnn.benchmark = before.benchmark


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_settings_are_put_in_force_and_those_made_through_the_precision_read(settings):
    settings.put_in_force()
    assert GpuSettings.now() == settings
    assert torch.backends.cuda.matmul.allow_tf32 == settings.matmul
    assert torch.backends.cudnn.allow_tf32 == settings.cudnn
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    now = GpuSettings.now()
    assert (now.matmul, now.cudnn) == (True, False)
    settings.put_in_force()
    assert GpuSettings.now() == settings


def test_settings_in_force_are_not_made_again():
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    GpuSettings.now().put_in_force()
    with pytest.raises(RuntimeError):
        _ = torch.backends.cuda.matmul.allow_tf32
