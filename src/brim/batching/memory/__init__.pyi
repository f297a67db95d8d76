from .finder import Found as Found, Probe as Probe, Search as Search, find_batch_size as find_batch_size
from .meters import (
    AddressSpacePeak as AddressSpacePeak,
    Counts as Counts,
    PeakMeter as PeakMeter,
    ResidentPeak as ResidentPeak,
    peak_meter as peak_meter,
)
from .oom import (
    OutOfMemory as OutOfMemory,
    attempt as attempt,
    free_caches as free_caches,
    is_out_of_memory as is_out_of_memory,
    or_explain as or_explain,
    random_states as random_states,
    restore_random_states as restore_random_states,
    second_try as second_try,
)
from .prober import (
    Prober as Prober,
    gradients_at_hand as gradients_at_hand,
    no_trace as no_trace,
    probed as probed,
    standing_for as standing_for,
)
