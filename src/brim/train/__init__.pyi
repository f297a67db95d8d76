from .checkpoint import (
    Checkpoint as Checkpoint,
    CheckpointStore as CheckpointStore,
    TrainState as TrainState,
    restore_weights as restore_weights,
)
from .figures import (
    Curve as Curve,
    Observer as Observer,
    Observers as Observers,
    Record as Record,
    RunFigures as RunFigures,
    binned as binned,
    history as history,
    run_figures as run_figures,
)
from .gradient import MicroBatchPass as MicroBatchPass
from .job import (
    build_job as build_job,
    export_model as export_model,
    learning_rate_of as learning_rate_of,
    rows_digest as rows_digest,
    stopping_of as stopping_of,
)
from .logs import MetricsLog as MetricsLog, Peak as Peak, TensorBoardLog as TensorBoardLog
from .loop import Loop as Loop, interruption as interruption, stop_request as stop_request
from .optimizer import (
    LearningRate as LearningRate,
    build_optimizer as build_optimizer,
    states_in_32_bits as states_in_32_bits,
)
from .run_folder import (
    RunFolder as RunFolder,
    check_run_folder as check_run_folder,
    create_run_folder as create_run_folder,
    held as held,
    open_run_folder as open_run_folder,
    package_versions as package_versions,
    read_only as read_only,
    require_whole_model as require_whole_model,
    write_environment as write_environment,
)
from .schedule import RunLength as RunLength, length_of as length_of
from .update import clip_gradients as clip_gradients
