"""Runs a command as a child that dies with its parent: `exec_child.py SIGNAL PARENT UID GID COMMAND...`.

A file of its own, run with `python -I -S`, because the death signal must be set in the child itself, after its
identity is (the kernel forgets the signal when that changes), and threads make code between fork and exec unsafe.
"""

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1

death_signal, parent, uid, gid = map(int, sys.argv[1:5])
command = sys.argv[5:]
if uid != os.geteuid():
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, death_signal) != 0:
    sys.exit("prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != parent:  # it died before the signal was set
    sys.exit(1)
os.execvp(command[0], command)
