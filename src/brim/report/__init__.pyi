from .comparison import (
    Estimate as Estimate,
    Runs as Runs,
    Spread as Spread,
    Summary as Summary,
    comparison_lines as comparison_lines,
    comparison_notes as comparison_notes,
    cost_table as cost_table,
    figure_lines as figure_lines,
    final_split as final_split,
    loss_tables as loss_tables,
    markdown as markdown,
    run_table as run_table,
    summaries as summaries,
    verdict as verdict,
)
from .curves import curves_plot as curves_plot, history_plot as history_plot
from .memory import (
    LOOKS as LOOKS,
    Card as Card,
    Filled as Filled,
    Part as Part,
    gib as gib,
    headline as headline,
    memory_table as memory_table,
    napkin_table as napkin_table,
    operator_and_module as operator_and_module,
    total_by_part as total_by_part,
)
from .memory_figure import Overlay as Overlay, memory_plot as memory_plot, prediction_tables as prediction_tables
from .picture import (
    PageTable as PageTable,
    check_picture as check_picture,
    require_matplotlib as require_matplotlib,
    save_picture as save_picture,
)
from .plan import generation_table as generation_table, plan_table as plan_table
from .screen import Screen as Screen, both as both, listening as listening, show as show
from .squares import squares_plot as squares_plot
