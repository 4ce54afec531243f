"""Tasks in Harbor's format, a folder each: `rollout.environment=harbor:FOLDER`.

    FOLDER --task_folders--> tasks --records--> prompts with the tool `shell`
    record --environment--> the task's sandbox: files, commands of the policy, tests, reward

A capability: the spine names it, and does not import it.
"""
