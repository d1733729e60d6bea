"""`asyncrl bench`: measurements against other systems and the limits of this machine. Start reading in `command.py`.

    app.py        which benches there are
    step.py       whole RL steps                                     each says what it measures and how, which options it has, how
    train.py      training alone                                     its runs follow each other, and what is counted
    generate.py   generation alone; sweep.py: decode steps by sequences and context
    head.py       the LM head alone: memory and time
    overlap.py    real lanes on one core each: a step against either side alone; what hand-overs of weights cost
    overlap_dry.py  dry runs on two devices: the runtime by itself (in this process: nothing is computed)
    weights.py    new weights while requests are in flight: what they see, and what it takes, in workers and with AsyncLLM
    transport.py  handing groups over; transport_report.py: its medians, goals, tables, plot

    command.py    one call: options, the folder that it works in, its children, the files that it writes
    figures.py    runs of several sides in turns (step, train, generate): medians, ratios, shares of the limit, table, plot
    plots.py      Markdown and matplotlib
    job.py        one side's task as data; prompts, made once
    processes.py  one child process per run; the peers' own virtual environments

    child.py      what runs in asyncrl's own child processes: one JSON job in, one JSON line out. child_*.py, machine.py, models.py
    peers/        scripts that run inside a peer's environment; side.py: what every side has; way.py, the only one that imports
                  asyncrl: what every side of transport does with a group that was handed to it

The parent process imports no torch: it would only take memory and threads from the sides that are measured.
"""
