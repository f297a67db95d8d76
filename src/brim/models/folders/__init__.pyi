from .adapter import (
    CONFIG as CONFIG,
    WEIGHTS as WEIGHTS,
    AdapterFolder as AdapterFolder,
    continued as continued,
    differs as differs,
    open_adapter as open_adapter,
    require_same as require_same,
    unusable as unusable,
)
from .model import (
    QUANTIZATION as QUANTIZATION,
    Initialize as Initialize,
    ModelFolder as ModelFolder,
    local_folder as local_folder,
    locate as locate,
    require_floors as require_floors,
)
from .untrusted import (
    read_json as read_json,
    refusals as refusals,
    require_plain_files as require_plain_files,
    without_auto_map as without_auto_map,
)
