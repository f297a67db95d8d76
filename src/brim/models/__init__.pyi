from .adapter_folder import (
    CONFIG as CONFIG,
    WEIGHTS as WEIGHTS,
    AdapterFolder as AdapterFolder,
    continued as continued,
    open_adapter as open_adapter,
)
from .adapters import (
    RowDropout as RowDropout,
    as_transformers_takes_it as as_transformers_takes_it,
    is_adapted as is_adapted,
    own_dropout as own_dropout,
)
from .chunked_loss import chunk_rows as chunk_rows, fullest_chunks as fullest_chunks
from .device import (
    Precision as Precision,
    cast_products as cast_products,
    device_facts as device_facts,
    device_name as device_name,
    peak_bytes as peak_bytes,
    pick_device as pick_device,
    precision as precision,
)
from .folder import ModelFolder as ModelFolder, locate as locate, require_floors as require_floors
from .load import (
    LLM as LLM,
    LOADING_ERRORS as LOADING_ERRORS,
    equip as equip,
    explain as explain,
    forget_generation_settings as forget_generation_settings,
    load_base as load_base,
    load_llm as load_llm,
    model_note as model_note,
    no_library_bars as no_library_bars,
    no_library_warnings as no_library_warnings,
)
from .loss import (
    LogitHead as LogitHead,
    base_model as base_model,
    next_token_loss as next_token_loss,
    next_token_scores as next_token_scores,
    target_logits as target_logits,
)
from .needs import notes_on_this_machine as notes_on_this_machine, require_trainable as require_trainable
from .quantization import (
    is_stored_quantised as is_stored_quantised,
    require_bitsandbytes as require_bitsandbytes,
    skipped_modules as skipped_modules,
    stored_choices as stored_choices,
    unquantised_experts as unquantised_experts,
    with_stored_quantization as with_stored_quantization,
    without_quantization as without_quantization,
)
from .untrusted import (
    read_json as read_json,
    refusals as refusals,
    require_plain_files as require_plain_files,
    without_auto_map as without_auto_map,
)
