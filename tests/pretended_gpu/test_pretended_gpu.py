"""The pretended device does what tests/pretended_gpu/README.md says: other tests stand on it."""
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.pretended_gpu

CARD_4070 = {"PRETEND_NAME": "NVIDIA GeForce RTX 4070", "PRETEND_CC": "89", "PRETEND_GIB": "12",
             "PRETEND_SMS": "46", "PRETEND_SMEM": "101376", "PRETEND_THREADS": "1536"}

SHOW = """
import torch
p = torch.cuda.get_device_properties(0)
print(p.name, p.major, p.minor, p.total_memory >> 30, p.multi_processor_count)
held = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(11)]
print(torch.cuda.max_memory_allocated() >> 30)
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError as e:
    print("out of memory:", "CUDA out of memory. Tried to allocate 1024.00 MiB" in str(e))
"""

# 256 x 128 and 128 x 256 bf16 tiles need 131,072 bytes of shared memory in one block
TILE = """
import sys, torch, triton, triton.language as tl
@triton.jit
def tile(A, B, C):
    m, k = tl.arange(0, 256), tl.arange(0, 128)
    a, b = tl.load(A + m[:, None] * 128 + k), tl.load(B + k[:, None] * 256 + m)
    tl.store(C + m[:, None] * 256 + m, tl.dot(a, b))
a = torch.empty(256, 128, dtype=torch.bfloat16, device="cuda")
b = torch.empty(128, 256, dtype=torch.bfloat16, device="cuda")
try:
    tile[(1,)](a, b, torch.empty(256, 256, device="cuda"), num_warps=8)
    print("launched")
except triton.runtime.errors.OutOfResources as e:
    print(e)
"""


def on_card(tmp_path, program, card=()) -> list[str]:
    """Lines that the program prints on that card."""
    path = tmp_path / "program.py"  # Triton reads a kernel's source from its file
    path.write_text(program)
    done = subprocess.run([sys.executable, path], env=os.environ | dict(card), text=True,
                          capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_card_and_its_memory_limit(tmp_path):
    assert on_card(tmp_path, SHOW, CARD_4070) == [
        "Pretended NVIDIA GeForce RTX 4070 8 9 12 46", "11", "out of memory: True"]


def test_memory_of_other_processes(tmp_path):
    with pytest.raises(AssertionError, match="out of memory"):  # 11 GiB no longer fit
        on_card(tmp_path, SHOW, CARD_4070 | {"PRETEND_TAKEN_MIB": "3000"})


def test_triton_keeps_to_the_shared_memory_of_the_card(tmp_path):
    (line,) = on_card(tmp_path, TILE, CARD_4070)
    assert "shared memory" in line and "101376" in line
    assert on_card(tmp_path, TILE) == ["launched"]  # 232,448 bytes on the default card


def test_compiled_training_step():
    import torch
    from torch._dynamo.utils import counters
    assert torch.cuda.get_device_name(0).startswith("Pretended")
    counters.clear()
    weight = torch.zeros(64, 64, device="cuda", requires_grad=True)

    @torch.compile(fullgraph=True)
    def loss(x):
        return (torch.nn.functional.relu(x @ weight) ** 2).mean()

    for _ in range(2):
        loss(torch.ones(128, 64, device="cuda")).backward()
    assert weight.grad.shape == (64, 64) and weight.grad.is_cuda
    assert counters["stats"]["unique_graphs"] == 1
