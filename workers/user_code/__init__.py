"""Users' code in processes of its own, which may raise, hang or die without harm to ours.

functions     found, described, pickled; called once        rewards         a UserProcess for one run's samples
environments  a fork of a UserProcess for each episode      process         UserProcess, the mechanism of all
"""
