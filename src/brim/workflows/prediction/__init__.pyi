from .chat import (
    Conversation as Conversation,
    require_one as require_one,
    stream_text as stream_text,
    template_texts as template_texts,
    with_day_of_run as with_day_of_run,
    with_stored_template as with_stored_template,
)
from .embedding import (
    Activations as Activations,
    Asked as Asked,
    activations_of as activations_of,
    check_pooling as check_pooling,
)
from .evaluation import (
    Contender as Contender,
    base_of as base_of,
    compared as compared,
    contender as contender,
    evaluate_splits as evaluate_splits,
    evaluated as evaluated,
    scored as scored,
    size_for_generating as size_for_generating,
)
from .output import check_output as check_output, summary_path as summary_path, write_predictions as write_predictions
from .prompts import (
    OnError as OnError,
    OnOverlong as OnOverlong,
    check_on_error as check_on_error,
    check_on_overlong as check_on_overlong,
    prompts_of_texts as prompts_of_texts,
    require_rows as require_rows,
)
from .run import (
    Wanted as Wanted,
    answered as answered,
    check_wanted as check_wanted,
    plan_prediction as plan_prediction,
    predict as predict,
)
