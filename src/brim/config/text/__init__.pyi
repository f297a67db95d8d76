from .reading import (
    MAX_DEPTH as MAX_DEPTH,
    Document as Document,
    KeyPath as KeyPath,
    Place as Place,
    contains as contains,
    dotted as dotted,
    is_within as is_within,
    read_source as read_source,
    read_yaml as read_yaml,
    value_at as value_at,
    with_value as with_value,
    yaml_files as yaml_files,
)
from .wording import (
    flow as flow,
    folded as folded,
    line as line,
    misspelt as misspelt,
    nearest as nearest,
    shortened as shortened,
    show as show,
)
from .writing import (
    MASK as MASK,
    dump as dump,
    mask_login as mask_login,
    mask_secrets as mask_secrets,
    mask_text as mask_text,
    secrets_in as secrets_in,
)
