from .batch_rules import (
    EFFECTIVE as EFFECTIVE,
    accumulates as accumulates,
    default_rows as default_rows,
    is_sized_by_memory as is_sized_by_memory,
)
from .findings import (
    folded as folded,
    is_within as is_within,
    misspelt as misspelt,
    nearest as nearest,
    shortened as shortened,
    show as show,
)
from .introspect import json_schema as json_schema
from .load import (
    LoadedConfig as LoadedConfig,
    as_override as as_override,
    examine_config as examine_config,
    load_config as load_config,
    require_trust_said_again as require_trust_said_again,
    with_labels_matched as with_labels_matched,
)
from .prompt_rules import (
    MAX_STEPS as MAX_STEPS,
    LabelReader as LabelReader,
    Reading as Reading,
    category_rules as category_rules,
)
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
from .template import (
    CONTEXT as CONTEXT,
    LABELS as LABELS,
    SAMPLE as SAMPLE,
    Parts as Parts,
    names as names,
    pattern_fault as pattern_fault,
    prompt_columns as prompt_columns,
    prompt_parts as prompt_parts,
    render as render,
    template_text as template_text,
    template_with_task as template_with_task,
)
from .yaml import (
    MASK as MASK,
    KeyPath as KeyPath,
    dotted as dotted,
    dump as dump,
    mask_login as mask_login,
    mask_secrets as mask_secrets,
    mask_text as mask_text,
    read_yaml as read_yaml,
    yaml_files as yaml_files,
)
