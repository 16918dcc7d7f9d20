"""A command that tells each signal it gets, and ends with status 7 at the last one there is (SIGRTMAX)."""

import os
import signal
import sys

heard = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}
if "--stoppable" in sys.argv:
    heard -= {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}
signal.pthread_sigmask(signal.SIG_BLOCK, heard)
print("READY", os.getpid(), flush=True)
while (number := signal.sigwait(heard)) != signal.SIGRTMAX:
    print("GOT", int(number), flush=True)
print("END", flush=True)
sys.exit(7)
