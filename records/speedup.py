"""How much faster, and how sure is that? The statistics of losses and times.

The speed-up is the baseline's mean timed training over the group's. Its interval holds every ratio
r at which Welch's t-test [1] does not tell the baseline's times from r times the group's: Fieller's
interval [2] with Welch's degrees of freedom. So it leaves out 1 just when Welch's p is below 0.05.

[1] Welch, The generalization of Student's problem when several different population variances are
    involved, Biometrika 34 (1947)
[2] Fieller, Some problems in interval estimation, J. R. Stat. Soc. B 16 (1954)
"""

import math
import statistics
from dataclasses import dataclass

import verify
from logs import Run

LEVEL = 0.95             # of the interval of a speed-up
MOST_RUNS = 10_000       # more are not planned for


def sound(value: float | None) -> bool:
    """Is it there, finite, and small enough to stay so?"""
    return value is not None and abs(value) < verify.TOO_LARGE


def sd(values: list[float]) -> float | None:
    """Standard deviation with n - 1; None for fewer than two values, or where one is not sound."""
    return statistics.stdev(values) if len(values) > 1 and all(map(sound, values)) else None


def mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values and all(map(sound, values)) else None


def time_to_target(run: Run, target: float) -> float | None:
    """Seconds of timed training to the target, on a line between two validations; or None.

    With 4.0 at 10 s and 3.0 at 20 s, a target of 3.25 is met at 17.5 s.
    """
    before = None
    for val in run.validations:
        if not sound(val.time_ms) or not sound(val.loss):
            continue
        if val.loss <= target:
            if before is None:
                return val.time_ms / 1000
            part = (before.loss - target) / (before.loss - val.loss)
            return (before.time_ms + part * (val.time_ms - before.time_ms)) / 1000
        before = val
    return None


def more_runs(losses: list[float], target: float) -> float | None:
    """Runs that are lacking until p < 0.01, if mean and sd stay as they are.

    inf where no number would do, or more than MOST_RUNS; None without a spread or a target.
    """
    import numpy as np
    from scipy import stats

    spread = sd(losses)
    if not spread or math.isnan(target):
        return None
    counts = np.arange(len(losses), MOST_RUNS + 1)
    t = (target - mean(losses)) / spread * np.sqrt(counts)
    enough = counts[stats.t.sf(t, counts - 1) < verify.MAX_P]
    return int(enough[0]) - len(losses) if enough.size else math.inf


def welch_p(base: list[float], seconds: list[float], ratio: float = 1.0) -> float:
    """Two-sided p of Welch's t-test [1] that the mean of base is ratio times that of seconds."""
    from scipy import special

    v = statistics.variance(base) / len(base)
    w = ratio ** 2 * statistics.variance(seconds) / len(seconds)
    t = (mean(base) - ratio * mean(seconds)) / math.sqrt(v + w)
    freedom = (v + w) ** 2 / (v ** 2 / (len(base) - 1) + w ** 2 / (len(seconds) - 1))
    return float(2 * special.stdtr(freedom, -abs(t)))


@dataclass(frozen=True)
class SpeedUp:
    """How many times as fast as the baseline; None where there are no times, or too few."""
    ratio: float | None = None
    low: float | None = None     # of the interval, 0 and inf where it is open
    high: float | None = None
    p: float | None = None       # of Welch's test

    def __str__(self) -> str:
        if self.ratio is None:
            return "no times"
        if self.low is None:
            return f"{self.ratio:.4f} times as fast, with no interval from so few times"
        return (f"{self.ratio:.4f} times as fast ({LEVEL:.0%} interval {self.low:.4f} to "
                f"{self.high:.4f}), Welch p = {self.p:.2g}")


def speed_up(base: list[float], seconds: list[float]) -> SpeedUp:
    """Ratio of mean times, its interval [2], and Welch's p [1]."""
    from scipy.optimize import brentq

    if not base or not seconds or min(base + seconds) <= 0:
        return SpeedUp()
    ratio = mean(base) / mean(seconds)
    if len(base) < 2 or len(seconds) < 2 or not (sd(base) or sd(seconds)):
        return SpeedUp(ratio)

    def excess(r: float) -> float:
        return welch_p(base, seconds, r) - (1 - LEVEL)

    def end(factor: float, open_end: float) -> float:
        """Where excess is 0: in steps outward from the ratio that double, then by bisection."""
        inside, outside = ratio, ratio * factor
        while excess(outside) > 0:
            if not 1e-6 < factor < 1e6:
                return open_end
            factor *= factor
            inside, outside = outside, ratio * factor
        return float(brentq(excess, inside, outside, xtol=1e-12 * ratio))

    return SpeedUp(ratio, end(1 / 1.0001, 0.0), end(1.0001, math.inf), welch_p(base, seconds))
