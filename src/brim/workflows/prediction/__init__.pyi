from .chat import Conversation as Conversation, stream_text as stream_text
from .embedding import Activations as Activations, Collection as Collection, check_pooling as check_pooling
from .evaluation import (
    Contender as Contender,
    base_of as base_of,
    evaluate_splits as evaluate_splits,
    size_for_generating as size_for_generating,
)
from .members import num_members as num_members
from .output import (
    Wanted as Wanted,
    check_output as check_output,
    summary_path as summary_path,
    write_predictions as write_predictions,
)
from .prompts import (
    OnError as OnError,
    OnOverlong as OnOverlong,
    check_policies as check_policies,
    prompts_of_texts as prompts_of_texts,
    require_rows as require_rows,
)
from .run import answered as answered, plan_prediction as plan_prediction, predict as predict
from .scoring import loading_note as loading_note, scorer as scorer
