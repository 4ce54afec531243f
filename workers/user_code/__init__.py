"""Users' code in its own processes, where it may raise, hang or die.

functions     find, describe, pickle and call once     rewards    a UserProcess for one run's samples
environments  a fork of a UserProcess for each episode   process    UserProcess, the mechanism of all
tools         a fork for each call of the policy
"""
