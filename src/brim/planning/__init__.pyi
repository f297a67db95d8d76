from .candidates import rows_of_shape as rows_of_shape
from .engines import (
    constraint_of as constraint_of,
    engine_by_hand as engine_by_hand,
    settings_of as settings_of,
    vllm_engine as vllm_engine,
)
from .evaluation import batches_for as batches_for
from .generation_launch import (
    plan_generation as plan_generation,
    planned_engine as planned_engine,
    require_one_fits as require_one_fits,
    tokens_of_one as tokens_of_one,
)
from .phases import PlanRequest as PlanRequest
from .plan import (
    Candidate as Candidate,
    GenerationPlan as GenerationPlan,
    LengthSummary as LengthSummary,
    LongRow as LongRow,
    PhasePlan as PhasePlan,
    TrainingPlan as TrainingPlan,
)
from .request import rows_by_hand as rows_by_hand
from .training import keep as keep, plan_run as plan_run, remember as remember, too_long as too_long
from .words import (
    generation_words as generation_words,
    short_plan as short_plan,
    training_words as training_words,
)
