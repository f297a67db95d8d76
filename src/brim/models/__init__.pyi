from .adapters import is_adapted as is_adapted
from .base import (
    LOADING_ERRORS as LOADING_ERRORS,
    load_base as load_base,
    no_library_bars as no_library_bars,
    no_library_warnings as no_library_warnings,
    read_architecture as read_architecture,
)
from .device import (
    Precision as Precision,
    cast_products as cast_products,
    device_facts as device_facts,
    device_name as device_name,
    peak_bytes as peak_bytes,
    pick_device as pick_device,
    precision as precision,
)
from .load import LLM as LLM, equip as equip, load_llm as load_llm, model_note as model_note
from .merging import PassingMerge as PassingMerge, merge_adapter as merge_adapter
from .needs import notes_on_this_machine as notes_on_this_machine, require_trainable as require_trainable
from .quantization import (
    require_bitsandbytes as require_bitsandbytes,
    stored_choices as stored_choices,
    unquantised_experts as unquantised_experts,
    with_stored_quantization as with_stored_quantization,
)
