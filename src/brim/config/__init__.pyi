from .batch_rules import (
    EFFECTIVE as EFFECTIVE,
    accumulates as accumulates,
    default_rows as default_rows,
    is_sized_by_memory as is_sized_by_memory,
)
from .introspect import json_schema as json_schema
from .load import (
    LoadedConfig as LoadedConfig,
    as_override as as_override,
    examine_config as examine_config,
    load_config as load_config,
    require_trust_said_again as require_trust_said_again,
)
from .prompt_rules import category_rules as category_rules
from .resolution import (
    Choice as Choice,
    DeviceFacts as DeviceFacts,
    Resolution as Resolution,
    bounded_by_rows as bounded_by_rows,
    new_tokens as new_tokens,
    resolve as resolve,
    with_effective_rows as with_effective_rows,
)
from .schedule_rules import (
    WAYS as WAYS,
    has_beta2 as has_beta2,
    moves_batch as moves_batch,
    parse_batch_steps as parse_batch_steps,
    ways_given as ways_given,
)
