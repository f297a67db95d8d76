from .comparison import (
    Runs as Runs,
    Summary as Summary,
    comparison_notes as comparison_notes,
    comparison_tables as comparison_tables,
    figure_lines as figure_lines,
    final_split as final_split,
    summaries as summaries,
)
from .curves import curves_plot as curves_plot, history_plot as history_plot
from .memory import (
    LOOKS as LOOKS,
    Card as Card,
    memory_lines as memory_lines,
    memory_table as memory_table,
    napkin_table as napkin_table,
    total_by_part as total_by_part,
)
from .memory_figure import (
    memory_plot as memory_plot,
    prediction_tables as prediction_tables,
    variants_plot as variants_plot,
)
from .picture import PageTable as PageTable, check_picture as check_picture, save_picture as save_picture
from .plan import plan_table as plan_table
from .screen import Screen as Screen, listening as listening, show as show
