"""Reads the logs of training runs: ours, and every text format that modded-nanogpt has published.

    runs = read_runs("records/2026-12-01_TinyBaseline")      a folder, or one file

What a log holds is data, never code: nothing is evaluated, imported or executed. A line that looks
like a result and has no place in a run is counted in `Run.unplaced`, never guessed at.
"""

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Validation:
    step: int
    loss: float             # nats per token; may be nan
    time_ms: float | None   # timed training until here; None where the log has no time


@dataclass(frozen=True)
class Step:
    step: int
    loss: float | None      # training loss, where the log has it
    time_ms: float | None   # timed training until the end of this step


@dataclass(frozen=True)
class Run:
    """One run of one file. What the log does not say is None."""
    path: Path
    index: int                            # of the run within its file
    record: str                           # name of the folder that stands for the record
    format: str                           # "jsonl" (ours), "text", "llm.c"
    validations: tuple[Validation, ...]
    steps: tuple[Step, ...]               # step lines, in order
    planned: int | None                   # steps of the schedule
    last_step: int
    complete: bool                        # the last planned step has a validation
    time_ms: float | None                 # timed training, as printed last
    step_avg_ms: float | None             # as printed last
    seed: int | None = None
    tokens_per_step: float | None = None  # mean, where it changes within a run
    torch: str | None = None
    gpu: str | None = None                # "NVIDIA H100 80GB HBM3"; of ours on a CPU, the CPU's name
    gpus: int | None = None               # number listed
    peak_alloc_mib: int | None = None
    peak_reserved_mib: int | None = None
    program_sha256: str | None = None
    track: str | None = None              # ours: "fineweb" or "tiny"
    target: float | None = None           # nats per token, of the run's own settings
    versions: dict = field(default_factory=dict)    # python, torch, triton, cuda, driver ...
    conditions: tuple[dict, ...] = ()     # ours: clocks, power, temperature at each validation
    energy_j: float | None = None
    unplaced: int = 0                     # lines that look like results and have no place

    @property
    def final_loss(self) -> float | None:
        """Loss of the last validation, nats per token; None without one."""
        return self.validations[-1].loss if self.validations else None
