from .dealing import Claims as Claims, deal as deal
from .launch import (
    Place as Place,
    launch_processes as launch_processes,
    leave_message as leave_message,
    num_processes as num_processes,
    watch_parent as watch_parent,
)
from .ranks import (
    ALONE as ALONE,
    PeerError as PeerError,
    Ranks as Ranks,
    group_of_one as group_of_one,
    joined as joined,
    timeout_of_environment as timeout_of_environment,
)
from .reduction import (
    Share as Share,
    gradient_sum as gradient_sum,
)
from .sharding import (
    Sharded as Sharded,
    box_of as box_of,
    is_sharded as is_sharded,
    like as like,
    local as local,
    mesh_of as mesh_of,
    part_of as part_of,
    sharding_obstacles as sharding_obstacles,
    whole as whole,
    whole_on_first as whole_on_first,
)
