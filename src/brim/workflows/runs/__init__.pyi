from .child import (
    Child as Child,
    Ended as Ended,
    Stop as Stop,
    TrainOrder as TrainOrder,
    run_child as run_child,
    stopping as stopping,
)
from .files import (
    RunNotes as RunNotes,
    card_apart as card_apart,
    flat as flat,
    json_lines as json_lines,
    local_name as local_name,
    model_card as model_card,
    read_json as read_json,
    settings_of as settings_of,
    template_texts as template_texts,
    with_day as with_day,
    with_day_of_run as with_day_of_run,
    with_stored_template as with_stored_template,
    with_trained_weights as with_trained_weights,
)
from .results import (
    Comparison as Comparison,
    EvaluateResult as EvaluateResult,
    ExportResult as ExportResult,
    PredictResult as PredictResult,
    TrainResult as TrainResult,
)
from .serving import Tell as Tell
