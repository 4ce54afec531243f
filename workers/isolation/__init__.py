"""Users' code in processes of its own, which may raise, hang or die without harm to ours.

    process   Process: `python -m workers.isolation TARGET FD`, at the other end of a socket     rewards: one for long
    asking    ask: a new Process, one question, one answer                                       imports, trial calls
    forks     ForkPool: a Process that forks one for every user at a time                        an environment each

Whatever it runs, a process ends with its parent and ignores Ctrl-C. It is killed together with what it has started.
Objects go to it pickled; answers come back as JSON, so that nothing of the user's is unpickled beside ours.
"""
