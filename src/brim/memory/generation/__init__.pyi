from .streams import (
    DECODE as DECODE,
    FILL as FILL,
    PREFILL as PREFILL,
    brim_stream as brim_stream,
    full_prompts as full_prompts,
    generate_some as generate_some,
    peak_passes as peak_passes,
    slots_at_their_peak as slots_at_their_peak,
    static_stream as static_stream,
)
