"""What a GPU's driver says of itself: `conditions`, against a library with NVML's functions.

The library is compiled here and answers in NVML's types and units (NVIDIA's nvml.h): milliwatts,
millijoules, MHz, unsigned int or unsigned long long. A run on a CPU asks nobody.
"""
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NVML = r"""
#include <string.h>
static int card;
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **h) {
    if (strcmp(uuid, "GPU-1234")) return 6;                       /* not found */
    *h = &card;
    return 0;
}
#define ASK(name, type, answer) int nvmlDeviceGet##name(void *h, type *v) { \
    if (h != &card) return 2; *v = answer; return 0; }
#define ASK_WHICH(name, answer) int nvmlDeviceGet##name(void *h, int which, unsigned *v) { \
    if (h != &card) return 2; *v = answer; return 0; }
ASK(EnforcedPowerLimit, unsigned, 700000)
int nvmlDeviceGetPowerUsage(void *h, unsigned *v) { *v = 1; return 3; }       /* not supported */
ASK(TotalEnergyConsumption, unsigned long long, 9876543210123ULL)
ASK_WHICH(Temperature, which == 0 ? 66 : 0)
ASK_WHICH(ClockInfo, which == 1 ? 1980 : which == 2 ? 3201 : 0)
#ifdef NEW
ASK(CurrentClocksThrottleReasons, unsigned long long, 0x44)
#endif
"""
ASK = """
import json, sys, types, torch
sys.path.insert(0, sys.argv[1])
import train_gpt
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=sys.argv[2])
print(json.dumps(train_gpt.conditions(torch.device("cuda", 0))))
"""


def ask(folder: Path, *flags: str, uuid: str = "1234") -> dict:
    """The answer in a process that finds this library as the driver's."""
    if not shutil.which("gcc"):
        pytest.skip("no gcc")
    (folder / "nvml.c").write_text(NVML)
    subprocess.run(["gcc", "-shared", "-fPIC", *(flags or ("-DINIT=0", "-DNEW")), "-o",
                    folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    done = subprocess.run([sys.executable, "-c", ASK, ROOT, uuid], text=True, check=True,
                          capture_output=True, env=os.environ | {"LD_LIBRARY_PATH": str(folder)})
    return json.loads(done.stdout)


def test_answers_with_their_units(tmp_path):
    """What is not supported is left out; the value before does not shine through."""
    assert ask(tmp_path) == {
        "power_limit_w": 700, "energy_j": 9876543210.123, "temperature_c": 66, "sm_mhz": 1980,
        "memory_mhz": 3201, "throttle_reasons": 0x44}


@pytest.mark.parametrize(("flags", "uuid"), [(("-DINIT=9", "-DNEW"), "1234"), ((), "5678")],
                         ids=["no driver", "another card"])
def test_without_an_answer_there_is_none(tmp_path, flags, uuid):
    assert ask(tmp_path, *flags, uuid=uuid) == {}


def test_a_library_that_lacks_a_question(tmp_path):
    assert set(ask(tmp_path, "-DINIT=0")) >= {"energy_j", "sm_mhz"}


@pytest.mark.pretended_gpu
def test_the_pretended_gpu_says_nothing():
    import torch

    import train_gpt

    assert train_gpt.conditions(torch.device("cuda", 0)) == {}


@pytest.mark.gpu
def test_a_real_gpu_says_its_temperature_and_energy():
    import torch

    import train_gpt

    found = train_gpt.conditions(torch.device("cuda", 0))
    assert 10 < found["temperature_c"] < 110 and found["power_limit_w"] > 30
    assert found["energy_j"] > 0 and found["sm_mhz"] > 100
