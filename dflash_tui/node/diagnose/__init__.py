"""Why a job failed, from its log: `python -I -S …/node/__main__.py diagnose`, a child of the agent; also for a local file.

    read.py        the file in lines, bounded in memory and time
    lines.py       a line without colours and what vLLM, torchrun, Ray and loggers put before it
    tracebacks.py  tracebacks of processes that write at once, in chains from the first exception raised to the last
    rules.py       what a row of the tables is; engine.py, machine.py and models.py hold the rows
    find.py        the one cause among all that
    main.py        the child; request.py: the agent's part

What comes out, as JSON: `{"failed": BOOL, "cause": {"id", "text", "line", "quote"} or null, "remedy": LINE or null,
"source": {"file", "line"} or null, "lines": COUNT, "skipped_bytes": COUNT}`. Lines count from 1; `cause.line` is null where the
log does not show the cause (a job killed from outside). `source` is the innermost frame of the traceback of the root exception.
"""
