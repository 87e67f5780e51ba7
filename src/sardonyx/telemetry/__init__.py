"""What the stages report: graphs, operators, times, progress, dumps, intercepted calls, verification."""
