"""A shell of one job, as far as job control goes: it runs a command as the terminal's foreground job and tells how it fares.

At SIGUSR1 it brings the job to the foreground again, as ``fg`` does; at SIGUSR2 it kills it.
"""

import os
import signal
import sys

TERMINAL = 0
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.pthread_sigmask(
    signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP}
)
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.tcsetpgrp(TERMINAL, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.execv(sys.argv[1], sys.argv[1:])
print("JOB", job, flush=True)
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    if not os.WIFSTOPPED(status):
        break
    os.tcsetpgrp(TERMINAL, os.getpgrp())
    print("STOPPED", flush=True)
    signal.sigwait({signal.SIGUSR1})
    os.tcsetpgrp(TERMINAL, job)
    os.killpg(job, signal.SIGCONT)
os.tcsetpgrp(TERMINAL, os.getpgrp())
code = os.waitstatus_to_exitcode(status)
print("STATUS", code if code >= 0 else 128 - code, flush=True)
