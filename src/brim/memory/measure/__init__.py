"""What a workload takes on the device at hand, measured: peaks by phase, memory over time, what stayed.

`process.measure` is the way in; `result` says what comes back. Neither imports torch: the work is done in processes of
their own, by `python -m brim.memory.measure`, so that one measurement does not stand in another's memory.
"""
