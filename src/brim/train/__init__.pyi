from .figures import (
    Curve as Curve,
    Observer as Observer,
    Observers as Observers,
    Record as Record,
    RunFigures as RunFigures,
    history as history,
)
from .gradient import MicroBatchPass as MicroBatchPass
from .job import (
    build_job as build_job,
    export_model as export_model,
    stopping_of as stopping_of,
)
from .logs import Peak as Peak, RunLogs as RunLogs
from .loop import Loop as Loop, interruption as interruption, stop_request as stop_request
from .optimizer import (
    LearningRate as LearningRate,
    build_host_optimizer as build_host_optimizer,
    build_optimizer as build_optimizer,
    host_obstacles as host_obstacles,
)
from .run_folder import RunFolder as RunFolder, package_versions as package_versions
from .schedule import RunLength as RunLength
from .update import clip_gradients as clip_gradients
