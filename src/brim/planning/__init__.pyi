from .candidates import rows_of_pack as rows_of_pack, rows_of_shape as rows_of_shape
from .evaluation import plan_forward as plan_forward
from .generation import (
    cannot as cannot,
    generation_request as generation_request,
    plan_job as plan_job,
    recut as recut,
    rows_by_hand as rows_by_hand,
)
from .plan import (
    Candidate as Candidate,
    ForwardPlan as ForwardPlan,
    GenerationPlan as GenerationPlan,
    LengthSummary as LengthSummary,
    LongRow as LongRow,
    PhasePlan as PhasePlan,
    TrainingPlan as TrainingPlan,
    Unplanned as Unplanned,
)
from .request import (
    GenerationRequest as GenerationRequest,
    PlanRequest as PlanRequest,
)
from .run import plan_run as plan_run
from .training import keep as keep
from .words import (
    generation_words as generation_words,
    scoring_lines as scoring_lines,
    short_plan as short_plan,
    too_long as too_long,
    training_words as training_words,
)
