"""The Triton kernels: what they compute, in Triton's interpreter, and what their binaries need, by
compiling them ahead of time. tests/pretended_gpu launches them at full size."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton has no wheel for this platform")

from tools import kernels  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent


def test_what_the_kernels_compute():
    """check_kernels.py, in a process of its own, as the interpreter replaces the compiler."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "check_kernels.py"],
        cwd=ROOT / "tests", capture_output=True, text=True, timeout=500,
        env=dict(os.environ, PYTHONPATH=f"{ROOT}{os.pathsep}{ROOT / 'tests'}"))
    assert done.returncode == 0, done.stdout[-6000:]
    assert int(done.stdout.split(" passed")[0].split()[-1]) > 40


@pytest.fixture(scope="module")
def table() -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, ROOT / "tools" / "kernels.py"], capture_output=True,
                          text=True, timeout=500)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def test_every_launch_keeps_the_rules_on_every_architecture(table):
    code, lines = table
    assert code == 0 and lines[-1] == "every row keeps the rules", "\n".join(lines)
    rows = [line.split() for line in lines[1:-1]]
    launches = {f"sm_{a}": [row for row in rows if row[0] == f"sm_{a}"] for a in kernels.SHARED}
    for architecture in ("sm_80", "sm_86"):  # no FP8 there
        assert len(launches[architecture]) == 4
        assert not any("fp8" in word for row in launches[architecture] for word in row)
    for architecture in ("sm_89", "sm_90", "sm_100", "sm_120"):
        assert len(launches[architecture]) == 8
        products = [row for row in launches[architecture] if row[1] == "product"]
        assert sum("e4m3" in row[-1] or "f8f6f4" in row[-1] for row in products) == 3
    unit = dict(sm_80="mma.m16", sm_86="mma.m16", sm_89="mma.m16", sm_90="wgmma", sm_100="tcgen05",
                sm_120="mma.m16")
    for row in rows:
        if row[1] == "product":
            assert row[-1].startswith(unit[row[0]])


@pytest.mark.parametrize("breaks", ["shared", "instruction", "compile"])
def test_a_row_that_breaks_a_rule_is_found(monkeypatch, breaks):
    launch = next(one for one in kernels.launches() if dict(one.constants).get("MIRROR"))
    architecture = 80
    if breaks == "shared":
        monkeypatch.setitem(kernels.SHARED, 80, 65535)
    elif breaks == "instruction":
        monkeypatch.setattr(kernels, "wanted", lambda launch, architecture: "wgmma")
    else:                                    # FP8 below 8.9
        launch = next(one for one in kernels.launches() if "fp8" in str(one.types))
    line, broken = kernels.row(launch, architecture)
    assert line.startswith("sm_80") and len(broken) == 1
    expected = dict(shared="65536 bytes of shared memory, limit 65535",
                    instruction="no instruction like wgmma", compile="does not compile")
    assert expected[breaks] in broken[0]


def test_floor_of_the_head(capsys):
    assert kernels.main(["--floor"]) == 0
    text = capsys.readouterr().out
    assert text.count("3,798") == 6          # 2 x 49,152 x 50,304 x 768, three products, twice
    assert "H200" in text and "RTX 4070" in text
