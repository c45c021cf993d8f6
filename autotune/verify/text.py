"""Write the lines that show the result of a verification."""

from __future__ import annotations

from autotune.core.units import format_bytes, format_seconds
from autotune.results.wording import counted_in
from autotune.verify.comparison import describe_speed
from autotune.verify.throughput import Verification, notes


def verification_lines(verification: Verification) -> list[str]:
    """Return lines with promised and obtained figures side by side, and notes."""
    target, obtained = verification.target, verification.obtained
    word = counted_in(target.report.workload)
    promised, promise, speed = target.promised, verification.promise, verification.speed
    peak = verification.training_peak_bytes
    # Both ends of a lopsided interval take more room.
    width = max(18, *(len(describe_speed(each)) for each in (promise, speed) if each is not None))
    lines = [f"{'':9} {'promised':>{width}} {'obtained':>{width}}"]
    if speed is not None and peak is not None:
        lines += [
            f"{verification.rate_unit:9} {describe_speed(promise):>{width}} {describe_speed(speed):>{width}}  "
            f"{speed.mean / promise.mean - 1:+.1%}",
            f"{'in use' if verification.judges_allocated else 'peak':9} "
            f"{format_bytes(verification.promised_peak_bytes):>{width}} {format_bytes(peak):>{width}}  "
            f"{peak / verification.promised_peak_bytes - 1:+.1%}",
        ]
        peaks, seconds = obtained.peak_bytes, obtained.pause_seconds
        kind = "allocated" if verification.judges_allocated else "reserved"
        for what, name in (("evaluate", f"evaluation at batch {obtained.evaluation_batch_size}"), ("save", "save")):
            if what in peaks:
                took = format_seconds(seconds[what])
                lines.append(f"  by the end of the {name}: {format_bytes(getattr(peaks[what], kind))}; it took {took}")
        if obtained.joules_per_sample is not None:
            joules = promised.joules_per_sample
            before = f", {joules:.3g} J promised" if joules is not None else ""
            lines.append(f"  {obtained.joules_per_sample:.3g} J a {word}{before}")
        lines.append(f"  {verification.steps_timed} steps, {verification.samples_timed:,} {word}s, were timed")
    lines += [f"  note: {note}" for note in notes(verification)]
    return lines if verification.misses() else [*lines, verification.verdict_line()]
