"""The sentry: a second process that ends the run if no thread of the run executes Python any more.

The watchdog starts `sentry.py SECONDS PREFIX` and writes to the sentry's standard input at every check. PREFIX begins the message.
A closure that holds the GIL, such as a runaway regular expression, stops the watchdog too, and the sentry gets no input. The sentry
counts its own short waits, and only while the run is not suspended, so that a suspension is not taken for a standstill.
"""

import os
import select
import signal
import sys


def main(limit_s: float, prefix: str) -> None:
    """Send SIGABRT to the parent process after `limit_s` without input. Returns when the parent ends or closes the input."""
    run_pid, step_s, silent_s = os.getppid(), min(1.0, limit_s / 4), 0.0
    while silent_s < limit_s:
        if select.select([0], [], [], step_s)[0]:
            silent_s = 0.0
            if not os.read(0, 4096):
                return
        elif not _is_suspended(run_pid):
            silent_s += step_s
        if os.getppid() != run_pid:
            return
    reason = f"{prefix}no thread has run Python for {silent_s:.0f} s: something holds the interpreter's lock"
    print(f"\n=== asyncrl watchdog: {reason}; ending the process by SIGABRT ===", file=sys.stderr, flush=True)
    # On this signal `faulthandler` in the run prints all stacks.
    os.kill(run_pid, signal.SIGABRT)


def _is_suspended(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # not Linux
        return False


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2])
