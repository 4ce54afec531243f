"""Turn records of files into prompts.

files --records--> one dictionary a record --prompts: template, tokenizer--> an endless, seeded stream
curriculum: a user's order    identity: do the data match a checkpoint's?
"""
