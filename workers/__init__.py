"""What runs in a run's actors: engines that sample, workers that train, and users' code in its own processes.

rollout/ around engine/   the actor of an engine, and vLLM: plain samples, episodes/, agents/
roles/ around model/      the actors that train or score, and the training engine
user_code/                rewards, environments, tools and other functions of users
config/ batch/ images/    settings, batches and pictures that all of them use
"""
