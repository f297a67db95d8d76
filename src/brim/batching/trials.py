"""The sizes that a search has tried, and what is known from them."""

from __future__ import annotations

from brim.batching.ladder import Ladder
from brim.batching.probe import Fits, Probe
from brim.errors import ProbeError, Problem


class Trials:
    """Tries each size once, and keeps what came of it. A peak above the limit counts as a size that does not fit.

    limit_bytes: of peaks; None: only running out of memory counts. margin_bytes: of it, what sizes that have not been
    tried are to leave free, since peaks vary.
    """

    def __init__(self, fits: Fits, ladder: Ladder, *, limit_bytes: int | None = None, margin_bytes: int = 0) -> None:
        self.ladder = ladder
        self.limit_bytes = limit_bytes
        self.aim_bytes = None if limit_bytes is None else limit_bytes - margin_bytes
        self.probes: list[Probe] = []
        self._fits = fits
        self._verdicts: dict[int, bool] = {}

    @property
    def fitted(self) -> int:
        """The largest size that was executed and fitted; 0: none yet."""
        return max((size for size, verdict in self._verdicts.items() if verdict), default=0)

    @property
    def failed(self) -> int:
        """The smallest size above it that did not fit; the first that may not be tried where there is none."""
        fitted = self.fitted
        above = (size for size, verdict in self._verdicts.items() if not verdict and size > fitted)
        return min(above, default=self.ladder.beyond)

    @property
    def peaks(self) -> list[tuple[int, int]]:
        """Sizes that were run to their end and the peaks that they showed, ascending; also of those over the limit."""
        ended = (probe for probe in self.probes if probe.outcome == "fits" and probe.peak_bytes is not None)
        return sorted((probe.size, probe.peak_bytes or 0) for probe in ended)

    def try_size(self, size: int) -> bool:
        """Whether it fits. Raises ProbeError for a probe that shows nothing."""
        if size not in self._verdicts:
            probe = self._fits(size)
            _require_sound(probe, size)
            self.probes.append(probe)
            self._verdicts[size] = probe.outcome == "fits" and not self._is_over(probe)
        return self._verdicts[size]

    def _is_over(self, probe: Probe) -> bool:
        known = probe.peak_bytes is not None and self.limit_bytes is not None
        return known and (probe.peak_bytes or 0) > (self.limit_bytes or 0)


def _require_sound(probe: Probe, size: int) -> None:
    if probe.size != size:
        what = f"a probe of batch size {size} ran batch size {probe.size}"
        raise ProbeError(Problem(what=what, fix="let the step take as many rows as it is asked for"))
    if probe.outcome == "fits" and probe.steps < 1:
        what = f"the probe of batch size {size} says that it fits, and ran no step"
        fix = "let it run at least one step: a data loader of fewer rows than a batch yields none"
        raise ProbeError(Problem(what=what, expected="steps of at least 1", fix=fix))
