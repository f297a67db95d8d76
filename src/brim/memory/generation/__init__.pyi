from .passes import (
    DECODE as DECODE,
    FILL as FILL,
    PREFILL as PREFILL,
    full_prompts as full_prompts,
    generate_some as generate_some,
    peak_passes as peak_passes,
    slots_at_their_peak as slots_at_their_peak,
)
from .streams import brim_stream as brim_stream, static_stream as static_stream
