"""Try what plays the policy's episodes, without a model: environments, tools, agents.

policies --turns--> play --episodes--> checks, rewards, failures --> findings
tools: calls instead of turns. agents: policies behind an HTTP address
"""
