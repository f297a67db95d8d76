from .labels import (
    MAX_STEPS as MAX_STEPS,
    LabelReader as LabelReader,
    Reading as Reading,
    characters_within as characters_within,
    pattern_fault as pattern_fault,
)
from .template import (
    CONTEXT as CONTEXT,
    LABELS as LABELS,
    SAMPLE as SAMPLE,
    TASK as TASK,
    Placeholder as Placeholder,
    Template as Template,
    is_plain_name as is_plain_name,
    joined_template as joined_template,
    prompt_columns as prompt_columns,
    prompt_template as prompt_template,
)
