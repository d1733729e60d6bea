"""The sentry: a process beside the run, which ends it where no thread of it runs Python any more.

A program of its own (`sentry.py SECONDS NAME`), run by path. The watchdog writes to its standard input as long as it looks. What
holds the interpreter's lock (a runaway regular expression does) stops the watchdog, too; and an alarm inside of the process would
count time in which that was suspended. Here steps are counted, and only while the run is not stopped.
"""

import os
import select
import signal
import sys


def main(seconds: float, name: str) -> None:
    """Ends with the run, or once that was silent for so long: by ending it."""
    run, step, silent = os.getppid(), min(1.0, seconds / 4), 0.0
    while silent < seconds:
        if select.select([0], [], [], step)[0]:
            silent = 0.0
            if not os.read(0, 4096):
                return
        elif not _stopped(run):
            silent += step
        if os.getppid() != run:
            return
    said = f"{name}no thread has run Python for {silent:.0f} s: something holds the interpreter's lock"
    print(f"\n=== asyncrl watchdog: {said}; ending the process by SIGABRT ===", file=sys.stderr, flush=True)
    os.kill(run, signal.SIGABRT)  # `faulthandler` prints all stacks at it


def _stopped(run: int) -> bool:
    try:
        with open(f"/proc/{run}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # no Linux
        return False


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
