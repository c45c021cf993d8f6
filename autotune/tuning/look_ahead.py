"""Predict memory before the trials that depend on it, and run no predictions beside trials."""

from __future__ import annotations

from autotune.core.candidate import Arm
from autotune.tuning.forecast import Forecast
from autotune.tuning.plan import Plan


class LookAhead:
    """Asks for predictions as the plan needs them. Without a ``forecast`` nothing is predicted."""

    def __init__(
        self,
        forecast: Forecast | None,
        plan: Plan,
        *,
        beside_baseline: bool,
        everything: bool,
        doubtful_baseline: Arm | None = None,
    ) -> None:
        self._forecast = forecast
        self._plan = plan
        self._beside_baseline = beside_baseline
        """Whether predictions may run beside the baseline, whose speed is only a yardstick. Not where images are fed,
        or processes of the user's own code load data: preparing them takes the cores."""
        self._doubtful_baseline = doubtful_baseline
        """The baseline's arm where the model is so large that the baseline may not fit, which is then predicted first;
        ``None`` where it is not."""
        self._everything = everything
        """Whether a proposal needs all predictions, as one of Optuna's samplers does: it may be any candidate."""

    def is_ready(self) -> bool:
        """Return whether the next trial may start, once what it needs is predicted.

        Predictions and trials slow each other down. So they are waited for where no trial is under way, and where one
        is, the next trial waits for its end unless all that it needs is known.
        """
        forecast = self._forecast
        if forecast is None or forecast.is_complete:
            return True
        if self._plan.owes_baseline:
            if self._doubtful_baseline is not None and not self._plan.pending:
                forecast.settle(self._upcoming_arm)
                forecast.settle(lambda: self._doubtful_baseline)
            elif self._beside_baseline:
                forecast.begin(None if self._everything else self._upcoming_arm())
            return True
        if self._everything:
            if not self._plan.pending:
                forecast.complete()
            return not self._plan.pending
        step = self._plan.next()
        if step is not None and step.stage != "search":
            return True
        if self._plan.pending:
            arm = self._upcoming_arm()
            return arm is not None and forecast.is_settled(arm)
        forecast.settle(self._upcoming_arm)
        return True

    def _upcoming_arm(self) -> Arm | None:
        upcoming = self._plan.upcoming()
        if upcoming is None and not self._plan.pending:
            # Levers, whose memory is predicted before one is chosen.
            assert self._forecast is not None
            unknown = (arm for arm in self._plan.arms_that_save() if not self._forecast.is_settled(arm))
            return next(unknown, None)
        return upcoming.arm if upcoming is not None else None
