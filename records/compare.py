"""Is it faster, by how much, and how sure is that? Compares the runs of any logs, ours or published.

    python records/compare.py records/PARENT records/NEW
"""

from dataclasses import dataclass

from logs import Run


@dataclass(frozen=True)
class Group:
    """Runs that are compared as one: those of a record, a file, a GPU."""
    name: str
    runs: tuple[Run, ...]

    @property
    def complete(self) -> tuple[Run, ...]:
        """The runs that came to their last planned step with a validation."""
        return tuple(run for run in self.runs if run.complete)

    @property
    def losses(self) -> list[float]:
        """Final losses of the complete runs, nats per token."""
        return [run.final_loss for run in self.complete if run.final_loss is not None]

    @property
    def seconds(self) -> list[float]:
        """Timed training of the complete runs."""
        return [run.time_ms / 1000 for run in self.complete if run.time_ms is not None]
