"""A sample of several turns: policy and environment take turns, and the chat template makes the next prompt.

Read `episode` first. It holds token ids; `conversation` and `history` hold the messages behind them.
"""
