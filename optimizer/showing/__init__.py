"""Show plain data to people: texts for numbers, plots, and HTML that loads nothing from elsewhere."""

from optimizer.showing.pages import (
    accuracy_plot,
    checkpoint_plot,
    count_text,
    fragment,
    memory_plot,
    metric_bar,
    metric_plot,
    number_text,
    page,
    parity_plot,
    percent_text,
    profile_rows,
    rate_text,
    seconds_text,
    size_text,
)

__all__ = [
    "accuracy_plot",
    "checkpoint_plot",
    "count_text",
    "fragment",
    "memory_plot",
    "metric_bar",
    "metric_plot",
    "number_text",
    "page",
    "parity_plot",
    "percent_text",
    "profile_rows",
    "rate_text",
    "seconds_text",
    "size_text",
]
