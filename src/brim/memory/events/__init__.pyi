from .stream import (
    CATEGORIES as CATEGORIES,
    Category as Category,
    EventStream as EventStream,
    Phase as Phase,
    Place as Place,
    Weight as Weight,
    categorize as categorize,
)
from .work import (
    Depth as Depth,
    Unit as Unit,
    Work as Work,
    WorkCount as WorkCount,
    WorkCounter as WorkCounter,
    WorkPhase as WorkPhase,
    WorkPlace as WorkPlace,
    depth_of as depth_of,
)
