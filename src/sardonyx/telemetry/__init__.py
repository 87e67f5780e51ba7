"""What the stages report: graphs, operators, times, progress, models as they were, and whether results agree."""
