"""What all tests share: the project on sys.path, the markers, the folder of larger test data."""
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

MARKERS = {
    "gpu": "needs a real CUDA device",
    "pretended_gpu": "needs the CUDA build of torch on a pretended device (tests/pretended_gpu)",
    "slow": "takes more than half a minute (leave these out with -m 'not slow')",
}


def pytest_configure(config):
    for name, meaning in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def cuda_device() -> str:
    """Name of CUDA device 0, "" where there is none."""
    try:
        import torch
    except ImportError:
        return ""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else ""


def pytest_collection_modifyitems(items):
    marked = [item for item in items
              if item.get_closest_marker("gpu") or item.get_closest_marker("pretended_gpu")]
    if not marked:
        return
    device = cuda_device()
    pretended = device.startswith("Pretended")
    for item in marked:
        if item.get_closest_marker("gpu") and (not device or pretended):
            item.add_marker(pytest.mark.skip(reason="no real CUDA device here"))
        if item.get_closest_marker("pretended_gpu") and not pretended:
            item.add_marker(pytest.mark.skip(
                reason="no pretended CUDA device here: see tests/pretended_gpu/README.md"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """A folder of larger test data: beside the project's, or SHARED_DATA. Skips without it."""
    folder = Path(os.environ.get("SHARED_DATA", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no larger test data here ({folder.name}/ beside the project, or SHARED_DATA)")
    return folder
