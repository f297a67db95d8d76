from .candidates import rows_of_shape as rows_of_shape
from .evaluation import batches_for as batches_for
from .generation import plan_job as plan_job, recut as recut
from .plan import (
    Candidate as Candidate,
    GenerationPlan as GenerationPlan,
    LengthSummary as LengthSummary,
    LongRow as LongRow,
    PhasePlan as PhasePlan,
    TrainingPlan as TrainingPlan,
)
from .request import (
    GenerationRequest as GenerationRequest,
    PlanRequest as PlanRequest,
    at_hand as at_hand,
    cannot as cannot,
    generation_request as generation_request,
    rows_by_hand as rows_by_hand,
)
from .training import keep as keep, plan_run as plan_run, too_long as too_long
from .words import (
    generation_lines as generation_lines,
    generation_words as generation_words,
    short_plan as short_plan,
    training_words as training_words,
)
