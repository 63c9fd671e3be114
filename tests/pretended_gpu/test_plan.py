"""The memory plan against the real caching allocator, and the way back when memory runs out."""
import json
import os
import re
import subprocess
import sys

import pytest
from test_head_launches import CARDS
from test_walk import gpt2_shards

# slow: full size is compiled for each card, minutes from an empty cache
pytestmark = [pytest.mark.pretended_gpu, pytest.mark.slow]

# argv: root, MiB that are gone during the first validation, settings. What another process takes
# (PRETEND_TAKEN_MIB) is hidden from the plan: it was right when it was made.
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
import torch, train_gpt as t
ask, taken = torch.cuda.mem_get_info, int(os.environ["PRETEND_TAKEN_MIB"]) << 20
torch.cuda.mem_get_info = lambda device=None: (ask(device)[0] + taken, ask(device)[1])
validate = t.Run.validate
def poorer(run, step):
    torch.cuda.empty_cache()
    gone = torch.empty((step == 0) * int(sys.argv[2]) << 20, dtype=torch.uint8, device="cuda")
    loss = validate(run, step)
    print("validated", step, run.machine.val_piece)
    return loss
t.Run.validate = poorer
code = t.main(sys.argv[3:])
print("reserved", torch.cuda.max_memory_reserved() >> 20)
sys.exit(code)
"""


def train(card: str, tmp_path, root, taken: int = 0, later: int = 0, **settings) -> tuple:
    """Events by name, the text log, and what the program printed."""
    cc, gib, sms, shared, threads = CARDS[card]
    facts = dict(PRETEND_NAME=f"NVIDIA {'GeForce ' * card.startswith('RTX')}{card}", PRETEND_CC=cc,
                 PRETEND_GIB=gib, PRETEND_SMS=sms, PRETEND_SMEM=shared, PRETEND_THREADS=threads,
                 PRETEND_TAKEN_MIB=taken)
    gpt2_shards(root / "data" / "tiny", tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)
    settings = dict(track="fineweb", data_dir=tmp_path, records_dir=tmp_path / "records", steps=3,
                    extra_steps=0, tokens_per_step=98304, val_tokens=177071, checkpoint=False,
                    attention="varlen_attn") | settings
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", root, str(later),
         *(f"--{n}={v}" for n, v in settings.items())],
        env=os.environ | {n: str(v) for n, v in facts.items()}, text=True, capture_output=True,
        timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    (log,) = (tmp_path / "records").glob("*/*.jsonl")
    events = {e["event"]: e for e in map(json.loads, log.read_text().splitlines())}
    assert events["end"]["status"] == "complete"
    return events, log.with_suffix(".txt").read_text(), done.stdout


@pytest.mark.parametrize("card", CARDS)
def test_every_card_ends_well_and_the_plan_holds(card, tmp_path, root):
    """Compiled, at full size, validation included: within 10 % of what the allocator reserves."""
    head = "fp8-torch" if CARDS[card][0] >= 89 else "bf16"
    events, text, printed = train(card, tmp_path, root, head=head)
    reserved = int(re.search(r"reserved (\d+)", printed)[1])
    planned = int(re.search(r"in all ([\d,]+) of", text)[1].replace(",", ""))
    assert abs(planned / reserved - 1) < 0.1, (planned, reserved)
    assert events["end"]["recompiles"] == 0 and "out of memory" not in text
    assert events["warmup"]["recompute"] == ("blocks" if card == "RTX 4060" else "off")


# two blocks of full width: back-off is the same, compilation short
SHALLOW = dict(layers=2, no_attention="()", long_window="(2,)", value_layers="((1,0),)", skips="()",
               windows="(3,)", steps=1, head="bf16", micro_batch=3)


def test_memory_that_another_process_took_makes_warm_up_smaller(tmp_path, root):
    """Without recomputation it does not fit; light recomputation does, once compiled anew."""
    events, _, _ = train("RTX 3060", tmp_path, root, taken=6156, **SHALLOW)
    warmup = events["warmup"]
    assert (warmup["micro_batch_units"], warmup["recompute"]) == (3, "light")
    assert [line[:30] for line in warmup["tried"]] == ["out of memory, so memory plan,"]
    assert warmup["restored"] and events["end"]["recompiles"] == 0


def test_memory_that_is_gone_in_validation_makes_its_pieces_smaller(tmp_path, root):
    """Training is not compiled again, only validation is, and that the clock does not see."""
    events, _, printed = train("RTX 3060", tmp_path, root, later=9676, **SHALLOW)
    assert events["warmup"]["val_piece"] == 65536 and events["warmup"]["tried"] == []
    assert "validated 0 32768" in printed and "validated 1 32768" in printed
    assert events["end"]["recompiles"] == 2  # forward without gradients, at two stages


@pytest.mark.parametrize("attention", ["flex", "auto"])
def test_other_attention_ends_well_too(attention, tmp_path, root):
    """FlexAttention's masks are new tensors at every micro-batch and stage: nothing compiles anew.
    Where all is tried, so are two micro-batches."""
    more = dict(SHALLOW, attention=attention, windows="(3,7,11)", steps=3)
    if attention == "auto":
        more["micro_batch"] = "auto"
    events, _, _ = train("RTX 4070", tmp_path, root, **more)
    assert events["end"]["recompiles"] == 0
    tried = [line.split(":")[0] for line in events["warmup"]["tried"]]
    assert tried == ([] if attention == "flex" else [
        "attention blocked", "attention varlen_attn", "attention flex", "attention",
        "micro-batch 3 units", "micro-batch 2 units", "micro-batch"])
