"""The Multi-Task Manager: admission and fairness, rounds, buffer, commit, recovery. All of it short transactions."""
